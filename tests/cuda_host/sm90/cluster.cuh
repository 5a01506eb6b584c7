// kernels/cuda/sm90/cluster.cuh on the CPU: see host.h.
#pragma once
#include "common/collectives.cuh"

#define CLUSTER_DIMS

static unsigned char *own_shared() { return shared_bytes; }
static int cluster_rank() { return current / blockDim.x; }
template <typename E> static E *in_block(E *own, int rank) {
    return (E *)(shared_of_block[rank] + ((unsigned char *)own - own_shared()));
}
static void cluster_arrive() {}
static void cluster_wait() { of_cluster.wait(CLUSTER * blockDim.x); }
static void cluster_barrier() { cluster_wait(); }
