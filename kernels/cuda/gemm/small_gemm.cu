// C = op(A) op(B) for small matrices, see gemm/small_gemm.cuh.
#ifndef TILE_M
#define TILE_M 32
#define TILE_N 16
#define WARP_M 32
#define WARP_N 16
#define TILE_SLICES 16
#define TILE_PREFETCH 3
#define MMA_KIND 3
#define TRANSPOSE_A 0
#define TRANSPOSE_B 0
#define WIDE_A 1 // elements per load of a row of A, a row of B, and per store of a row of C
#define WIDE_B 1
#define WIDE_C 1
#endif
#ifndef LENGTHS
#define LENGTHS m, n, k // a fused equation defines constants here
#endif
#include "gemm/small_gemm.cuh"

typedef SmallTile<TILE_M, TILE_N, TILE_SLICES, TILE_PREFETCH, Mma<WARP_M, WARP_N, (MmaKind)MMA_KIND>> BlockTile;
#ifdef SHARED_BYTES
static_assert(BlockTile::SHARED<is_staged<TRANSPOSE_A, TRANSPOSE_B, WIDE_A, WIDE_B>> == SHARED_BYTES,
    "as `SmallTile.shared` in tiles.py says");
#endif

KERNEL __launch_bounds__(BlockTile::THREADS) small_gemm(
    const T *a, const T *b, const Epilogue epilogue, int64_t batch, int64_t m, int64_t n, int64_t k) {
    wait_for_inputs();
    small_gemm_block<BlockTile, TRANSPOSE_A, TRANSPOSE_B, WIDE_A, WIDE_B, WIDE_C>(
        a, b, epilogue, LENGTHS, 1, blockIdx.x, 0);
}
