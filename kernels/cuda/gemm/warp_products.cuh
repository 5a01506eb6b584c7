// A product of small matrices by some warps of a block, without barriers, for a part of a kernel.
#pragma once
#include "gemm/small_gemm.cuh"

// A tile of one warp, for for_each_k_step() in gemm/small_gemm.cuh.
struct WarpTile {
    typedef Mma<16, 16, BF16X3> WarpOp;
    static constexpr int BM = WarpOp::WM, BN = WarpOp::WN, SLICES = 1, PREFETCH = 2;

    static __device__ __forceinline__ int slice() { return 0; }
};

// y = op(A) op(B). The warps divide the tiles. t: the index of this thread among THREADS, rotated by whole warps. Operands as in
// small_gemm_block(); the lengths are constants.
template <int THREADS, bool TRANS_A, bool TRANS_B, int WIDTH_A, int WIDTH_B>
__device__ __forceinline__ void warp_products(int t, const T *a, const T *b, T *y, int m, int n, int k) {
    typedef WarpTile::WarpOp WarpOp;
    const Operands<TRANS_A, TRANS_B> operands = {a, b, m, n, k};
    const int across = (n + WarpTile::BN - 1) / WarpTile::BN, tiles = (m + WarpTile::BM - 1) / WarpTile::BM * across;
    #pragma unroll 1
    for (int tile = t / WARP; tile < tiles; tile += THREADS / WARP) {
        const int first_row = tile / across * WarpTile::BM, first_column = tile % across * WarpTile::BN;
        T sums[WarpOp::TM][WarpOp::TN] = {}, low[WarpOp::TM][WarpOp::TN] = {};
        for_each_k_step<WarpTile, WIDTH_A, WIDTH_B>(operands, first_row, first_column,
            [&](const T(&rows)[4][WarpOp::TM], const T(&columns)[4][WarpOp::COLUMNS]) {
                multiply_k_step<WarpOp>(sums, low, rows, columns);
            });
        #pragma unroll
        for (int i = 0; i < WarpOp::TM; i++) {
            #pragma unroll
            for (int j = 0; j < WarpOp::TN; j++) {
                const int row = first_row + WarpOp::row(i), column = first_column + WarpOp::column(j);
                if (row >= m || column >= n) continue;
                const T sum = sums[i][j] + low[i][j];
                y[row * n + column] = finite(sum) ? sum : operands.dot(row, column, 0, k);
            }
        }
    }
}
