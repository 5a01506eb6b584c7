// Elements of softmax and log_softmax. The maximum is subtracted before exp, so that nothing overflows.
#pragma once
#define OPERATION 4
#include "reduce/accumulators.cuh"

#ifndef LENGTH
#define LENGTH 1
#endif
#ifndef LOGARITHM
#define LOGARITHM 0
#endif

// The result of an element before normalisation, and the term that it adds to the sum.
static __device__ __forceinline__ T unnormalized(T x, T top) { return LOGARITHM ? x - top : exp(x - top); }

static __device__ __forceinline__ T term(T value) { return LOGARITHM ? exp(value) : value; }

// The sum of a row's terms, as the number that normalises its elements.
struct Total {
    T factor;

    Total() = default;
    __device__ __forceinline__ explicit Total(T sum) : factor(LOGARITHM ? log(sum) : 1 / sum) {}
    __device__ __forceinline__ T result(T value) const { return LOGARITHM ? value - factor : value * factor; }
};

// LENGTH elements of stride `step`, by one thread; `to` may equal `from`.
static __device__ __forceinline__ void by_thread(const T *from, T *to, int64_t step) {
    T mine[LENGTH], top = -(T)INFINITY, sum = 0;
    #pragma unroll
    for (int j = 0; j < LENGTH; j++) mine[j] = from[j * step];
    #pragma unroll
    for (int j = 0; j < LENGTH; j++) top = Max::of(top, mine[j]);
    #pragma unroll
    for (int j = 0; j < LENGTH; j++) {
        mine[j] = unnormalized(mine[j], top);
        sum += term(mine[j]);
    }
    const Total total(sum);
    #pragma unroll
    for (int j = 0; j < LENGTH; j++) to[j * step] = total.result(mine[j]);
}
