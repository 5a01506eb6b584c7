// C = op(A) op(B) for small matrices, see gemm/small_gemm.cuh.
#ifndef TILE_M
#define TILE_M 32
#define TILE_N 16
#define WARP_M 32
#define WARP_N 16
#define TILE_SLICES 16
#define TILE_AHEAD 3
#define UNIT 3
#define TRANSPOSE_A 0
#define TRANSPOSE_B 0
#define WIDE_A 1 // elements that may be read at once: of a row of A, a row of B; of a row of C written at once
#define WIDE_B 1
#define WIDE_C 1
#endif
#ifndef LENGTHS
#define LENGTHS m, n, k // a fused equation knows the numbers: no divisions, no ends to look for
#endif
#include "gemm/small_gemm.cuh"

typedef Direct<TILE_M, TILE_N, TILE_SLICES, TILE_AHEAD, Mma<WARP_M, WARP_N, (Kind)UNIT>> Tunables;

KERNEL __launch_bounds__(Tunables::THREADS) gemm_direct(
    const T *a, const T *b, const Epilogue epilogue, int64_t batch, int64_t m, int64_t n, int64_t k) {
    wait_for_inputs();
    direct_block<Tunables, TRANSPOSE_A, TRANSPOSE_B, WIDE_A, WIDE_B, WIDE_C>(
        a, b, epilogue, LENGTHS, 1, blockIdx.x, 0);
}
