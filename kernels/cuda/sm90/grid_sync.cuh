// Counters in global memory by which blocks of one launch wait for each other. All of the blocks must run at the same time: see
// `CudaLaunch.cooperative` in core/kernel.py.
#pragma once
#include "common/common.cuh"

// Orders this thread's accesses to global memory by ordinary instructions with those of bulk copies (the async proxy).
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Adds 1. Everything that this thread has written, or has seen written by a barrier of its block, is visible to threads that
// wait for the new count.
__device__ __forceinline__ void arrive_at(int *counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// Waits until the count is at least this.
__device__ __forceinline__ void wait_for_count(const int *counter, int count) {
    int now;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    } while (now < count);
}

// Turns: each block waits until the count is its number. By one thread: afterwards asynchronous copies by this thread see what
// others wrote before they passed their turns.
__device__ __forceinline__ void wait_for_turn(const int *counter, int number) {
    int found;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
    while (found != number);
    asm volatile("fence.proxy.async;" ::: "memory");
}
// By the same thread, after its writes are complete.
__device__ __forceinline__ void pass_turn(int *counter) {
    asm volatile("fence.proxy.async;\nred.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// Reads numbers that other blocks have written in this launch. From L2: L1 may hold older ones.
__device__ __forceinline__ float4 load_shared_by_blocks(const float4 *from) { return __ldcg(from); }

// Adds to four numbers in global memory that no other thread changes, without waiting for them.
__device__ __forceinline__ void add_in_memory(float *to, const Vector<float, 4> &x) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
        ::"l"(to), "f"(x.lane[0]), "f"(x.lane[1]), "f"(x.lane[2]), "f"(x.lane[3])
        : "memory");
}
