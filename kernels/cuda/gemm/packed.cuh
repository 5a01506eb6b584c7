// Packed operands of gemm/packed_gemm.cu, in scratch. Both operands are K-major: their packed rows are the rows of op(A) and
// the columns of op(B). A packed tile is PACKED_ROWS rows by 128 bytes of K in the format of WGMMA, with the 128-byte swizzle
// (`swizzle_128b`), zero-padded. It is contiguous, so a plain bulk copy loads it.
//
// TF32: K-major matrices whose rows are a multiple of 16 bytes are not packed (DIRECT_A, DIRECT_B). TMA loads them in the same
// format.
//
// FP16X2: a float32 as two float16 terms, high + low / 2^11; three products of terms make up one of float32. Each row is scaled
// by a power of two such that its root mean square is 2^target to 2^(target + 1); then its largest element is below 2^15.
// Scaled elements of at least 2^-12 keep all bits, or all but the last; smaller ones have an error of up to 2^-36. Rows whose
// root mean square is not between 2^-55 and 2^70 are for gemm/fp32_fallback.cu.
//
// Where row statistics predict a large fallback, scaled elements are split into three bfloat16 terms instead, which keep all
// bits (Format<BF16X3>); six products make up one of float32. That takes twice the time of FP16X2, and a third of the time of FMA.
//
// SPLITS: TF32 and BFLOAT16 may split K among blocks (split-K). The partial sums are at the beginning of scratch.
#pragma once
#ifndef DIRECT_A
#define DIRECT_A 0
#define DIRECT_B 0
#endif
#ifndef SPLITS
#define SPLITS 1
#endif
#include "common/mma_sync.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

constexpr int PACKED_ROWS = 128, PACKED_BYTES = PACKED_ROWS * 128; // of a packed tile
constexpr int PACK_ROWS = PACKED_ROWS / 2;                // rows of a block of gemm/pack.cu
constexpr int MAX_CHUNKS = 16, MIN_CHUNK_TILES = 2;       // gemm/pack.cu cuts K into chunks of whole packed tiles
constexpr int MAX_TERMS = MMA_KIND == FP16X2 ? 3 : 1;     // of an element
constexpr int PACKED_K = MMA_KIND == TF32 ? 32 : 64;      // K of a packed tile
constexpr int TILES_N = TILE_N > PACKED_ROWS ? TILE_N / PACKED_ROWS : 1; // packed tiles of op(B) side by side in TILE_N columns
constexpr int COLUMNS_OF_TILE = TILE_N / TILES_N;         // columns that are used of each of them
static_assert(DIRECT_B || TILE_N % PACKED_ROWS == 0 || TILE_N < PACKED_ROWS, "whole packed tiles, or a part of one");
constexpr float LOW_SCALE = 0x1p-11f;                     // the unit of low terms
constexpr int CHECKED_TILES = 32;                         // packed tiles of K after which the cancellation test reads sums
constexpr int STATISTICS_TILES = 16;                      // the first packed tiles, which must have MIN_PRODUCTS products

// The tensor maps of a block of gemm/packed_gemm.cu.
struct alignas(128) TensorMaps {
    TensorMap a, b;
};

// Statistics of a packed row. An FP16X2 result (scaled) goes to the float32 fallback
// - if it is below the sum of the error floors of its row and column: errors of small elements may be visible;
// - if its running sum has stayed below cancellation_level, unless skip_cancellation;
// - if the product of the participations is below 1: it has too few products. All rows of a row block have one participation.
// fallback: even bf16x3 results go to the float32 fallback. lossy: the row has elements below the range of FP16X2; pack_matrices
// adds the error of each to error_floor.
struct alignas(16) RowStats {
    float inverse_scale;
    float error_floor, cancellation_level, participation;
    int fallback, skip_cancellation, lossy;
};

// Statistics of a chunk of K of a row.
struct alignas(16) PartialRowStats {
    double squares;    // sum of squares
    float least, sum;  // of magnitudes: the smallest that is not 0, and the sum
    int count;         // of elements that are not 0
};

constexpr int FALLBACK_CAPACITY = 126;

// The elements of a tile of the result that gemm/fp32_fallback.cu computes; all of them where count exceeds FALLBACK_CAPACITY.
struct alignas(16) FallbackList {
    int count;
    uint16_t elements[FALLBACK_CAPACITY]; // row * 128 + column in the tile
};

// FP16X2: how many of the voting tiles have too few products for it.
struct alignas(128) PrecisionVotes { // as large as a cache line, so that packed tiles are aligned to one
    int count;
};

constexpr int VOTES_SHARE = 16; // one vote in so many tiles chooses bf16x3: other tiles may have long fallback lists, too
constexpr int FEW_TILES = 512;  // up to so many tiles of 128 x 128, one tile by FMA takes longer than all of them in bf16x3

// The layout of scratch for `batch` products of m x k and k x n matrices. Packed tiles are ordered by row block, then by k.
struct PackedLayout {
    int64_t batch, m, n, k;
    int rows_a, rows_b;           // row blocks (of PACKED_ROWS packed rows) of a matrix
    int64_t blocks_a, row_blocks; // of all matrices A, and of A and B
    int k_tiles, chunks;          // packed tiles along K, and chunks of them
    int tiles_n;                  // tiles in a row of the result
    int64_t tiles;                // of the results
    int voting_tiles;             // pairs of row blocks of a matrix that row_stats reads; each row block is in one
    PrecisionVotes *votes;
    FallbackList *fallback;
    RowStats *stats;
    PartialRowStats *partial;
    char *packed;
    TensorMaps *maps;

    __device__ PackedLayout(int64_t batch, int64_t m, int64_t n, int64_t k, char *scratch)
        : batch(batch), m(m), n(n), k(k) {
        rows_a = (m + PACKED_ROWS - 1) / PACKED_ROWS;
        rows_b = (n + TILES_N * PACKED_ROWS - 1) / (TILES_N * PACKED_ROWS) * TILES_N;
        blocks_a = batch * rows_a;
        row_blocks = blocks_a + batch * rows_b;
        k_tiles = (k + PACKED_K - 1) / PACKED_K;
        chunks = min((k_tiles + MIN_CHUNK_TILES - 1) / MIN_CHUNK_TILES, MAX_CHUNKS);
        tiles_n = (n + TILE_N - 1) / TILE_N;
        tiles = blocks_a * tiles_n;
        voting_tiles = max(rows_a, rows_b);
        const int64_t packed_tiles = ((DIRECT_B ? blocks_a : row_blocks) - first()) * k_tiles, size = batch * m * n;
#define AT(NAME, E) SCRATCH_##NAME(E, scratch, tiles, row_blocks, chunks, packed_tiles, size)
        votes = AT(VOTES, PrecisionVotes), fallback = AT(LISTS, FallbackList);
        stats = AT(STATS, RowStats), partial = AT(PARTIAL_STATS, PartialRowStats);
        packed = AT(PACKED, char), maps = AT(MAPS, TensorMaps);
#undef AT
    }

    // FP16X2: whether the votes are for bf16x3.
    __device__ __forceinline__ bool use_bf16x3() const {
        return votes->count > 0 && (blocks_a * rows_b <= FEW_TILES || VOTES_SHARE * votes->count > batch * voting_tiles);
    }

    // The first row block that is packed.
    __device__ __forceinline__ int64_t first() const { return DIRECT_A ? blocks_a : 0; }

    // The packed tiles of `terms` terms of a row block, one after another.
    __device__ __forceinline__ char *packed_tile(int64_t row_block, int k_tile, int terms) const {
        return packed + ((row_block - first()) * k_tiles + k_tile) * (terms * PACKED_BYTES);
    }
};
