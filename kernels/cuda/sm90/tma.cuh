// Asynchronous bulk copies from global to shared memory: plain ones, and tensor copies by TMA.
#pragma once
#include "sm90/mbarrier.cuh"

// Starts to copy BYTES contiguous bytes into shared memory; `full` counts them as transaction bytes.
template <int BYTES> __device__ __forceinline__ void bulk_copy(char *to, const char *from, Mbarrier &full) {
    constexpr int MAX_COPY = 8192; // one copy of all bytes is up to 6% slower
    #pragma unroll
    for (int i = 0; i < BYTES; i += MAX_COPY)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
            ::"r"((unsigned)__cvta_generic_to_shared(to + i)), "l"(from + i), "r"(min(MAX_COPY, BYTES - i)),
            "r"(full.address())
            : "memory");
}

// Starts to copy BYTES contiguous bytes from shared to global memory, or to add them as float32. The calling thread waits with
// bulk_wait_read() until shared memory may be overwritten, with bulk_wait() until the results are in global memory.
template <int BYTES> __device__ __forceinline__ void bulk_store(float *to, const char *from) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
        "r"((unsigned)__cvta_generic_to_shared(from)), "n"(BYTES)
        : "memory");
}
template <int BYTES> __device__ __forceinline__ void bulk_add(float *to, const char *from) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"((unsigned)__cvta_generic_to_shared(from)), "n"(BYTES)
        : "memory");
}
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// A tensor map, which the host encodes: CUtensorMap of the driver API, `TensorMap` in core/kernel.py. It is a parameter of the
// kernel, const __grid_constant__.
struct alignas(64) TensorMap {
    uint64_t words[16];

    // Fetches the map, so that the first copy does not wait for it.
    __device__ __forceinline__ void prefetch() const { asm volatile("prefetch.tensormap [%0];" ::"l"(this) : "memory"); }
    // Starts to load the box whose first element is (matrix, row, column).
    __device__ __forceinline__ void load(char *to, int column, int row, int matrix, Mbarrier &full) const {
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4}], [%5];"
            ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(this), "r"(column), "r"(row), "r"(matrix),
            "r"(full.address())
            : "memory");
    }
};
