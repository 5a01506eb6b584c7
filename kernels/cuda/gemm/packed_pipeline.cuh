// The pipeline of a block of gemm/packed_gemm.cu: a producer warpgroup loads packed tiles, two consumer warpgroups multiply,
// each half of a tile's rows.
#pragma once
#include "sm90/bf16x3.cuh"
#include "sm90/accumulator.cuh"
#include "gemm/packed.cuh"

constexpr int SUMS = TILE_N / 2; // accumulators of a thread
constexpr int CONSUMER_THREADS = 2 * WARPGROUP, THREADS = WARPGROUP + CONSUMER_THREADS;
typedef Pipeline<TILE_STAGES> TilePipeline;

// 0 or 1: the half of the tile's rows that this consumer warpgroup computes.
__device__ __forceinline__ int consumer_half() { return threadIdx.x / WARPGROUP - 1; }

// A consumer warp has read a stage. No __syncwarp(): wgmma_wait_group() has synchronised the warp.
__device__ __forceinline__ void release(TilePipeline &pipeline, int stage) {
    if (threadIdx.x % WARP == 0) pipeline.empty[stage].arrive();
}

// A stage in shared memory: a packed tile of op(A) with TERMS terms, then COLUMNS_OF_TILE rows of TILES_N packed tiles of op(B).
template <int TERMS> struct Stage {
    static constexpr int SIZE_A = TERMS * PACKED_BYTES, SIZE_B = SIZE_A / PACKED_ROWS * COLUMNS_OF_TILE; // SIZE_B: of one tile
    static constexpr int SIZE = SIZE_A + TILES_N * SIZE_B;
    const char *at;

    __device__ __forceinline__ Stage(const char *shared, int stage) : at(shared + stage * SIZE) {}

    // Descriptors of a term: of this warpgroup's half of the rows, and of the columns.
    __device__ __forceinline__ uint64_t a(int term = 0) const {
        return smem_descriptor(at + term * PACKED_BYTES + consumer_half() * (PACKED_BYTES / 2));
    }
    __device__ __forceinline__ uint64_t b(int term = 0) const {
        return smem_descriptor(at + SIZE_A + term * (SIZE_B / TERMS));
    }
};

// Item `i` of the work: a tile of the result, over packed tiles `begin` to `end` of K.
struct TileSplit {
    int tile, split, begin, end;

    __device__ __forceinline__ TileSplit(int i, const PackedLayout &layout) {
        split = SPLITS > 1 ? i / (int)layout.tiles : 0;
        tile = i - split * (int)layout.tiles;
        begin = SPLITS > 1 ? layout.k_tiles * split / SPLITS : 0;
        end = SPLITS > 1 ? layout.k_tiles * (split + 1) / SPLITS : layout.k_tiles;
    }
};

// The accumulators of a thread in tile `tile`.
__device__ __forceinline__ AccumulatorTile accumulator_tile(int tile, const PackedLayout &layout) {
    const TileCoord at(tile, layout.rows_a, layout.tiles_n);
    return {at, (int)layout.m, (int)layout.n, at.row * PACKED_ROWS + consumer_half() * 64, at.column * TILE_N};
}
