// kernels/cuda/sm90/cluster.cuh on the CPU: see host.h.
#pragma once
#include "common/collectives.cuh"
#include "sm90/mbarrier.cuh"

#define CLUSTER_DIMS

static unsigned char *own_shared() { return shared_bytes; }
static int cluster_rank() { return current / blockDim.x; }
template <typename E> static E *map_shared_rank(E *own, int rank) {
    return (E *)(shared_of_block[rank] + ((unsigned char *)own - own_shared()));
}
static void cluster_arrive() {}
static void cluster_arrive_relaxed() {}
static void cluster_arrive_after_sync() {}
static void cluster_wait() { of_cluster.wait(CLUSTER * blockDim.x); }
static void cluster_barrier() { cluster_wait(); }
template <typename E> void store_async(E *own, int rank, E value, Mbarrier &barrier) {
    *map_shared_rank(own, rank) = value;
    map_shared_rank(&barrier, rank)->copied(sizeof(E));
}
static void wait_for_cluster(Mbarrier &barrier, int parity) { barrier.wait(parity); }
