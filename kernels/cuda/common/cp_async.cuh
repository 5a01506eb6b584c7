// Copies from device memory to shared memory that a thread starts and waits for later; they need no registers on the way.
#pragma once
#include "common/common.cuh"

// Copies `BYTES` (4, 8 or 16) into shared memory, or fills them with zeros unless `take`; done after a wait. CACHED:
// through the first cache where 16 bytes else pass it by, for what the multiprocessor's other blocks read too.
template <int BYTES, bool CACHED = false, typename E>
__device__ __forceinline__ void copy_async(E *to, const E *from, bool take) {
#if __CUDA_ARCH__ >= 800
    const unsigned target = (unsigned)__cvta_generic_to_shared(to);
    const int bytes = take ? BYTES : 0; // the rest is filled with zeros
    if (BYTES == 16 && !CACHED)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(bytes));
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(from), "n"(BYTES), "r"(bytes));
#else // compute capability 7.5: through registers
    typedef Vector<E, BYTES / sizeof(E)> Bytes;
    *(Bytes *)to = take ? *(const Bytes *)from : Bytes{};
#endif
}

// Ends a group of copies. A stage that loads nothing ends an empty group: the count of groups tells which have landed.
__device__ __forceinline__ void end_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;");
#endif
}

// Waits until all but the last GROUPS groups of this thread's copies have landed.
template <int GROUPS> __device__ __forceinline__ void wait_groups() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS));
#endif
}
