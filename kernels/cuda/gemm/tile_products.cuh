// What kernels share that multiply rows by tiles of weights (gemm/tiled_weights.cuh), by WGMMA in bf16x3 (sm90/bf16x3.cuh).
//
// Tensor cores truncate when they add, so they sum over a section of K only (SECTION elements), the smallest products first.
// Float32 additions sum the results.
#pragma once
#include "gemm/gemm.cuh"
#include "gemm/tiled_weights.cuh"
#include "sm90/tma.cuh"

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

// Recomputes by FMA the sums that are not finite, because bf16x3 turns infinities into NaN: dot(i) is sum i.
template <int SUMS, class Dot> __device__ __forceinline__ void recompute_non_finite(float (&sums)[SUMS], const Dot &dot) {
    float zero = 0;
    #pragma unroll
    for (int i = 0; i < SUMS; i++) zero = fma(sums[i], 0.0f, zero);
    if (zero == 0) return;
    #pragma unroll
    for (int i = 0; i < SUMS; i++)
        if (!finite(sums[i])) sums[i] = dot(i);
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
// K (gemm/tiled_weights.cuh).
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
