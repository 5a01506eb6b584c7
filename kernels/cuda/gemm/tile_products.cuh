// What kernels share that multiply rows by tiles of weights, by WGMMA in bf16x3 (sm90/bf16x3.cuh).
//
// Tensor cores truncate when they add, so they sum over a section of K only (SECTION elements), the smallest products first.
// Float32 additions sum the results.
#pragma once
#include "gemm/gemm.cuh"
#include "sm90/bf16x3.cuh"
#include "sm90/tma.cuh"

// Matrices of weights, split into bfloat16 terms in the layout that wgmma reads (bf16x3), for products of many rows.
//
// A tile of 64 x 64 weights has three terms, each of 64 rows of 128 bytes with the 128-byte swizzle. So one bulk copy fetches a
// tile, and wgmma reads it as a K-major operand or as a transposed one.
//
// Along one axis of a matrix each group of 16 is permuted: position 8 s + 2 c + h holds element 4 c + 2 s + h. The axis is K of a
// product whose A operand is in registers, where each thread then has groups of four neighbours of a row. In a pair of products
// (gemm/back_to_back.cuh) it is the columns of the first one, which are K of the second one.

constexpr int WEIGHT_TILE = 64, TERM_BYTES = WEIGHT_TILE * WEIGHT_TILE * 2, TILE_BYTES = BF16X3_TERMS * TERM_BYTES;

// The element of a group of 16 that position `i` holds.
__device__ __forceinline__ int permuted(int i) { return i % 8 / 2 * 4 + i / 8 * 2 + i % 2; }

// Splits the weights of a chunk, and stores their terms in the tiles. The chunks of a matrix of `columns` columns are counted
// row by row, after the permutation.
template <int PERMUTED_AXIS>
__device__ __forceinline__ void store_tile_chunk(const float *weights, char *tiles, int columns, int chunk) {
    const int row = chunk / (columns / CHUNK_ELEMENTS), column = chunk % (columns / CHUNK_ELEMENTS) * CHUNK_ELEMENTS;
    const int from = PERMUTED_AXIS == 0 ? row / 16 * 16 + permuted(row % 16) : row;
    float x[CHUNK_ELEMENTS];
    #pragma unroll
    for (int j = 0; j < CHUNK_ELEMENTS; j += 2) {
        const int of = PERMUTED_AXIS == 1 ? column / 16 * 16 + permuted(column % 16 + j) : column + j;
        const Vector<float, 2> v = load<float, 2>(weights + (int64_t)from * columns + of);
        x[j] = v.lane[0], x[j + 1] = v.lane[1];
    }
    Chunk terms[BF16X3_TERMS];
    split_bf16x3(terms, x);
    const int tile = row / WEIGHT_TILE * (columns / WEIGHT_TILE) + column / WEIGHT_TILE;
    const int at = swizzle_128b(row % WEIGHT_TILE, column % WEIGHT_TILE / CHUNK_ELEMENTS);
    #pragma unroll
    for (int p = 0; p < BF16X3_TERMS; p++)
        *(Chunk *)(tiles + (int64_t)tile * TILE_BYTES + p * TERM_BYTES + at) = terms[p];
}

constexpr int TILE_SUMS = WEIGHT_TILE / 2;      // accumulators of a thread: 64 rows times a tile
constexpr int MMA_K = 16, SECTION = 32;         // K of an instruction, K of a section
constexpr int SECTIONS = WEIGHT_TILE / SECTION; // of a tile

// A matrix of weights and its tiles.
struct TiledWeights {
    const float *weights;
    const char *tiles;
};

// An element of a op(b) by FMA, summed from k0 to k1 of K.
template <bool TRANSPOSE> __device__ __noinline__ float dot(
    const float *a, const float *b, int n, int k, int row, int column, int k0, int k1) {
    return Operands<false, TRANSPOSE>{a, b, 0, n, k}.dot(row, column, k0, k1);
}

// The descriptor of a tile of weights, and the offset to add for another term and k. K_MAJOR: the weights are transposed.
template <bool K_MAJOR> __device__ __forceinline__ uint64_t tile_descriptor(const char *tile) {
    return K_MAJOR ? smem_descriptor(tile) : smem_descriptor(tile, 0, 8 * 128, SWIZZLE_128B);
}
template <bool K_MAJOR> __device__ __forceinline__ int tile_offset(int term, int k) {
    return (term * TERM_BYTES + (K_MAJOR ? k * 2 : k * 128)) / CHUNK_BYTES;
}

// Starts `sums` = 64 rows times a section of a tile, from row k0 of op(W) on. The first form reads the terms of the rows from
// shared memory, in the layout of a tile that is not transposed. The second one has them in registers, from word `first` on.
template <bool TRANSPOSE> __device__ __forceinline__ void multiply_section(
    float (&sums)[TILE_SUMS], const char *rows, const char *tile, int k0) {
    const uint64_t a = smem_descriptor(rows), b = tile_descriptor<TRANSPOSE>(tile);
    #pragma unroll
    for (int i = 0; i <= LOW_ORDER_PAIRS; i++) {
        const TermPair terms = i < LOW_ORDER_PAIRS ? low_order_pair(i) : TermPair{0, 0};
        #pragma unroll
        for (int k = k0; k < k0 + SECTION; k += MMA_K)
            wgmma<BFLOAT16, false, !TRANSPOSE>(
                sums, a + tile_offset<true>(terms.a, k), b + tile_offset<TRANSPOSE>(terms.b, k), i > 0 || k > k0);
    }
    wgmma_commit_group();
}
template <bool TRANSPOSE, int WORDS> __device__ __forceinline__ void multiply_section(
    float (&sums)[TILE_SUMS], const uint32_t (&rows)[BF16X3_TERMS][WORDS], int first, const char *tile, int k0) {
    const uint64_t b = tile_descriptor<TRANSPOSE>(tile);
    #pragma unroll
    for (int i = 0; i <= LOW_ORDER_PAIRS; i++) {
        const TermPair terms = i < LOW_ORDER_PAIRS ? low_order_pair(i) : TermPair{0, 0};
        #pragma unroll
        for (int k = 0; k < SECTION; k += MMA_K)
            wgmma_registers<BFLOAT16, !TRANSPOSE>(
                sums, rows[terms.a] + first + k / 4, b + tile_offset<TRANSPOSE>(terms.b, k0 + k), i > 0 || k > 0);
    }
    wgmma_commit_group();
}

// Splits four neighbours of a row into terms, as words of the A operand of WGMMA, from `word` on. The tiles must be permuted along
// K.
template <int WORDS> __device__ __forceinline__ void split_four(
    uint32_t (&rows)[BF16X3_TERMS][WORDS], int word, const Vector<float, 4> &four) {
    uint32_t terms[BF16X3_TERMS][2];
    Format<BF16X3>::convert(four.lane, terms);
    #pragma unroll
    for (int p = 0; p < BF16X3_TERMS; p++) rows[p][word] = terms[p][0], rows[p][word + 2] = terms[p][1];
}

// By one thread: copies a tile to the next stage of a ring. row and column: of the tile in op(W), which has rows x columns tiles.
template <bool TRANSPOSE, int STAGES> __device__ __forceinline__ void copy_tile(Pipeline<STAGES> &pipeline,
    PipelineState<STAGES> &state, char *ring, const char *tiles, int row, int column, int rows, int columns) {
    pipeline.wait_empty(state);
    Mbarrier &full = pipeline.full[state.stage];
    full.arrive_expect_tx(TILE_BYTES);
    const int at = TRANSPOSE ? column * rows + row : row * columns + column;
    bulk_copy<TILE_BYTES>(ring + state.stage * TILE_BYTES, tiles + (int64_t)at * TILE_BYTES, full);
    state.advance();
}
