// C = op(A) op(B) for a batch of row-major matrices: C is M x N; A is M x K, or K x M if TRANS_A; B likewise.
// Read gemm/tile.cuh first.
#pragma once
#include "common/epilogue.cuh"
#include "gemm/tile.cuh"
#include "gemm/mma.cuh"

constexpr int SWIZZLED_ROWS = 8; // rows of tiles that advance through the columns together, so that their operands stay in L2

// The coordinates of tile `block` in matrices of rows x columns tiles; item: the matrix of the batch. Threadblock swizzle:
// SWIZZLED_ROWS rows of the first column, the same rows of the second column, ..., then the next SWIZZLED_ROWS rows.
struct TileCoord {
    int64_t item;
    int row, column;
    TileCoord() = default;
    __device__ TileCoord(int block, int rows, int columns) {
        item = block / (rows * columns);
        const int tile = block % (rows * columns);
        const int group = tile / (SWIZZLED_ROWS * columns), within = tile % (SWIZZLED_ROWS * columns);
        const int height = rows % SWIZZLED_ROWS == 0 ? SWIZZLED_ROWS : min(SWIZZLED_ROWS, rows - group * SWIZZLED_ROWS);
        row = group * SWIZZLED_ROWS + within % height;
        column = within / height;
    }
};

// The loader of a panel of op(A) or op(B), which has `length` rows (op(B): columns). They are stored as [k][row], or as [row][k]
// if TRANSPOSE. The panel begins at row `first` and at k0; k ends at `end`.
template <class Panels, int WIDE, bool TRANSPOSE, bool K_MAJOR> __device__ __forceinline__ auto panel_loader(
    const T *x, int length, int first, int k, int k0, int end) {
    static_assert(TRANSPOSE || !K_MAJOR, "a K-major panel needs a K-major matrix");
    if constexpr (K_MAJOR)
        return typename Panels::template LoadKMajor<WIDE>(x + (int64_t)first * k + k0, k, length - first, end - k0);
    else if constexpr (TRANSPOSE)
        return typename Panels::LoadTransposed(x + (int64_t)first * k + k0, k, length - first, end - k0);
    else
        return typename Panels::template LoadRows<WIDE>(
            x + (int64_t)k0 * length + first, length, length - first, end - k0);
}

// Single elements of op(A) and op(B) of one matrix of the batch, and of their product.
template <bool TRANS_A, bool TRANS_B> struct Operands {
    const T *a, *b;
    int m, n, k;

    __device__ __forceinline__ T load_a(int row, int i) const {
        return TRANS_A ? a[(int64_t)i * m + row] : a[(int64_t)row * k + i];
    }
    __device__ __forceinline__ T load_b(int i, int column) const {
        return TRANS_B ? b[(int64_t)column * k + i] : b[(int64_t)i * n + column];
    }

    // An element of the product over k0 <= k < k1, by sequential FMA.
    __device__ __forceinline__ T dot(int row, int column, int k0, int k1) const {
        T sum = 0;
        #pragma unroll 1 // rarely runs
        for (int i = k0; i < k1; i++) sum = fma(load_a(row, i), load_b(i, column), sum);
        return sum;
    }
};

// Recomputes by FMA the results that are not finite, because BF16X3 turns infinities into NaN.
template <class Tile, class Operands> __device__ __forceinline__ void recompute_non_finite(
    Tile &tile, const Operands &operands, int m0, int n0, int k0, int k1) {
    constexpr int TN = Tile::TN, COUNT = Tile::TM * TN;
    bool all = true;
    #pragma unroll
    for (int i = 0; i < COUNT; i++) all &= finite(tile.sums[i / TN][i % TN]);
    if (all) return;
    for (int i = 0; i < COUNT; i++) {
        const int row = m0 + tile.row(i / TN), column = n0 + tile.column(i % TN);
        if (row >= operands.m || column >= operands.n) continue;
        bool wrong = false; // a dynamic index would move the sums to local memory
        #pragma unroll
        for (int j = 0; j < COUNT; j++) wrong |= j == i && !finite(tile.sums[j / TN][j % TN]);
        if (!wrong) continue;
        const T sum = operands.dot(row, column, k0, k1);
        #pragma unroll
        for (int j = 0; j < COUNT; j++) {
            if (j == i) tile.sums[j / TN][j % TN] = sum;
        }
    }
}

// Computes tile `block` over split `split` of `splits` of K, and passes its elements to `out`: an Epilogue, or a Store of partial
// sums. Tiles are numbered through all matrices of the batch. Threads of the block return at different times.
template <class Tile, bool TRANS_A, bool TRANS_B, int WIDTH_A, int WIDTH_B, int WIDTH_C, class Out>
__device__ __forceinline__ void gemm_block(
    const T *a, const T *b, const Out &out, int m, int n, int k, int splits, int block, int split) {
    constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK;
    const TileCoord at(block, (m + BM - 1) / BM, (n + BN - 1) / BN);
    const int64_t item = at.item;
    const int m0 = at.row * BM, n0 = at.column * BN;

    const int stages = (k + BK - 1) / BK;
    const int begin = (int64_t)stages * split / splits, end = (int64_t)stages * (split + 1) / splits;
    const int k0 = begin * BK, k1 = min(k, end * BK);
    a += item * m * k;
    b += item * k * n;

    Tile tile;
    auto load_a = panel_loader<typename Tile::PanelsA, WIDTH_A, !TRANS_A, Tile::WarpOp::K_MAJOR_A>(a, m, m0, k, k0, k1);
    auto load_b = panel_loader<typename Tile::PanelsB, WIDTH_B, TRANS_B, Tile::WarpOp::K_MAJOR_B>(b, n, n0, k, k0, k1);
    tile.multiply(load_a, load_b, end - begin);
    if (tile.slice > 0) return;
    if (!Tile::WarpOp::KEEPS_NON_FINITE)
        recompute_non_finite(tile, Operands<TRANS_A, TRANS_B>{a, b, m, n, k}, m0, n0, k0, k1);

    #pragma unroll
    for (int i = 0; i < Tile::TM; i++) {
        const int row = m0 + tile.row(i);
        if (row >= m) continue;
        #pragma unroll
        for (int j = 0; j < Tile::TN; j += WIDTH_C) {
            const int column = n0 + tile.column(j);
            if (column >= n) continue;
            T value[WIDTH_C];
            #pragma unroll
            for (int h = 0; h < WIDTH_C; h++) value[h] = tile.sums[i][j + h];
            out(item, row, column, (item * m + row) * n + column, value);
        }
    }
}
