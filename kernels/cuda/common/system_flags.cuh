// Flags in memory by which thread blocks of several GPUs wait for each other.
#pragma once
#include "common/common.cuh"

// Stores a number. What this thread has written, or has seen written by a barrier of its block, is visible before.
__device__ __forceinline__ void set_flag(uint32_t *flag, uint32_t number) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(number) : "memory");
}

// Waits until the flag is at least this number, modulo 2^32.
__device__ __forceinline__ void wait_for_flag(const uint32_t *flag, uint32_t number) {
    uint32_t seen;
    do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    } while ((int32_t)(seen - number) < 0);
}
