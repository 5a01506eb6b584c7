// Rows in registers, for generated kernels. A thread holds COUNT elements of its row. Elements past its end are
// zero or unspecified; reductions skip them.
#pragma once
#include "common/collectives.cuh"

// A row of LENGTH elements, shared by TEAM threads: neighbouring lanes of a warp, or all threads of the block. Each
// thread has ITEMS vectors of WIDTH elements.
template <int LENGTH, int TEAM, int ITEMS, int WIDTH> struct RegisterRow {
    static constexpr int COUNT = ITEMS * WIDTH;

    static __device__ __forceinline__ int thread() { return threadIdx.x % TEAM; }

    // The column of element i of this thread.
    static __device__ __forceinline__ int column(int i) { return (i / WIDTH * TEAM + thread()) * WIDTH + i % WIDTH; }

    static __device__ __forceinline__ bool inside(int i) { return TEAM * COUNT == LENGTH || column(i) < LENGTH; }

    template <typename A> static __device__ __forceinline__ void load(const A *row, A (&to)[COUNT]) {
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            Vector<A, WIDTH> v = {};
            if (inside(k * WIDTH)) v = ::load<A, WIDTH>(row + column(k * WIDTH));
            #pragma unroll
            for (int j = 0; j < WIDTH; j++) to[k * WIDTH + j] = v.lane[j];
        }
    }

    template <typename A> static __device__ __forceinline__ void store(const A (&from)[COUNT], A *row) {
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            Vector<A, WIDTH> v;
            #pragma unroll
            for (int j = 0; j < WIDTH; j++) v.lane[j] = from[k * WIDTH + j];
            if (inside(k * WIDTH)) ::store(row, column(k * WIDTH), v);
        }
    }

    // Reduces the row as numbers of type A. All threads of the team get the result.
    template <typename Op, typename A, typename E> static __device__ __forceinline__ A reduce(const E (&x)[COUNT]) {
        A value = Op::template identity<A>();
        #pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (inside(i)) value = Op::of(value, (A)x[i]);
        return over_team<Op, TEAM>(value);
    }

    // softmax, or its logarithm.
    template <bool LOGARITHM, typename A>
    static __device__ __forceinline__ void softmax(const A (&x)[COUNT], A (&y)[COUNT]) {
        const A top = reduce<Max, A>(x);
        A total = 0;
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            y[i] = LOGARITHM ? x[i] - top : (A)exp(x[i] - top);
            if (inside(i)) total += LOGARITHM ? (A)exp(y[i]) : y[i];
        }
        total = over_team<Sum, TEAM>(total);
        const A shift = LOGARITHM ? (A)log(total) : 1 / total;
        #pragma unroll
        for (int i = 0; i < COUNT; i++) y[i] = LOGARITHM ? y[i] - shift : y[i] * shift;
    }

    // The first element of the row, for all threads of the team.
    template <typename A> static __device__ __forceinline__ A first(const A (&x)[COUNT]) {
        if constexpr (TEAM <= WARP) {
            return __shfl_sync(FULL_MASK, x[0], threadIdx.x % WARP / TEAM * TEAM);
        } else {
            __shared__ A found;
            if (thread() == 0) found = x[0];
            __syncthreads();
            return found; // over_team synchronizes before the next row
        }
    }

    // Mean 0 and variance 1. The first element is subtracted before, so that numbers that are all alike become 0.
    template <typename A>
    static __device__ __forceinline__ void standardize(const A (&x)[COUNT], A (&y)[COUNT], A &mean, A &variance, A eps) {
        const A start = first(x);
        #pragma unroll
        for (int i = 0; i < COUNT; i++) y[i] = x[i] - start;
        const A shift = reduce<Sum, A>(y) / (A)LENGTH;
        mean = start + shift;
        A squares = 0;
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            y[i] -= shift;
            if (inside(i)) squares += y[i] * y[i];
        }
        variance = over_team<Sum, TEAM>(squares) / (A)LENGTH;
        const A inverse = 1 / sqrt(variance + eps);
        #pragma unroll
        for (int i = 0; i < COUNT; i++) y[i] *= inverse;
    }

    // The column of the first maximum. NaN counts as the maximum, as in NumPy.
    template <typename E> static __device__ __forceinline__ int64_t argmax(const E (&x)[COUNT]) {
        const E top = reduce<Max, E>(x);
        int first = LENGTH;
        #pragma unroll
        for (int i = COUNT - 1; i >= 0; i--)
            if (inside(i) && (x[i] == top || x[i] != x[i])) first = column(i);
        return over_team<Min, TEAM>(first);
    }

    // The element of a column, for all threads of the team; 0 where there is no such column.
    template <typename A> static __device__ __forceinline__ A at(const A (&x)[COUNT], int64_t index) {
        A value = 0;
        #pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (column(i) == index) value = x[i];
        return over_team<Sum, TEAM>(value);
    }
};
