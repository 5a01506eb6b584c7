// Barriers and fences of Hopper: mbarriers in shared memory, named barriers, proxy fences. PTX ISA, "mbarrier".
#pragma once
#include "common/common.cuh"

constexpr int WARPGROUP = 4 * WARP;

// An mbarrier in shared memory. A phase ends after all arrivals and all expected bytes; the next one begins at once. The parity
// of phases alternates; the first is 0.
struct Mbarrier {
    uint64_t state;

    __device__ __forceinline__ unsigned address() const { return (unsigned)__cvta_generic_to_shared(&state); }

    __device__ __forceinline__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address()) : "memory");
    }
    // Arrives, and adds `bytes` to the transaction bytes that the phase expects.
    __device__ __forceinline__ void arrive_expect_tx(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
    }
    // Arrives when the copies by cp.async that this thread has started are done.
    __device__ __forceinline__ void arrive_after_copies() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address()) : "memory");
    }
    // Waits for the end of the phase with this parity.
    __device__ __forceinline__ void wait(int parity) {
        asm volatile("{\n"
                     ".reg .pred done;\n"
                     "again:\n"
                     "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                     "@!done bra again;\n"
                     "}" ::"r"(address()), "r"(parity) : "memory");
    }
};

// Makes initialised mbarriers visible to the async proxy. A __syncthreads() must follow.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Makes this thread's writes to shared memory visible to WGMMA and TMA (the async proxy).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// One arrival for a whole warp, after all of its lanes.
__device__ __forceinline__ void arrive_per_warp(Mbarrier &barrier) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier.arrive();
}

// Synchronises `threads` threads of the block at named barrier `id` (1 to 15; 0 is __syncthreads).
__device__ __forceinline__ void named_barrier_sync(int threads, int id = 1) {
    asm volatile("bar.sync %1, %0;" ::"r"(threads), "r"(id) : "memory");
}
// Arrives at a named barrier without waiting: `threads` counts those that wait too.
__device__ __forceinline__ void named_barrier_arrive(int threads, int id) {
    asm volatile("bar.arrive %1, %0;" ::"r"(threads), "r"(id) : "memory");
}

// Whether a block has registers for producer threads with of_producer each and consumer threads with of_consumer each. It starts
// with the same number for each thread, a multiple of 8. warpgroup_reg_alloc() never returns if consumers ask for more than that
// and what producers have freed.
__device__ constexpr bool registers_suffice(int producers, int of_producer, int consumers, int of_consumer) {
    constexpr int REGISTERS = 64 << 10; // of a multiprocessor
    const int threads = producers + consumers;
    return producers * of_producer + consumers * of_consumer <= REGISTERS / threads / 8 * 8 * threads;
}
// Changes the number of registers of each thread of a warpgroup; COUNT is a multiple of 8.
template <int COUNT> __device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
