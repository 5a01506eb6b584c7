// Several products A^T B with a long K, in bf16x3 (gemm_bf16x3.cuh), by some blocks of a launch. The stages of all tiles are one
// sequence, which the blocks divide evenly (stream-K: M. Osama et al., 2023). A block stores its sums of a tile in scratch;
// gemm/grouped_sum.cuh adds the sums of several blocks. With GROUPED_ROW_SUMS also those of the rows of A^T over K.
//
// Macros: those of gemm_bf16x3.cuh and gemm/grouped_sum.cuh.
#pragma once
#include "gemm/grouped_sum.cuh"
#include "gemm/gemm_bf16x3.cuh"

static_assert(STAGES * STAGE + BUFFERS * BUFFER * (int)sizeof(T) == SHARED_BYTES, "as `pipeline_bytes` in bf16x3.py says");
static_assert(TILE_M == GROUPED_M && TILE_K == GROUPED_K, "tiles and stages as gemm/grouped_sum.cuh counts them");
static_assert(WARPGROUP / WARP * TILE_M == ROW_SUMS_SIZE, "row sums as gemm/grouped_sum.cuh reads them");

// A and B of each product.
typedef const T *const (&Factors)[GROUPED_COUNT][2];

// The stage of K with which tile number `tile` of a product begins: such that the blocks of its tiles, which share rows of a factor,
// read these at the same time, once from device memory and then from the L2 cache. A tile is `blocks` blocks after the one before.
__device__ __forceinline__ int first_depth(const Product &product, int tile) {
    const int of_block = stages_before(GROUPED_COUNT) / GROUPED_BLOCKS, blocks = max(product.stages / of_block, 1);
    const int shift = (product.stages - blocks * of_block) % product.stages;
    return (tile * shift % product.stages + product.stages) % product.stages;
}

// The stages of a block: numbers `at` to `end` - 1 of the sequence.
struct GroupSchedule {
    static constexpr bool ROW_SUMS = GROUPED_ROW_SUMS;
    Factors factors;
    T *scratch;
    int block, at, end;

    // Only the first tile of a row of tiles has them.
    __device__ __forceinline__ T *row_sums(const TileSplit &work) const {
        return work.at.column == 0 ? scratch + row_sums_at(work.slot) : nullptr;
    }

    __device__ __forceinline__ bool next(TileSplit &work) {
        if (at >= end) return false;
        int first = 0, tile = 0, i = 0; // the first stage and tile of product i
        Product product(0);
        while (at >= first + product.stages * product.tiles()) {
            first += product.stages * product.tiles();
            tile += product.tiles();
            product = Product(++i);
        }
        const int within = (at - first) / product.stages;
        work.matrices = {factors[i][0], factors[i][1], product.m, product.n, product.k};
        work.at = TileCoord(within, product.rows(), product.columns());
        const int from = (at - first) % product.stages, count = min(product.stages - from, end - at);
        work.begin = (from + first_depth(product, within)) % product.stages;
        work.end = work.begin + count;
        work.slot = tile + within + block;
        at += count;
        return true;
    }
};

// The work of block `block` of GROUPED_BLOCKS blocks of GEMM_THREADS threads.
__device__ __forceinline__ void multiply_group(Factors factors, char *scratch, int block) {
    const GroupSchedule schedule = {factors, (T *)scratch, block, first_stage(block), first_stage(block + 1)};
    __shared__ Barriers barriers;
    multiply_splits<0>(schedule, barriers, (char *)shared_bytes,
        [&](const TileSplit &work, const AccumulatorTile &, int warpgroup, const float (&sums)[SUMS]) {
            const AccumulatorTile whole = {TileCoord(0, 1, 1), TILE_M, TILE_N, warpgroup * ROWS, 0};
            whole.store(Store{(T *)scratch + (int64_t)work.slot * TILE_M * TILE_N}, sums);
        });
}
