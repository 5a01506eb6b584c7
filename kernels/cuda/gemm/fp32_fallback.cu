// The elements of a product that gemm/packed_gemm.cu has left: a tile of them by the engine of plain float32, or those of its
// list, one after another, each by all threads of the block: it is the reads of the first one that everything waits for. A
// block a tile; most have nothing to do.
#ifndef UNIT
#define UNIT 5
#define TILE_N 128
#define TRANSPOSE_A 0
#define TRANSPOSE_B 0
#define WIDE_A 1
#define WIDE_B 1
#define WIDE_C 1
#endif
#include "gemm/gemm.cuh"
#include "common/collectives.cuh"
#include "gemm/packed.cuh"

typedef Tile<LINES, TILE_N, 8, 1, 4, Fma<64, TILE_N / 2>> Plain;
constexpr int AT_ONCE = 32; // elements of each operand that a thread reads at once

// By a block, known to its thread 0: the sum of the products of a row and a column.
template <class Factors> __device__ __forceinline__ T dot(const Factors &factors, int row, int column) {
    __shared__ T sums[Plain::THREADS / WARP];
    T sum = 0;
    for (int first = threadIdx.x; first < factors.k; first += AT_ONCE * Plain::THREADS) {
        T left[AT_ONCE], right[AT_ONCE];
        #pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int h = first + i * Plain::THREADS;
            left[i] = h < factors.k ? factors.left(row, h) : 0;
            right[i] = h < factors.k ? factors.right(h, column) : 0;
        }
        #pragma unroll
        for (int i = 0; i < AT_ONCE; i++) sum = fma(left[i], right[i], sum);
    }
    sum = over_lanes<Sum, WARP>(sum);
    __syncthreads(); // the sums before have been read
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    T all = sums[0];
    #pragma unroll
    for (int i = 1; i < Plain::THREADS / WARP; i++) all += sums[i];
    return all;
}

KERNEL __launch_bounds__(Plain::THREADS, 2) gemm_rest(const T *a, const T *b, const Epilogue epilogue, int64_t batch,
    int64_t m, int64_t n, int64_t k, char *scratch) {
    wait_for_inputs();
    const Slabs slabs(batch, m, n, k, scratch);
    const Rest &rest = slabs.rests[blockIdx.x];
    const int count = rest.count;
    if (count > LISTED) {
        gemm_block<Plain, TRANSPOSE_A, TRANSPOSE_B, TRANSPOSE_A ? WIDE_A : 1, TRANSPOSE_B ? 1 : WIDE_B, WIDE_C>(
            a, b, epilogue, m, n, k, 1, blockIdx.x, 0);
        return;
    }
    const TileAt at(blockIdx.x, slabs.rows, slabs.across);
    const Factors<TRANSPOSE_A, TRANSPOSE_B> factors = {
        a + at.item * m * k, b + at.item * k * n, (int)m, (int)n, (int)k};
    for (int i = 0; i < count; i++) {
        const int row = at.down * LINES + rest.places[i] / LINES, column = at.across * TILE_N + rest.places[i] % LINES;
        const T sum[1] = {dot(factors, row, column)};
        if (threadIdx.x == 0) epilogue(at.item, row, column, (at.item * m + row) * n + column, sum);
    }
}
