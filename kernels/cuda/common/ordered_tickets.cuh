// Pieces of work that the blocks of a launch take in order, so that one may wait for those in front of it: blocks that have
// these run already, whatever else does. What counts is 0 before the launch.
#pragma once
#include "common/common.cuh"

// By all threads of a block: work(i) of pieces 0 to count - 1, as they are free. The next one is asked for before a piece is
// worked on.
template <class Work> __device__ __forceinline__ void take_in_order(int *taken, int count, const Work &work) {
    __shared__ int found;
    if (threadIdx.x == 0) found = atomicAdd(taken, 1);
    for (;;) {
        __syncthreads();
        const int piece = found;
        if (piece >= count) return;
        int next = 0;
        if (threadIdx.x == 0) next = atomicAdd(taken, 1);
        work(piece);
        __syncthreads(); // all have read the last one, and what the piece has put into shared memory
        if (threadIdx.x == 0) found = next;
    }
}

// What a thread of another block writes, as a whole and never 0: waits until it is there.
template <typename Word> __device__ __forceinline__ Word heard(const Word *from) {
    for (;;) {
        const Word found = *(const volatile Word *)from;
        if (found != 0) return found;
        __nanosleep(100);
    }
}
template <typename Word> __device__ __forceinline__ void tell(Word *to, Word word) { *(volatile Word *)to = word; }
