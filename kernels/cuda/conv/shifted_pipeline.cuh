// The weights and the pipeline of kernels that compute a convolution tile by tile. Producer warps load a tile's images once
// for all taps, bulk copies load the weights, and consumer warpgroups multiply.
#pragma once
#include "conv/shifted.cuh"
#include "sm90/tma.cuh"

// The weights (O, C, KH, KW); FLIPPED: (C, O, KH, KW) with their taps in reverse order.
struct WeightReader {
    const T *w;

    __device__ __forceinline__ T at(int filter, int channel, int tap) const {
        return FLIPPED ? w[(channel * OUT_CHANNELS + filter) * TAPS + TAPS - 1 - tap]
                      : w[(filter * IN_CHANNELS + channel) * TAPS + tap];
    }
    // Neighbouring channels of a filter; 0 beyond the last channel or filter.
    __device__ __forceinline__ void read(float (&found)[CHUNK_ELEMENTS], int filter, int channel, int tap) const {
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++)
            found[j] = filter < OUT_CHANNELS && channel + j < IN_CHANNELS ? at(filter, channel + j, tap) : 0;
    }
};

// RESIDENT: the stages hold all weights of the block, which are loaded once.
template <int IMAGES, int WEIGHTS, int IMAGE_PRODUCERS, int CONSUMERS, bool RESIDENT> struct TilePipeline {
    Pipeline<IMAGES> images;
    Pipeline<WEIGHTS> weights;

    __device__ void init() {
        images.init(IMAGE_PRODUCERS / WARP, CONSUMERS / WARP);
        weights.init(1, CONSUMERS / WARP);
        fence_mbarrier_init();
    }

    // By a consumer: waits for a stage of weights, and releases one.
    __device__ __forceinline__ void wait_weights(const PipelineState<WEIGHTS> &at) {
        weights.full[at.stage].wait(RESIDENT ? 0 : at.phase);
    }
    __device__ __forceinline__ void release_weights(int stage) {
        if (!RESIDENT) arrive_per_warp(weights.empty[stage]);
    }

    // By one thread: bulk copies of COUNT contiguous stages of weights of BYTES each.
    template <int BYTES, int COUNT> __device__ __forceinline__ void load_stages(
        PipelineState<WEIGHTS> &state, char *shared, const char *from) {
        static_assert(!RESIDENT || WEIGHTS % COUNT == 0, "the last call fills the last stage");
        if (RESIDENT && state.phase > 0) return;
        for (int i = 0; i < COUNT; i++, state.advance()) {
            weights.wait_empty(state);
            Mbarrier &full = weights.full[state.stage];
            full.arrive_expect_tx(BYTES);
            bulk_copy<BYTES>(shared + state.stage * BYTES, from + (int64_t)i * BYTES, full);
        }
    }
};
