// cp.async: copies from global to shared memory that need no registers. Before compute capability 8.0 they are synchronous.
#pragma once
#include "common/common.cuh"

// Copies BYTES (4, 8 or 16) to shared memory if `take`, else writes zeros. CACHED: a 16-byte copy allocates in L1, for data
// that other blocks of the multiprocessor read too. Smaller copies always do.
template <int BYTES, bool CACHED = false, typename E>
__device__ __forceinline__ void cp_async(E *to, const E *from, bool take) {
#if __CUDA_ARCH__ >= 800
    const unsigned target = (unsigned)__cvta_generic_to_shared(to);
    const int bytes = take ? BYTES : 0; // the instruction fills up with zeros
    if (BYTES == 16 && !CACHED)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(from), "n"(BYTES), "r"(bytes)
            : "memory");
#else
    typedef Vector<E, BYTES / sizeof(E)> Bytes;
    *(Bytes *)to = take ? *(const Bytes *)from : Bytes{};
#endif
}

// Ends a group of copies. A pipeline stage without copies commits an empty group, so that groups count stages.
__device__ __forceinline__ void cp_async_commit_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of this thread but the last GROUPS.
template <int GROUPS> __device__ __forceinline__ void cp_async_wait_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#endif
}
