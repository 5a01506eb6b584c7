// An epilogue through shared memory. The accumulators of a tile are scattered over threads. Here all threads of the block pass
// the tile to the epilogue, with neighbouring columns in neighbouring threads, and load the auxiliary inputs early.
#pragma once
#include "gemm/gemm.cuh"

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
