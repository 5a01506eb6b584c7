// What is done with the elements of a product on their way to memory.
//
// A fused equation puts a text of its own in front of the file, which defines EPILOGUE and a struct Epilogue. It holds
// pointers only, further inputs before outputs, so that in a kernel's parameters it looks like that many pointers.
//
// It is called for elements (item, row, column) to (item, row, column + WIDE - 1); index: of the first one in C, the
// batch counted. `read` and `write` are the call's two halves: what `read` returns does not depend on the product. `ask`
// asks the second cache for what `read` will want beside `count` neighbours in memory, of arrays of C's shape. One that
// pools is called for the elements of a window, row by row, and index is that of its maximum.
#pragma once
#include "common/common.cuh"

// Stores them.
struct Store {
    T *c;

    template <int WIDE> struct Beside {};
    template <int WIDE> __device__ __forceinline__ Beside<WIDE> read(int64_t, int, int, int64_t) const { return {}; }

    __device__ __forceinline__ void ask(int64_t, int) const {}

    template <int WIDE> __device__ __forceinline__ void write(
        const Beside<WIDE> &, int64_t index, const T (&value)[WIDE]) const {
        Vector<T, WIDE> v;
        #pragma unroll
        for (int i = 0; i < WIDE; i++) v.lane[i] = value[i];
        *(Vector<T, WIDE> *)(c + index) = v;
    }

    template <int WIDE> __device__ __forceinline__ void operator()(
        int64_t item, int row, int column, int64_t index, const T (&value)[WIDE]) const {
        write(read<WIDE>(item, row, column, index), index, value);
    }
};

#ifndef EPILOGUE
typedef Store Epilogue;
#endif
