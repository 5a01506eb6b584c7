// kernels/cuda/sm90/mbarrier.cuh on the CPU: see host.h.
#pragma once
#include "common/common.cuh"

constexpr int WARPGROUP = 4 * WARP;

struct Mbarrier {
    int arrivals, missing, bytes;
    unsigned phase;

    void init(int count) { arrivals = missing = count, bytes = phase = 0; }
    void arrive() { missing--, end_phase(); }
    void arrive_after_copies() { arrive(); } // copies are done at once
    void arrive_expect_tx(int count) { bytes += count, arrive(); }
    void copied(int count) { bytes -= count, end_phase(); }
    void wait(unsigned parity) {
        if (phase % 2 == parity) wait_while(phase, 1, parity);
    }

  private:
    void end_phase() { if (missing == 0 && bytes == 0) missing = arrivals, phase++; }
};
static void fence_mbarrier_init() {}
static void fence_proxy_async() {}

static void arrive_per_warp(Mbarrier &barrier) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier.arrive();
}
static void named_barrier_sync(int threads, int id = 1) { named[current / blockDim.x][id].wait(threads); }
static void named_barrier_arrive(int threads, int id) { named[current / blockDim.x][id].arrive(threads); }

constexpr bool registers_suffice(int, int, int, int) { return true; }
template <int COUNT> void warpgroup_reg_dealloc() {}
template <int COUNT> void warpgroup_reg_alloc() {}
