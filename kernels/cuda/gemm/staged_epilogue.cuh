// A product's tile in shared memory on its way to an epilogue. An engine's lanes have elements here and there of a tile;
// here all threads of the block take part, neighbours taking neighbouring columns, and what the epilogue reads is asked
// for before the elements are there.
#pragma once
#include "gemm/gemm.cuh"

// This thread's part of tile `at` of m x n matrices: vectors of WIDE neighbouring columns.
template <int BM, int BN, int WIDE, int THREADS, class Epilogue> struct Share {
    static constexpr int LINE = BN / WIDE, COUNT = (BM * LINE + THREADS - 1) / THREADS;
    const TileAt at;
    const int m, n;
    typename Epilogue::template Beside<WIDE> beside[COUNT];

    __device__ __forceinline__ Share(const TileAt &at, int m, int n) : at(at), m(m), n(n) {}

    // Of vector i: where it begins in the tile, in the matrix, and in memory.
    __device__ __forceinline__ int down(int i) const { return (i * THREADS + threadIdx.x) / LINE; }
    __device__ __forceinline__ int right(int i) const { return (i * THREADS + threadIdx.x) % LINE * WIDE; }
    __device__ __forceinline__ int row(int i) const { return at.down * BM + down(i); }
    __device__ __forceinline__ int column(int i) const { return at.across * BN + right(i); }
    __device__ __forceinline__ int64_t index(int i) const { return index(row(i), column(i)); }
    __device__ __forceinline__ bool inside(int i) const { return down(i) < BM && row(i) < m && column(i) < n; }

    // Of a vector outside, what lies beside another one: a branch here would keep back all reads behind it.
    __device__ __forceinline__ void read(const Epilogue &end) {
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int down = min(at.down * BM + min(this->down(i), BM - 1), m - 1), across = min(column(i), n - WIDE);
            beside[i] = end.template read<WIDE>(at.item, down, across, index(down, across));
        }
    }

  private:
    __device__ __forceinline__ int64_t index(int row, int column) const {
        int64_t place = (at.item * m + row) * n + column;
#if __CUDA_ARCH__
        asm("" : "+l"(place)); // where the compiler sees through it, it writes the elements of a vector one by one
#endif
        return place;
    }
};

// What an engine hands its elements to.
template <int BM, int BN> struct Staged {
    static constexpr int ROW = BN + VECTOR;
    T *tile;

    template <int WIDE> __device__ __forceinline__ void operator()(
        int64_t, int row, int column, int64_t, const T (&value)[WIDE]) const {
        #pragma unroll
        for (int i = 0; i < WIDE; i++) tile[row % BM * ROW + column % BN + i] = value[i];
    }

    // Of all threads of the block, after the engine: tile `block` of m x n matrices to `end`.
    template <int WIDE, int THREADS, class Epilogue> __device__ __forceinline__ void finish(
        const Epilogue &end, int m, int n, int block) const {
        Share<BM, BN, WIDE, THREADS, Epilogue> share(TileAt(block, (m + BM - 1) / BM, (n + BN - 1) / BN), m, n);
        share.read(end);
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < share.COUNT; i++) {
            if (!share.inside(i)) continue;
            const Vector<T, WIDE> v = load<T, WIDE>(tile + share.down(i) * ROW + share.right(i));
            end.write(share.beside[i], share.index(i), v.lane);
        }
    }
};
