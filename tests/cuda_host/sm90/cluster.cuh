// kernels/cuda/sm90/cluster.cuh on the CPU: see host.h.
#pragma once
#include "common/collectives.cuh"
#include "sm90/mbarrier.cuh"

#define CLUSTER_DIMS

static unsigned char *own_shared() { return shared_bytes; }
static int cluster_rank() { return current / blockDim.x; }
template <typename E> static E *map_shared_rank(E *own, int rank) {
    return (E *)(shared_of_block[rank].bytes + ((unsigned char *)own - own_shared()));
}
static unsigned phase_of_thread[FIBERS]; // of `of_cluster`
static void cluster_arrive() {
    if (CLUSTER == 1) return;
    phase_of_thread[current] = of_cluster.arrive(CLUSTER * blockDim.x);
    leave(); // others may run between the arrival and the wait
}
static void cluster_arrive_relaxed() { cluster_arrive(); }
static void cluster_arrive_after_sync() { cluster_arrive(); }
static void cluster_wait() {
    if (CLUSTER == 1) return __syncthreads();
    of_cluster.wait_for(phase_of_thread[current]);
}
static void cluster_barrier() { cluster_arrive(), cluster_wait(); }
template <typename E> void store_async(E *own, int rank, E value, Mbarrier &barrier) {
    *map_shared_rank(own, rank) = value;
    map_shared_rank(&barrier, rank)->copied(sizeof(E));
}
static void wait_for_cluster(Mbarrier &barrier, int parity) { barrier.wait(parity); }
