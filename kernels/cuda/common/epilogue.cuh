// The epilogue of a matrix product: what is done with its elements before they are stored.
//
// A fused equation puts text before the file that defines EPILOGUE and a struct Epilogue. The struct holds pointers only,
// further inputs before outputs, so as a kernel parameter it is laid out like that many pointers.
//
// The call operator gets elements (item, row, column) to (item, row, column + WIDE - 1) of C. item: the matrix of the batch;
// index: of the first element in memory. It is load_aux() and write() in one: load_aux() loads the auxiliary inputs, which do
// not depend on the product. prefetch() prefetches to L2 the auxiliary inputs with C's shape, for `count` contiguous
// elements. An epilogue that pools gets the elements of a window, row by row, and index is that of its maximum.
#pragma once
#include "common/common.cuh"

// Stores the elements.
struct Store {
    T *c;

    template <int WIDE> struct Aux {};
    template <int WIDE> __device__ __forceinline__ Aux<WIDE> load_aux(int64_t, int, int, int64_t) const { return {}; }

    __device__ __forceinline__ void prefetch(int64_t, int) const {}

    template <int WIDE> __device__ __forceinline__ void write(
        const Aux<WIDE> &, int64_t index, const T (&value)[WIDE]) const {
        Vector<T, WIDE> v;
        #pragma unroll
        for (int i = 0; i < WIDE; i++) v.lane[i] = value[i];
        *(Vector<T, WIDE> *)(c + index) = v;
    }

    template <int WIDE> __device__ __forceinline__ void operator()(
        int64_t item, int row, int column, int64_t index, const T (&value)[WIDE]) const {
        write(load_aux<WIDE>(item, row, column, index), index, value);
    }
};

#ifndef EPILOGUE
typedef Store Epilogue;
#endif
