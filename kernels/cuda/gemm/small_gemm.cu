// C = op(A) op(B) for small matrices, see gemm/small_gemm.cuh. Macros as in gemm/gemm.cu; TILE_PREFETCH: K steps loaded ahead.
#ifndef LENGTHS
#define LENGTHS m, n, k // a fused equation defines constants here
#endif
#include "gemm/small_gemm.cuh"

typedef SmallTile<TILE_M, TILE_N, TILE_SLICES, TILE_PREFETCH, Mma<WARP_M, WARP_N, (MmaKind)MMA_KIND>, SHARED_BYTES> BlockTile;

KERNEL __launch_bounds__(BlockTile::THREADS) small_gemm(
    const T *a, const T *b, const Epilogue epilogue, int64_t batch, int64_t m, int64_t n, int64_t k) {
    wait_for_inputs();
    small_gemm_block<BlockTile, TRANSPOSE_A, TRANSPOSE_B, WIDE_A, WIDE_B, WIDE_C>(
        a, b, epilogue, LENGTHS, 1, blockIdx.x, 0);
}
