// Turns of thread blocks: a counter in global memory. A block waits until it has its number. All of the blocks must run at the
// same time: see `CudaLaunch.cooperative` in core/kernel.py.
#pragma once
#include "common/common.cuh"

// By one thread. Afterwards asynchronous copies by this thread see what others wrote before they passed their turns.
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
