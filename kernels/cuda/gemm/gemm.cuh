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

// An epilogue through shared memory. The accumulators of a tile are scattered over threads. Here all threads of the block pass
// the tile to the epilogue, with neighbouring columns in neighbouring threads, and load the auxiliary inputs early.

// The elements of tile `at` of m x n matrices that this thread passes to the epilogue: vectors of WIDE columns.
template <int BM, int BN, int WIDE, int THREADS, class Epilogue> struct ThreadElements {
    static constexpr int ROW_VECTORS = BN / WIDE, COUNT = (BM * ROW_VECTORS + THREADS - 1) / THREADS;
    const TileCoord at;
    const int m, n;
    typename Epilogue::template Aux<WIDE> aux[COUNT];

    __device__ __forceinline__ ThreadElements(const TileCoord &at, int m, int n) : at(at), m(m), n(n) {}

    // Vector i: its row and column in the tile and in the matrix, its index in memory, whether it is in the matrix.
    __device__ __forceinline__ int tile_row(int i) const { return (i * THREADS + threadIdx.x) / ROW_VECTORS; }
    __device__ __forceinline__ int tile_column(int i) const { return (i * THREADS + threadIdx.x) % ROW_VECTORS * WIDE; }
    __device__ __forceinline__ int row(int i) const { return at.row * BM + tile_row(i); }
    __device__ __forceinline__ int column(int i) const { return at.column * BN + tile_column(i); }
    __device__ __forceinline__ int64_t index(int i) const { return index(row(i), column(i)); }
    __device__ __forceinline__ bool inside(int i) const { return tile_row(i) < BM && row(i) < m && column(i) < n; }

    // Loads the auxiliary inputs. Outside the matrix it loads those of another vector: a branch would serialise the loads.
    __device__ __forceinline__ void load_aux(const Epilogue &end) {
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int r = min(at.row * BM + min(tile_row(i), BM - 1), m - 1), c = min(column(i), n - WIDE);
            aux[i] = end.template load_aux<WIDE>(at.item, r, c, index(r, c));
        }
    }

  private:
    __device__ __forceinline__ int64_t index(int row, int column) const {
        return opaque((at.item * m + row) * n + column);
    }
};

// A BM x BN tile in BYTES of shared memory. A product calls it as its epilogue, to store the elements.
template <int BM, int BN, int BYTES> struct StagedTile {
    static constexpr int ROW = BN + VECTOR;
    static_assert(BYTES == BM * ROW * sizeof(T), "staging_bytes in horizontal.py");
    T *tile;

    template <int WIDE> __device__ __forceinline__ void operator()(
        int64_t, int row, int column, int64_t, const T (&value)[WIDE]) const {
        #pragma unroll
        for (int i = 0; i < WIDE; i++) tile[row % BM * ROW + column % BN + i] = value[i];
    }

    // By all threads of the block, after the product: passes tile `block` of m x n matrices to `end`.
    template <int WIDE, int THREADS, class Epilogue> __device__ __forceinline__ void finish(
        const Epilogue &end, int m, int n, int block) const {
        ThreadElements<BM, BN, WIDE, THREADS, Epilogue> own(TileCoord(block, (m + BM - 1) / BM, (n + BN - 1) / BN), m, n);
        own.load_aux(end);
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < own.COUNT; i++) {
            const Vector<T, WIDE> v = load<T, WIDE>(tile + min(own.tile_row(i), BM - 1) * ROW + own.tile_column(i));
            end.write(own.aux[i], own.index(i), v.lane, own.inside(i));
        }
    }
};
