// A product's tile on its way to an epilogue that reads matrices itself. An engine hands a thread's elements over one
// row after the other, so each would wait for what it reads; through shared memory all threads of the block take part,
// neighbours taking neighbouring columns.
#pragma once
#include "gemm.cuh"

template <int BM, int BN> struct Staged {
    static constexpr int ROW = BN + VECTOR;
    T *tile;

    template <int WIDE> __device__ __forceinline__ void operator()(
        int64_t, int row, int column, int64_t, const T (&value)[WIDE]) const {
        #pragma unroll
        for (int i = 0; i < WIDE; i++) tile[row % BM * ROW + column % BN + i] = value[i];
    }

    // After a barrier: tile `block` of m x n matrices to `end`, WIDE neighbouring columns at a time.
    template <int WIDE, int THREADS, class Epilogue> __device__ __forceinline__ void finish(
        const Epilogue &end, int m, int n, int block) const {
        const TileAt at(block, (m + BM - 1) / BM, (n + BN - 1) / BN);
        #pragma unroll 2
        for (int i = threadIdx.x; i < BM * BN / WIDE; i += THREADS) {
            const int down = i / (BN / WIDE), right = i % (BN / WIDE) * WIDE;
            const int row = at.down * BM + down, column = at.across * BN + right;
            if (row >= m || column >= n) continue;
            const Vector<T, WIDE> v = load<T, WIDE>(tile + down * ROW + right);
            end(at.item, row, column, (at.item * m + row) * n + column, v.lane);
        }
    }
};
