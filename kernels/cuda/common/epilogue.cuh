// The epilogue of a matrix product: what is done with its elements before they are stored.
//
// For a fused equation the generator puts text before the file. It defines EPILOGUE and a struct Epilogue, which holds only
// pointers: the auxiliary inputs, then the outputs. As a kernel parameter it has the layout of as many pointers.
//
// The call operator gets elements (item, row, column) to (item, row, column + WIDE - 1) of C. item: the matrix of the batch.
// index: the first element's index in memory. The operator calls load_aux(), which loads the auxiliary inputs and does not
// depend on the product, and write(), which stores only if `inside`. No branch surrounds what it computes, so the compiler
// can interleave several calls. prefetch() prefetches to L2 `count` contiguous elements of the auxiliary inputs of C's
// shape. WIDEST: the most elements of a vector: 16 bytes of the largest type among the arrays of C's shape. A pooling epilogue gets
// the elements of a window, row by row, and the index of its maximum.
//
// SUMS: how many sums over the rows of C the epilogue has. If it has any, write() also gets the column, and puts the addends of sum
// n in WIDE columns into addends[n].
#pragma once
#include "common/common.cuh"

__device__ __forceinline__ bool finite(T x) { return fabs(x) < (T)INFINITY; }

// Hides how an index was computed from the compiler, which may otherwise store a vector element by element.
__device__ __forceinline__ int64_t opaque(int64_t index) {
#if __CUDA_ARCH__
    asm("" : "+l"(index));
#endif
    return index;
}

// Stores the elements.
struct Store {
    static constexpr int WIDEST = 16 / sizeof(T), SUMS = 0;
    T *c;

    template <int WIDE> struct Aux {};
    template <int WIDE> __device__ __forceinline__ Aux<WIDE> load_aux(int64_t, int, int, int64_t) const { return {}; }

    __device__ __forceinline__ void prefetch(int64_t, int) const {}

    template <int WIDE> __device__ __forceinline__ void write(
        const Aux<WIDE> &, int64_t index, const T (&value)[WIDE], bool inside = true) const {
        Vector<T, WIDE> v;
        #pragma unroll
        for (int i = 0; i < WIDE; i++) v.lane[i] = value[i];
        if (inside) store(c, index, v);
    }

    template <int WIDE> __device__ __forceinline__ void operator()(
        int64_t item, int row, int column, int64_t index, const T (&value)[WIDE]) const {
        write(load_aux<WIDE>(item, row, column, index), index, value);
    }
};

#ifndef EPILOGUE
typedef Store Epilogue;
#endif
