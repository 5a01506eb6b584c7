// Reductions by threads that work together: some lanes of a warp, a warp, a block. The order in which values are
// combined is fixed, so the same input gives the same bits.
#pragma once
#include "common.cuh"

struct Sum {
    template <typename A> static __device__ __forceinline__ A of(A a, A b) { return a + b; }
};

// NaN is the result wherever it is an argument, as NumPy has it.
struct Max {
    template <typename A> static __device__ __forceinline__ A of(A a, A b) { return a >= b || a != a ? a : b; }
};

struct Min {
    template <typename A> static __device__ __forceinline__ A of(A a, A b) { return a <= b || a != a ? a : b; }
};

// Elements in `rows` runs of `length`, which start `distance` apart: the place of element r.
struct Runs {
    int64_t rows, length, distance;

    __device__ __forceinline__ int64_t count() const { return rows * length; }
    __device__ __forceinline__ int64_t place(int64_t r) const
    {
        if (rows == 1)
            return r;
        if (count() < (int64_t)1 << 31) // 32 bits divide several times faster than 64
            return (uint32_t)r / (uint32_t)length * distance + (uint32_t)r % (uint32_t)length;
        return r / length * distance + r % length;
    }
};

// The value of the lane whose number differs from ours in the bits of `mask`.
template <typename A> __device__ __forceinline__ A exchanged(A value, int mask)
{
    if constexpr (sizeof(A) < 4)
        return (A)__shfl_xor_sync(FULL_MASK, (int)value, mask);
    else
        return __shfl_xor_sync(FULL_MASK, value, mask);
}

// Over COUNT neighbouring lanes (a power of two), in each of them. All lanes of the warp must come here.
template <typename Op, int COUNT, typename A> __device__ __forceinline__ A over_lanes(A value)
{
#pragma unroll
    for (int mask = COUNT / 2; mask > 0; mask /= 2)
        value = Op::of(value, exchanged(value, mask));
    return value;
}

// Over all threads of the block, in each of them. May be called again at once: it ends and begins with a barrier.
template <typename Op, typename A> __device__ __forceinline__ A over_block(A value)
{
    __shared__ A of_warp[WARP];
    const int warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    value = over_lanes<Op, WARP>(value);
    __syncthreads();
    if (lane == 0)
        of_warp[threadIdx.x / WARP] = value;
    __syncthreads();
    A total = of_warp[0];
    for (int i = 1; i < warps; i++)
        total = Op::of(total, of_warp[i]);
    return total;
}
