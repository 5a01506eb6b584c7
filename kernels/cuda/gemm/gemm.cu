// C = op(A) op(B) by tiles in shared memory, see gemm/gemm.cuh. With split-K (SPLIT) block y computes split y of K and writes
// partial sums to scratch; gemm/split_k_sum.cu adds them.
//
// Macros (BlockGemm in lowering/cuda/gemm): TILE_*, WARP_*, MIN_BLOCKS and MMA_KIND choose the tile. TRANSPOSE_A and TRANSPOSE_B.
// WIDE_A, WIDE_B, WIDE_C: elements per load of a row of A, of a row of B, and per store of a row of C.
#include "gemm/gemm.cuh"

typedef Tile<TILE_M, TILE_N, TILE_K, TILE_SLICES, TILE_STAGES,
    WarpMma<WARP_M, WARP_N, MMA_KIND, !TRANSPOSE_A, TRANSPOSE_B>::type, SHARED_BYTES> BlockTile;

KERNEL __launch_bounds__(BlockTile::THREADS, MIN_BLOCKS) gemm_tiled(
    const T *a, const T *b, const Epilogue epilogue, int64_t batch, int64_t m, int64_t n, int64_t k, int64_t splits
    IF(SPLIT, , char *scratch)) {
    wait_for_inputs();
#if SPLIT
    const Store out = {(T *)scratch + blockIdx.y * batch * m * n};
#else
    const Epilogue &out = epilogue;
#endif
    gemm_block<BlockTile, TRANSPOSE_A, TRANSPOSE_B, WIDE_A, WIDE_B, WIDE_C>(
        a, b, out, m, n, k, splits, blockIdx.x, blockIdx.y);
}
