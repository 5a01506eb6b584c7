// The elements of a product that gemm_slabs.cu has left: a tile of them by the engine of plain float32, or those of its
// list, each by a warp. A block a tile; most have nothing to do.
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
#include "slabs.cuh"

typedef Tile<LINES, TILE_N, 8, 1, 4, Fma<64, TILE_N / 2>> Plain;

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
    const int lane = threadIdx.x % WARP;
    for (int i = threadIdx.x / WARP; i < count; i += Plain::THREADS / WARP) {
        const int row = at.down * LINES + rest.places[i] / LINES, column = at.across * TILE_N + rest.places[i] % LINES;
        T sum[1] = {0};
        #pragma unroll 16 // reads that are under way at once
        for (int h = lane; h < k; h += WARP) sum[0] = fma(factors.left(row, h), factors.right(h, column), sum[0]);
        #pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2) sum[0] += __shfl_xor_sync(FULL_MASK, sum[0], step);
        if (lane == 0) epilogue(at.item, row, column, (at.item * m + row) * n + column, sum);
    }
}
