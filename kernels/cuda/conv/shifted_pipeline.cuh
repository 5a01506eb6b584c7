// What kernels share that take convolutions tile by tile: the weights, and stages in shared memory. Some warps bring a tile's
// images, of which all elements of the window are read, the copy engine weights, and others multiply.
#pragma once
#include "conv/shifted.cuh"
#include "sm90/tma.cuh"

// Weights (O, C, KH, KW); FLIPPED (C, O, KH, KW) with their elements in reverse order.
struct WeightReader {
    const T *w;

    __device__ __forceinline__ T at(int filter, int channel, int tap) const {
        return FLIPPED ? w[(channel * OUT_CHANNELS + filter) * TAPS + TAPS - 1 - tap]
                      : w[(filter * IN_CHANNELS + channel) * TAPS + tap];
    }
    // Of neighbouring channels, from one on; 0 where there are none.
    __device__ __forceinline__ void read(float (&found)[CHUNK_ELEMENTS], int filter, int channel, int tap) const {
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++)
            found[j] = filter < OUT_CHANNELS && channel + j < IN_CHANNELS ? at(filter, channel + j, tap) : 0;
    }
};

template <int IMAGES, int WEIGHTS, int IMAGE_PRODUCERS, int CONSUMERS> struct TilePipeline {
    Mbarrier images[IMAGES], images_read[IMAGES], weights[WEIGHTS], weights_read[WEIGHTS];

    __device__ void init() {
        for (int i = 0; i < IMAGES; i++) {
            images[i].init(IMAGE_PRODUCERS / WARP);
            images_read[i].init(CONSUMERS / WARP);
        }
        for (int i = 0; i < WEIGHTS; i++) {
            weights[i].init(1);
            weights_read[i].init(CONSUMERS / WARP);
        }
        fence_mbarrier_init();
    }

    // Of one thread: starts the copies of COUNT stages of so many bytes that lie one behind the other.
    template <int BYTES, int COUNT> __device__ __forceinline__ void load_weights(
        PipelineState<WEIGHTS> &turn, char *shared, const char *from) {
        for (int i = 0; i < COUNT; i++, turn.advance()) {
            weights_read[turn.stage].wait(turn.phase ^ 1);
            Mbarrier &full = weights[turn.stage];
            full.arrive_expect_tx(BYTES);
            bulk_copy<BYTES>(shared + turn.stage * BYTES, from + (int64_t)i * BYTES, full);
        }
    }
};
