// The second pass of split-K: adds the partial sums of scratch in the order of the splits, and calls the epilogue. Matrices are
// m x n.
//
// GROUPS threads share an element; each adds neighbouring splits. For a small result one thread per element is latency-bound.
#include "common/epilogue.cuh"

constexpr int THREADS = 256, ELEMENTS = THREADS / GROUPS; // elements of a block

KERNEL __launch_bounds__(THREADS) split_k_sum(const T *a, const T *b, const Epilogue epilogue, int64_t size, int64_t m,
    int64_t n, int64_t splits, char *scratch) {
    wait_for_inputs();
    const int group = threadIdx.x / ELEMENTS;
    const int64_t index = (int64_t)blockIdx.x * ELEMENTS + threadIdx.x % ELEMENTS;
    const T *partial = (const T *)scratch + index;
    T sum[1] = {0};
    if (index < size) {
        #pragma unroll 8 // loads in flight
        for (int64_t i = splits * group / GROUPS; i < splits * (group + 1) / GROUPS; i++) sum[0] += partial[i * size];
    }
#if GROUPS > 1
    __shared__ T sums[GROUPS][ELEMENTS];
    sums[group][threadIdx.x % ELEMENTS] = sum[0];
    __syncthreads();
    if (group > 0) return;
    #pragma unroll
    for (int i = 1; i < GROUPS; i++) sum[0] += sums[i][threadIdx.x];
#endif
    const int64_t row = index / n;
    if (index < size) epilogue(row / m, row % m, index % n, index, sum);
}
