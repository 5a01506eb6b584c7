// C = op(A) op(B) by tiles in shared memory, see gemm/gemm.cuh. With split-K (SPLIT) each block in y computes a part of K and
// writes partial sums to scratch; gemm/split_k_sum.cu adds them.
#ifndef TILE_M // by default the tile of large products
#define TILE_M 128
#define TILE_N 128
#define TILE_K 8
#define WARP_M 64
#define WARP_N 64
#define TILE_SLICES 1
#define TILE_STAGES 4
#define MIN_BLOCKS 2
#define MMA_KIND 0
#define TRANSPOSE_A 0
#define TRANSPOSE_B 0
#define WIDE_A 1 // elements per load of a row of A, a row of B, and per store of a row of C
#define WIDE_B 1
#define WIDE_C 1
#define SPLIT 0
#endif
#include "gemm/gemm.cuh"

typedef Tile<TILE_M, TILE_N, TILE_K, TILE_SLICES, TILE_STAGES,
    WarpMma<WARP_M, WARP_N, MMA_KIND, !TRANSPOSE_A, TRANSPOSE_B>::type> BlockTile;
#ifdef SHARED_BYTES
static_assert(BlockTile::SHARED == SHARED_BYTES, "as `Tile.shared` in tiles.py says");
#endif

KERNEL __launch_bounds__(BlockTile::THREADS, MIN_BLOCKS) gemm_tiled(
    const T *a, const T *b, const Epilogue epilogue, int64_t batch, int64_t m, int64_t n, int64_t k, int64_t splits
#if SPLIT
    , char *scratch
#endif
) {
    wait_for_inputs();
#if SPLIT
    const Store out = {(T *)scratch + blockIdx.y * batch * m * n};
#else
    const Epilogue &out = epilogue;
#endif
    gemm_block<BlockTile, TRANSPOSE_A, TRANSPOSE_B, WIDE_A, WIDE_B, WIDE_C>(
        a, b, out, m, n, k, splits, blockIdx.x, blockIdx.y);
}
