// The operands of gemm/packed_gemm.cu, in scratch, as its copies and products want them: slabs of 128 lines (rows of op(A),
// columns of op(B)) by 128 bytes of k, in the format of the matrix units, words exchanged (`exchanged`), zeros where
// the matrix has ended. A slab is one piece of memory, so nothing has to describe it to the copy engine.
//
// TF32: operands that lie along k, in rows of whole words, are not laid out (DIRECT_A, DIRECT_B): the copy engine makes the
// same format of the matrix itself.
//
// HALVES: float32 as two float16 numbers, high + low / 2^11, three products of which make up one of float32. Each line
// is scaled by a power of two so that the root of its mean square is 2^target to 2^(target + 1), which leaves its
// largest element below 2^15. Of elements from 2^-12 on the two hold all bits but at times the last; of smaller ones they
// are up to 2^-36 off. Lines of numbers beside 2^-55 to 2^70 are left to gemm/fp32_fallback.cu.
//
// Where that would leave much of the product, by what is known of its lines, the scaled numbers are cut in pieces instead
// (Format<PIECES>): three bfloat16 numbers that hold all their bits, six products of which make up one of float32. It takes
// twice as long as halves, a third of the time of multiply-adds.
#pragma once
#ifndef DIRECT_A
#define DIRECT_A 0
#define DIRECT_B 0
#endif
#include "sm90/wgmma.cuh"

constexpr int LINES = 128, SLAB = LINES * 128; // SLAB: bytes
constexpr int HALF = LINES / 2;                // lines that a block of gemm/pack.cu takes
constexpr int CHUNKS = 16, CHUNK = 2;          // gemm/pack.cu cuts k into CHUNKS parts, or into parts of CHUNK slabs
constexpr int MOST = UNIT == HALVES ? 3 : 1;   // numbers that one of an operand becomes, at most
constexpr int DEPTH = UNIT == TF32 ? 32 : 64;  // k of a slab
constexpr int ACROSS = TILE_N > LINES ? TILE_N / LINES : 1; // slabs of op(B) that a tile of TILE_N columns takes side
constexpr int TAKEN = TILE_N / ACROSS;                      // by side, and the lines of each
constexpr float LOW = 0x1p-11f;                // the unit of low
constexpr int WATCHED = 32;                    // slabs over which running sums are watched, at most
constexpr int TELLING = 16;                    // of these, the first ones, which must have enough products

// Of a block of gemm/packed_gemm.cu: how the copy engine finds operands that are brought as they lie.
struct alignas(128) Maps {
    TensorMap a, b;
};

// Of a line. A sum of its products with any other line, both scaled, is not to be trusted where it is below the sum of
// their floors, as it may show what small elements have lost; where it has stayed below the level of its row; or where
// the product of the shares, which all lines of a block have alike, is below 1: few products make it. late: nor are its
// sums of pieces. seldom: its products come so seldom, beside those of others, that a running sum tells nothing. lossy: it
// has elements so small that their last bits are lost, of each of which fill_slabs adds to the floor what that may cost.
struct alignas(16) Line {
    float down; // 1 / scale
    float floor, level, share;
    int late, seldom, lossy;
};

// What a chunk of k tells of a line.
struct alignas(16) Measured {
    double squares;
    float least, sum; // of magnitudes; the least that is not 0
    int count;        // that are not 0
};

constexpr int LISTED = 126;

// Of a tile of the result, the elements that gemm/fp32_fallback.cu computes; all of them where there are more than LISTED.
struct alignas(16) Rest {
    int count;
    uint16_t places[LISTED]; // row * 128 + column in the tile
};

// Of HALVES: of the tiles that know_lines asks, those that few products make.
struct alignas(128) Votes { // slabs are best copied from whole lines of the cache
    int count;
};

constexpr int MANY_VOTES = 16; // one of so many, as some that do not ask have more elements than their lists hold
constexpr int FEW_TILES = 512; // of LINES by LINES, so few that one of them by multiply-adds takes longer than all of them in pieces

// Where all that lies, for `batch` products of m x k and k x n. Slabs are counted by line, then by k.
struct Slabs {
    int64_t batch, m, n, k;
    int rows, columns;   // blocks of LINES lines of a matrix
    int64_t left, blocks; // such blocks of all matrices A, of A and B
    int depth, chunks;    // slabs along k, and the parts of them
    int across;           // tiles in a row of them
    int64_t tiles;        // of the results
    int asked;            // pairs of blocks of LINES that know_lines asks, of each matrix: all blocks are among them
    Votes *votes;
    Rest *rests;
    Line *lines;
    Measured *measured;
    char *slabs;
    Maps *maps;

    __device__ Slabs(int64_t batch, int64_t m, int64_t n, int64_t k, char *scratch) : batch(batch), m(m), n(n), k(k) {
        rows = (m + LINES - 1) / LINES;
        columns = (n + ACROSS * LINES - 1) / (ACROSS * LINES) * ACROSS;
        left = batch * rows;
        blocks = left + batch * columns;
        depth = (k + DEPTH - 1) / DEPTH;
        chunks = min((depth + CHUNK - 1) / CHUNK, CHUNKS);
        across = (n + TILE_N - 1) / TILE_N;
        tiles = left * across;
        asked = max(rows, columns);
        votes = (Votes *)scratch;
        rests = (Rest *)(votes + 1);
        lines = (Line *)(rests + tiles);
        measured = (Measured *)(lines + blocks * LINES);
        slabs = UNIT == HALVES ? (char *)(measured + chunks * blocks * LINES) : scratch;
        maps = (Maps *)slab(DIRECT_B ? left : blocks, 0, 1);
    }

    // HALVES: whether what know_lines has found speaks for pieces: a tile takes twice as long in pieces as in halves,
    // several times as long by multiply-adds.
    __device__ __forceinline__ bool in_pieces() const {
        return votes->count > 0 && (left * columns <= FEW_TILES || MANY_VOTES * votes->count > batch * asked);
    }

    // The first block of lines that is laid out.
    __device__ __forceinline__ int64_t first() const { return DIRECT_A ? left : 0; }

    // The `count` slabs that a block of lines becomes, one after another.
    __device__ __forceinline__ char *slab(int64_t block, int at, int count) const {
        return slabs + ((block - first()) * depth + at) * (count * SLAB);
    }
};
