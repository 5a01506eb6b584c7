// Dynamic scheduling of work items in order, and flags between blocks. An item may wait for flags of earlier items: the
// blocks that work on those are running already. The counter is 0 before the launch.
#pragma once
#include "common/common.cuh"

// All threads of a block call work(i) together for items i of 0 to count - 1, in increasing order. The next ticket is drawn
// before an item is worked on, so that its latency is hidden.
template <class Work> __device__ __forceinline__ void for_each_in_order(int *counter, int count, const Work &work) {
    __shared__ int ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(counter, 1);
    for (;;) {
        __syncthreads();
        const int item = ticket;
        if (item >= count) return;
        int next = 0;
        if (threadIdx.x == 0) next = atomicAdd(counter, 1);
        work(item);
        __syncthreads(); // all threads have read `ticket` and finished with shared memory
        if (threadIdx.x == 0) ticket = next;
    }
}

// Spins until another block has written a word that is not 0.
template <typename Word> __device__ __forceinline__ Word wait_for_flag(const Word *from) {
    for (;;) {
        const Word found = *(const volatile Word *)from;
        if (found != 0) return found;
        __nanosleep(100);
    }
}
template <typename Word> __device__ __forceinline__ void set_flag(Word *to, Word word) { *(volatile Word *)to = word; }
