// Reductions over lanes of a warp, a whole warp, or a block. The order of the operations is fixed, so each run gives the same
// bits.
#pragma once
#include "common/common.cuh"

template <typename A> constexpr bool is_floating = false;
template <> constexpr bool is_floating<float> = true;
template <> constexpr bool is_floating<double> = true;

template <typename A, typename B> constexpr bool is_same = false;
template <typename A> constexpr bool is_same<A, A> = true;

// The smallest value of the type.
template <typename A> __device__ __forceinline__ A lowest() {
    if constexpr (is_floating<A>)
        return -(A)INFINITY;
    else
        return (A)-1 < (A)0 ? (A)((uint64_t)1 << (8 * sizeof(A) - 1)) : (A)0;
}

template <typename A> __device__ __forceinline__ A highest() {
    if constexpr (is_floating<A>)
        return (A)INFINITY;
    else
        return (A)-1 < (A)0 ? (A)~((uint64_t)1 << (8 * sizeof(A) - 1)) : (A)-1;
}

struct Sum {
    template <typename A> static __device__ __forceinline__ A of(A a, A b) { return a + b; }
    template <typename A> static __device__ __forceinline__ A identity() { return (A)0; }
};

// NaN if an argument is NaN, as in NumPy.
struct Max {
    template <typename A> static __device__ __forceinline__ A of(A a, A b) {
#if __CUDA_ARCH__ >= 800
        if constexpr (is_same<A, float>) { // one instruction instead of three
            float c;
            asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
            return c;
        }
#endif
        return a >= b || a != a ? a : b;
    }
    template <typename A> static __device__ __forceinline__ A identity() { return lowest<A>(); }
};

struct Min {
    template <typename A> static __device__ __forceinline__ A of(A a, A b) { return a <= b || a != a ? a : b; }
    template <typename A> static __device__ __forceinline__ A identity() { return highest<A>(); }
};

// The value of lane (own lane ^ mask).
template <typename A> __device__ __forceinline__ A shuffle_xor(A value, int mask) {
    if constexpr (sizeof(A) < 4)
        return (A)__shfl_xor_sync(FULL_MASK, (int)value, mask);
    else
        return __shfl_xor_sync(FULL_MASK, value, mask);
}

// Reduces over COUNT neighbouring lanes (a power of two); each of them gets the result. All lanes of the warp must call it.
template <typename Op, int COUNT, typename A> __device__ __forceinline__ A over_lanes(A value) {
    #pragma unroll
    for (int mask = COUNT / 2; mask > 0; mask /= 2) value = Op::of(value, shuffle_xor(value, mask));
    return value;
}

// Reduces over all threads of the block; each gets the result. Consecutive calls need no barrier between them.
template <typename Op, typename A> __device__ __forceinline__ A over_block(A value) {
    __shared__ A of_warp[WARP];
    const int warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    value = over_lanes<Op, WARP>(value);
    __syncthreads();
    if (lane == 0) of_warp[threadIdx.x / WARP] = value;
    __syncthreads();
    A total = of_warp[0];
    for (int i = 1; i < warps; i++) total = Op::of(total, of_warp[i]);
    return total;
}

// Reduces over the threads of a row: COUNT neighbouring lanes, or all COUNT threads of the block.
template <typename Op, int COUNT, typename A> __device__ __forceinline__ A over_team(A value) {
    if constexpr (COUNT <= WARP)
        return over_lanes<Op, COUNT>(value);
    else
        return over_block<Op>(value);
}
