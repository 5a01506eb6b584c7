// C = op(A) op(B), see gemm/gemm.cuh. Where SPLIT, K is cut among the blocks too; each writes its own sums to scratch, and
// gemm/split_k_sum.cu adds them in order.
#ifndef TILE_M // the tunables; the tile of the large products by default
#define TILE_M 128
#define TILE_N 128
#define TILE_K 8
#define WARP_M 64
#define WARP_N 64
#define TILE_SLICES 1
#define TILE_STAGES 4
#define MIN_BLOCKS 2
#define UNIT 0
#define TRANSPOSE_A 0
#define TRANSPOSE_B 0
#define WIDE_A 1 // elements that may be copied at once: of a row of op(A)ᵀ, a row of op(B), a row of C
#define WIDE_B 1
#define WIDE_C 1
#define SPLIT 0
#endif
#include "gemm/gemm.cuh"

typedef Multiplier<WARP_M, WARP_N, UNIT, !TRANSPOSE_A, TRANSPOSE_B>::Unit Unit;
typedef Tile<TILE_M, TILE_N, TILE_K, TILE_SLICES, TILE_STAGES, Unit> Tunables;

KERNEL __launch_bounds__(Tunables::THREADS, MIN_BLOCKS) gemm_tiled(
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
    gemm_block<Tunables, TRANSPOSE_A, TRANSPOSE_B, WIDE_A, WIDE_B, WIDE_C>(
        a, b, out, m, n, k, splits, blockIdx.x, blockIdx.y);
}
