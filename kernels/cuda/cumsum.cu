// Running sums along an axis, from its end with `reverse`.
#include "group.cuh"

// Neighbouring threads take neighbouring lines.
KERNEL cumsum_thread(const T *x, U *y, int64_t outer, int64_t length, int64_t inner, int64_t reverse)
{
    wait_for_inputs();
    for (int64_t i = grid_index(); i < outer * inner; i += grid_size()) {
        const int64_t start = i / inner * length * inner + i % inner;
        U total = 0;
        for (int64_t k = 0; k < length; k++) {
            const int64_t at = start + (reverse ? length - 1 - k : k) * inner;
            total += (U)x[at];
            y[at] = total;
        }
    }
}

// A block for each line of neighbouring elements: as many at a time as it has threads, by shuffles within a warp and
// the warps' totals in shared memory; `carry` is the sum of all before them.
KERNEL cumsum_block(const T *x, U *y, int64_t outer, int64_t length, int64_t, int64_t reverse)
{
    wait_for_inputs();
    __shared__ U of_warp[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    U carry = 0;
    for (int64_t begin = 0; begin < length; begin += blockDim.x) {
        const int64_t k = begin + threadIdx.x;
        const int64_t at = blockIdx.x * length + (reverse ? length - 1 - k : k);
        U sum = k < length ? (U)x[at] : (U)0;
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            const U before = __shfl_up_sync(FULL_MASK, sum, distance);
            if (lane >= distance)
                sum += before;
        }
        if (lane == WARP - 1)
            of_warp[warp] = sum;
        __syncthreads();
        U earlier = carry;
        for (int w = 0; w < blockDim.x / WARP; w++) {
            if (w < warp)
                earlier += of_warp[w];
            carry += of_warp[w];
        }
        if (k < length)
            y[at] = sum + earlier;
        __syncthreads();
    }
}
