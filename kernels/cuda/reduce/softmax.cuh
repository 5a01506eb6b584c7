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

// The value of an element that is held until the sum is known, and the term that it adds to the sum.
static __device__ __forceinline__ T kept(T x, T top) { return LOGARITHM ? x - top : exp(x - top); }

static __device__ __forceinline__ T term(T kept) { return LOGARITHM ? exp(kept) : kept; }

// The sum of a row's terms, in the form that turns held values into results.
struct Total {
    T factor;

    Total() = default;
    __device__ __forceinline__ explicit Total(T sum) : factor(LOGARITHM ? log(sum) : 1 / sum) {}
    __device__ __forceinline__ T result(T kept) const { return LOGARITHM ? kept - factor : kept * factor; }
};

// LENGTH elements of stride `step`, by one thread; `to` may equal `from`.
static __device__ __forceinline__ void by_thread(const T *from, T *to, int64_t step)
{
    T mine[LENGTH], top = -(T)INFINITY, sum = 0;
#pragma unroll
    for (int j = 0; j < LENGTH; j++)
        mine[j] = from[j * step];
#pragma unroll
    for (int j = 0; j < LENGTH; j++)
        top = Max::of(top, mine[j]);
#pragma unroll
    for (int j = 0; j < LENGTH; j++) {
        mine[j] = kept(mine[j], top);
        sum += term(mine[j]);
    }
    const Total total(sum);
#pragma unroll
    for (int j = 0; j < LENGTH; j++)
        to[j * step] = total.result(mine[j]);
}
