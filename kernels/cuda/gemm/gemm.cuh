// C = op(A) op(B) for a batch of row-major matrices: C is M x N; A is M x K, or K x M if TURNED_A; B likewise.
// Read gemm/tile.cuh first.
#pragma once
#include "common/epilogue.cuh"
#include "gemm/fma.cuh"
#include "gemm/mma.cuh"

constexpr int GROUP = 8; // rows of tiles that go through all columns together: their panels stay in the second cache

// Where tile `block` of down * across tiles lies, and in which matrix of the batch. The order: GROUP rows of the first
// column, of the second column, ..., then the next GROUP rows.
struct TileAt {
    int64_t item;
    int down, across;
    __device__ TileAt(int block, int rows, int columns) {
        item = block / (rows * columns);
        const int tile = block % (rows * columns);
        const int group = tile / (GROUP * columns), within = tile % (GROUP * columns);
        const int height = rows % GROUP == 0 ? GROUP : min(GROUP, rows - group * GROUP);
        down = group * GROUP + within % height;
        across = within / height;
    }
};

// The loader for a panel of a matrix, which lies as [k][line], or as [line][k] if TRANSPOSE. length: of lines, in all;
// the panel begins at `first` of them and row k0 of `end`.
template <class Panels, int WIDE, bool TRANSPOSE, bool ALONG> __device__ __forceinline__ auto panel(
    const T *x, int length, int first, int k, int k0, int end) {
    static_assert(TRANSPOSE || !ALONG, "panels lie as the matrix or as [k][line]");
    if constexpr (ALONG)
        return typename Panels::template Lines<WIDE>(x + (int64_t)first * k + k0, k, length - first, end - k0);
    else if constexpr (TRANSPOSE)
        return typename Panels::Across(x + (int64_t)first * k + k0, k, length - first, end - k0);
    else
        return typename Panels::template Along<WIDE>(
            x + (int64_t)k0 * length + first, length, length - first, end - k0);
}

// Elements of op(A) and op(B), matrices of the batch.
template <bool TURNED_A, bool TURNED_B> struct Factors {
    const T *a, *b;
    int m, n, k;

    __device__ __forceinline__ T left(int row, int i) const {
        return TURNED_A ? a[(int64_t)i * m + row] : a[(int64_t)row * k + i];
    }
    __device__ __forceinline__ T right(int i, int column) const {
        return TURNED_B ? b[(int64_t)column * k + i] : b[(int64_t)i * n + column];
    }

    // An element of the product by plain multiply-adds over k0 <= k < k1.
    __device__ __forceinline__ T plain(int row, int column, int k0, int k1) const {
        T sum = 0;
        #pragma unroll 1 // seldom needed
        for (int i = k0; i < k1; i++) sum = fma(left(row, i), right(i, column), sum);
        return sum;
    }
};

__device__ __forceinline__ bool finite(T x) { return fabs(x) < (T)INFINITY; }

// A unit that cuts numbers into pieces makes NaN of infinities: computes again what is not finite.
template <class Tile, class Factors> __device__ __forceinline__ void repair(
    Tile &tile, const Factors &factors, int m0, int n0, int k0, int k1) {
    constexpr int TN = Tile::TN, COUNT = Tile::TM * TN;
    bool all = true;
    #pragma unroll
    for (int i = 0; i < COUNT; i++) all &= finite(tile.sums[i / TN][i % TN]);
    if (all) return;
    for (int i = 0; i < COUNT; i++) {
        const int row = m0 + tile.row(i / TN), column = n0 + tile.column(i % TN);
        if (row >= factors.m || column >= factors.n) continue;
        bool wrong = false; // registers have no index
        #pragma unroll
        for (int j = 0; j < COUNT; j++) wrong |= j == i && !finite(tile.sums[j / TN][j % TN]);
        if (!wrong) continue;
        const T sum = factors.plain(row, column, k0, k1);
        #pragma unroll
        for (int j = 0; j < COUNT; j++) {
            if (j == i) tile.sums[j / TN][j % TN] = sum;
        }
    }
}

// Tile `block` of the product (of the first matrices of the batch, then of the next), of which this call takes part
// `split` of `splits` of k, and hands its elements to `out`: an Epilogue, or Store where k is cut. Threads of the block
// return at different times.
template <class Tile, bool TURNED_A, bool TURNED_B, int WIDTH_A, int WIDTH_B, int WIDTH_C, class Out>
__device__ __forceinline__ void gemm_block(
    const T *a, const T *b, const Out &out, int m, int n, int k, int splits, int block, int split) {
    constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK;
    const TileAt at(block, (m + BM - 1) / BM, (n + BN - 1) / BN);
    const int64_t item = at.item;
    const int m0 = at.down * BM, n0 = at.across * BN;

    const int stages = (k + BK - 1) / BK;
    const int begin = (int64_t)stages * split / splits, end = (int64_t)stages * (split + 1) / splits;
    const int k0 = begin * BK, k1 = min(k, end * BK);
    a += item * m * k;
    b += item * k * n;

    Tile tile;
    auto left = panel<typename Tile::PanelsA, WIDTH_A, !TURNED_A, Tile::Unit::ALONG_A>(a, m, m0, k, k0, k1);
    auto right = panel<typename Tile::PanelsB, WIDTH_B, TURNED_B, Tile::Unit::ALONG_B>(b, n, n0, k, k0, k1);
    tile.multiply(left, right, end - begin);
    if (tile.slice > 0) return;
    if (!Tile::Unit::EXACT) repair(tile, Factors<TURNED_A, TURNED_B>{a, b, m, n, k}, m0, n0, k0, k1);

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
