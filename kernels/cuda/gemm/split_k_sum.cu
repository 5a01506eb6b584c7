// The second pass of a product whose K was cut into splits: adds their sums, which lie one after another in scratch,
// in the order of the splits. Rows and columns are those of m x n matrices.
//
// TEAMS threads share an element, each some neighbouring splits, where elements are so few that one thread for each would
// wait for its reads.
#ifndef TEAMS
#define TEAMS 1
#endif
#include "common/epilogue.cuh"

constexpr int THREADS = 256, COUNT = THREADS / TEAMS; // COUNT: elements of a block

KERNEL __launch_bounds__(THREADS) sum_splits(const T *a, const T *b, const Epilogue epilogue, int64_t size, int64_t m,
    int64_t n, int64_t splits, char *scratch) {
    wait_for_inputs();
    const int team = threadIdx.x / COUNT;
    const int64_t index = (int64_t)blockIdx.x * COUNT + threadIdx.x % COUNT;
    const T *parts = (const T *)scratch + index;
    T sum[1] = {0};
    if (index < size) {
        #pragma unroll 8 // reads that are under way at once
        for (int64_t i = splits * team / TEAMS; i < splits * (team + 1) / TEAMS; i++) sum[0] += parts[i * size];
    }
#if TEAMS > 1
    __shared__ T sums[TEAMS][COUNT];
    sums[team][threadIdx.x % COUNT] = sum[0];
    __syncthreads();
    if (team > 0) return;
    #pragma unroll
    for (int i = 1; i < TEAMS; i++) sum[0] += sums[i][threadIdx.x];
#endif
    const int64_t line = index / n;
    if (index < size) epilogue(line / m, line % m, index % n, index, sum);
}
