// A pipeline of stages in shared memory between producer and consumer warps.
#pragma once
#include "sm90/mbarrier.cuh"

// The number of this thread's warpgroup in the block. By the shuffle the compiler knows that all lanes have the same number. So in
// code for one warpgroup it computes descriptors and stages in uniform registers, from which wgmma takes them; otherwise it moves
// each descriptor there from the registers of lanes.
__device__ __forceinline__ int uniform_warpgroup() { return __shfl_sync(FULL_MASK, threadIdx.x / WARPGROUP, 0); }

// The current stage of a thread, and the parity of its phase.
template <int STAGES> struct PipelineState {
    int stage = 0, phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    // By several stages, any number of them.
    __device__ __forceinline__ void advance(int stages) {
        stage += stages;
        phase ^= stage / STAGES & 1;
        stage %= STAGES;
    }
};

// In shared memory. `full`: producers have filled a stage; `empty`: consumers have read it.
template <int STAGES> struct Pipeline {
    Mbarrier full[STAGES], empty[STAGES];

    // By one thread; fence_mbarrier_init() and __syncthreads() must follow. The arguments are arrivals per phase.
    __device__ __forceinline__ void init(int producer_arrivals, int consumer_arrivals) {
        for (int i = 0; i < STAGES; i++) {
            full[i].init(producer_arrivals);
            empty[i].init(consumer_arrivals);
        }
    }
    // The same by all threads of the block, which may use it then.
    __device__ __forceinline__ void start(int producer_arrivals, int consumer_arrivals) {
        if (threadIdx.x == 0) {
            init(producer_arrivals, consumer_arrivals);
            fence_mbarrier_init();
        }
        __syncthreads();
    }
    // A consumer waits until the stage is filled.
    template <int COUNT> __device__ __forceinline__ void wait_full(const PipelineState<COUNT> &at) {
        full[at.stage].wait(at.phase);
    }
    // A producer waits until the stage may be overwritten. In the first round it does not wait.
    template <int COUNT> __device__ __forceinline__ void wait_empty(const PipelineState<COUNT> &at) {
        empty[at.stage].wait(at.phase ^ 1);
    }
    // The same by a thread that fills the stage by asynchronous copies of `bytes`, which the barrier that is returned counts.
    template <int COUNT> __device__ __forceinline__ Mbarrier &expect(const PipelineState<COUNT> &at, int bytes) {
        wait_empty(at);
        full[at.stage].arrive_expect_tx(bytes);
        return full[at.stage];
    }
    // A consumer warp has read a stage. Its lanes are synchronised: by wgmma_wait_group(), for example.
    __device__ __forceinline__ void release(int stage) {
        if (threadIdx.x % WARP == 0) empty[stage].arrive();
    }
};
