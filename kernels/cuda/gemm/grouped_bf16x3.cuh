// Several products A^T B with a long K, in bf16x3 (gemm_bf16x3.cuh), by some blocks of a launch. The stages of all tiles are one
// sequence, which the blocks divide evenly (stream-K: M. Osama et al., 2023). A block stores its sums of a tile in scratch;
// gemm/grouped_sum.cuh adds the sums of several blocks.
//
// Macros: those of gemm_bf16x3.cuh and gemm/grouped_sum.cuh.
#pragma once
#include "gemm/grouped_sum.cuh"
#include "gemm/gemm_bf16x3.cuh"

static_assert(STAGES * STAGE + BUFFERS * STAGING * (int)sizeof(T) == SHARED_BYTES, "as `_shared` in grouped_products.py says");
static_assert(TILE_M == GROUPED_M && TILE_K == GROUPED_K, "tiles and stages as gemm/grouped_sum.cuh counts them");

// A and B of each product.
typedef const T *const (&Factors)[GROUPED_COUNT][2];

// The stages of a block: numbers `at` to `end` - 1 of the sequence.
struct GroupSchedule {
    Factors factors;
    int block, at, end;

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
        work.begin = (at - first) % product.stages;
        work.end = min(product.stages, work.begin + end - at);
        work.slot = tile + within + block;
        at += work.end - work.begin;
        return true;
    }
};

// The work of block `block` of GROUPED_BLOCKS blocks of GEMM_THREADS threads.
__device__ __forceinline__ void multiply_group(Factors factors, char *scratch, int block) {
    const GroupSchedule schedule = {factors, block, first_stage(block), first_stage(block + 1)};
    __shared__ Barriers barriers;
    multiply_splits<0>(schedule, barriers, (char *)shared_bytes,
        [&](const TileSplit &work, const AccumulatorTile &, int warpgroup, const float (&sums)[SUMS]) {
            const AccumulatorTile whole = {TileCoord(0, 1, 1), TILE_M, TILE_N, warpgroup * ROWS, 0};
            whole.store(Store{(T *)scratch + (int64_t)work.slot * TILE_M * TILE_N}, sums);
        });
}
