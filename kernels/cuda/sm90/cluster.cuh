// Thread block clusters of CLUSTER blocks: blocks that run at the same time and write to each other's shared memory (Hopper and
// later). With CLUSTER = 1 these functions work on any GPU.
#pragma once
#include "common/collectives.cuh"
#include "sm90/mbarrier.cuh"

extern __shared__ __align__(16) unsigned char shared_bytes[];

#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

// Dynamic shared memory of this block.
__device__ __forceinline__ unsigned char *own_shared() { return shared_bytes; }

// The index of this block in its cluster.
__device__ __forceinline__ int cluster_rank() { return CLUSTER > 1 ? blockIdx.x % CLUSTER : 0; }

// The address in the shared memory of block `rank` of the cluster that corresponds to `own` in this block's.
template <typename E> __device__ __forceinline__ E *map_shared_rank(E *own, int rank) {
#if CLUSTER > 1
    E *there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(own), "r"(rank));
    return there;
#else
    return own;
#endif
}

// A barrier of all threads of the cluster in two halves. What a thread has written before it arrives, also to the shared memory
// of other blocks, is visible to all threads after they have waited. Arriving waits for the thread's own writes, also for those
// to global memory, so writes that no other thread reads are better placed between the halves. No block may end while others
// write to its shared memory.
__device__ __forceinline__ void cluster_arrive() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
// The same where the threads have written nothing since a barrier of the block. Then a fence of one warp covers the writes of all
// threads, and only the last warp waits for them.
__device__ __forceinline__ void cluster_arrive_after_sync() {
#if CLUSTER > 1
    if (threadIdx.x >= blockDim.x - WARP) asm volatile("fence.acq_rel.cluster;" ::: "memory");
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
// Arrives without ordering the thread's reads and writes, so it does not wait for writes to global memory. Where others overwrite
// what the thread has read or read what it has written, a thread that it has met at a barrier of the block must arrive with
// cluster_arrive().
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}
__device__ __forceinline__ void cluster_barrier() { cluster_arrive(), cluster_wait(); }

// Stores a value in block `rank`, at the address that corresponds to `own` in this block. The barrier there that corresponds to
// `barrier` counts its bytes, and threads that wait for the end of its phase see the value (PTX ISA, "st.async").
template <typename E> __device__ __forceinline__ void store_async(E *own, int rank, E value, Mbarrier &barrier) {
#if CLUSTER > 1
    unsigned to, at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"((unsigned)__cvta_generic_to_shared(own)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(barrier.address()), "r"(rank));
    if constexpr (sizeof(E) == 4)
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
            ::"r"(to), "r"(*(const uint32_t *)&value), "r"(at) : "memory");
    else if constexpr (sizeof(E) == 16)
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
            ::"r"(to), "r"(value.lane[0]), "r"(value.lane[1]), "r"(value.lane[2]), "r"(value.lane[3]), "r"(at) : "memory");
    else
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];"
            ::"r"(to), "l"(*(const uint64_t *)&value), "r"(at) : "memory");
#endif
}

// Waits for the end of the phase with this parity. What other blocks of the cluster have stored is then visible.
__device__ __forceinline__ void wait_for_cluster(Mbarrier &barrier, int parity) {
#if CLUSTER > 1
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier.address()), "r"(parity) : "memory");
#endif
}
