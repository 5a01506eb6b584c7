// How the blocks of gemm/grouped_bf16x3.cuh divide the stages of several products, and the sum of their partial sums.
//
// Macros (grouped_products.py): TILE_N. GROUPED_BLOCKS: the blocks that multiply. GROUPED_COUNT: the number of products.
// GROUPED_LENGTHS: M, N, K of each, in braces. GROUPED_ROW_SUMS: whether there are sums of the rows of A^T.
// GROUPED_SLOTS: see row_sums_at().
#pragma once
#include "gemm/gemm.cuh"

constexpr int GROUPED_M = 128, GROUPED_K = 32; // rows of a tile and K of a stage

// The lengths of a product, and its tiles and stages.
struct Product {
    int m, n, k, stages;

    __device__ __forceinline__ explicit Product(int i) {
        static constexpr int lengths[][3] = {GROUPED_LENGTHS};
        m = lengths[i][0], n = lengths[i][1], k = lengths[i][2];
        stages = (k + GROUPED_K - 1) / GROUPED_K;
    }
    __device__ __forceinline__ int rows() const { return (m + GROUPED_M - 1) / GROUPED_M; }
    __device__ __forceinline__ int columns() const { return (n + TILE_N - 1) / TILE_N; }
    __device__ __forceinline__ int tiles() const { return rows() * columns(); }
};

// The stages of all tiles of the products before product i.
__device__ __forceinline__ int64_t stages_before(int i) {
    int64_t stages = 0;
    #pragma unroll
    for (int j = 0; j < i; j++) {
        const Product product(j);
        stages += product.stages * product.tiles();
    }
    return stages;
}

// The first stage of a block.
__device__ __forceinline__ int first_stage(int block) { return stages_before(GROUPED_COUNT) * block / GROUPED_BLOCKS; }

// Scratch has a slot for each pair of a tile and a block that computes stages of it: the block's partial sums of the tile. If
// GROUPED_ROW_SUMS, the row sums of all slots follow. Those of a slot are GROUPED_M sums of each producer warp.
constexpr int ROW_SUMS_WARPS = 8, ROW_SUMS_SIZE = ROW_SUMS_WARPS * GROUPED_M;
__device__ __forceinline__ int64_t row_sums_at(int slot) {
    return (int64_t)GROUPED_SLOTS * (GROUPED_M * TILE_N) + (int64_t)slot * ROW_SUMS_SIZE;
}

// The slots `begin` to `end`, inclusive, of the tile of product I that has a row and column. FIRST_TILE: the tiles of the products
// before I.
template <int I, int FIRST_TILE> struct TileSlots {
    int begin, end;

    __device__ __forceinline__ TileSlots(int row, int column) {
        const Product product(I);
        // The tile's number, as TileCoord counts.
        const int down = row / GROUPED_M, group = down / SWIZZLED_ROWS * SWIZZLED_ROWS;
        const int height = min(SWIZZLED_ROWS, product.rows() - group);
        const int tile = group * product.columns() + column / TILE_N * height + down - group;
        const int64_t total = stages_before(GROUPED_COUNT), first = stages_before(I) + (int64_t)tile * product.stages;
        // Block b has computed the stages from total b / GROUPED_BLOCKS on.
        begin = FIRST_TILE + tile + ((first + 1) * GROUPED_BLOCKS - 1) / total;
        end = FIRST_TILE + tile + ((first + product.stages) * GROUPED_BLOCKS - 1) / total;
    }
};

// Adds the partial sums of product I, in the order of the blocks that have computed them, and passes the sums to `out`. A block
// has THREADS threads. A thread computes WIDE neighbouring elements.
template <int I, int FIRST_TILE, int THREADS, int WIDE, class Out> __device__ __forceinline__ void add_parts(
    const char *scratch, const Out &out, int block) {
    const Product product(I);
    const int at = (block * THREADS + threadIdx.x) * WIDE;
    if (at >= product.m * product.n) return;
    const int row = at / product.n, column = at % product.n;
    const auto aux = out.template load_aux<WIDE>(0, row, column, at);
    const TileSlots<I, FIRST_TILE> slots(row, column);
    const T *part = (const T *)scratch + row % GROUPED_M * TILE_N + column % TILE_N;
    T sum[WIDE] = {};
    #pragma unroll 4 // loads in flight
    for (int slot = slots.begin; slot <= slots.end; slot++) {
        const Vector<T, WIDE> v = load<T, WIDE>(part + (int64_t)slot * (GROUPED_M * TILE_N));
        #pragma unroll
        for (int h = 0; h < WIDE; h++) sum[h] += v.lane[h];
    }
    out.write(aux, at, sum);
}

// The sum over K of a row of A^T of product I.
template <int I, int FIRST_TILE> __device__ __forceinline__ TotalOf<T>::type row_sum(const char *scratch, int row) {
    const TileSlots<I, FIRST_TILE> slots(row, 0);
    TotalOf<T>::type total = 0;
    for (int slot = slots.begin; slot <= slots.end; slot++) {
        const T *part = (const T *)scratch + row_sums_at(slot) + row % GROUPED_M;
        #pragma unroll
        for (int warp = 0; warp < ROW_SUMS_WARPS; warp++) total += part[warp * GROUPED_M];
    }
    return total;
}
