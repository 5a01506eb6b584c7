// The elements of a product that gemm_slabs.cu has left: a tile of them by the engine of plain float32, or those of its
// list, one after another, each by all threads of the block: it is the reads of the first one that everything waits for.
// Most tiles have nothing left, so a block looks at the lists of all its tiles at once.
#ifndef UNIT
#define UNIT 5
#define TILE_N 128
#define TRANSPOSE_A 0
#define TRANSPOSE_B 0
#define WIDE_A 1
#define WIDE_B 1
#define WIDE_C 1
#endif
#include "gemm.cuh"
#include "group.cuh"
#include "slabs.cuh"

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

// By a block.
__device__ __forceinline__ void compute_listed(
    const T *a, const T *b, const Epilogue &epilogue, const Slabs &slabs, int tile, int count) {
    const int m = slabs.m, n = slabs.n, k = slabs.k;
    const TileAt at(tile, slabs.rows, slabs.across);
    const Factors<TRANSPOSE_A, TRANSPOSE_B> factors = {a + at.item * slabs.m * k, b + at.item * slabs.k * n, m, n, k};
    for (int i = 0; i < count; i++) {
        const int place = slabs.rests[tile].places[i];
        const int row = at.down * LINES + place / LINES, column = at.across * TILE_N + place % LINES;
        const T sum[1] = {dot(factors, row, column)};
        if (threadIdx.x == 0) epilogue(at.item, row, column, (at.item * slabs.m + row) * n + column, sum);
    }
}

KERNEL __launch_bounds__(Plain::THREADS, 2) gemm_rest(const T *a, const T *b, const Epilogue epilogue, int64_t batch,
    int64_t m, int64_t n, int64_t k, char *scratch) {
    wait_for_inputs();
    const Slabs slabs(batch, m, n, k, scratch);
    __shared__ int counts[Plain::THREADS]; // of the tiles of this block, whose lists are looked at together
    for (int64_t first = blockIdx.x; first < slabs.tiles; first += (int64_t)gridDim.x * Plain::THREADS) {
        const int64_t own = first + (int64_t)threadIdx.x * gridDim.x;
        const int found = own < slabs.tiles ? slabs.rests[own].count : 0;
        counts[threadIdx.x] = found;
        if (!__syncthreads_or(found > 0)) continue;
        #pragma unroll 1
        for (int i = 0; i < Plain::THREADS; i++) {
            const int count = counts[i], tile = first + (int64_t)i * gridDim.x;
            if (count > LISTED) {
                gemm_block<Plain, TRANSPOSE_A, TRANSPOSE_B, TRANSPOSE_A ? WIDE_A : 1, TRANSPOSE_B ? 1 : WIDE_B, WIDE_C>(
                    a, b, epilogue, m, n, k, 1, tile, 0);
                __syncthreads(); // its panels have been read
            } else if (count > 0) {
                compute_listed(a, b, epilogue, slabs, tile, count);
            }
        }
        __syncthreads(); // the counts have been read
    }
}
