// What conv/shifted_fp16x2.cu multiplies: the filters in halves, and in pieces, and the images in halves, with what is known of both.
// Read conv/shifted_fp16x2.cuh first.
#include "conv/shifted_fp16x2.cuh"

// A filter's scale, by a block.
__device__ __forceinline__ void measure_filter(const ConvScratch &made, const WeightReader &weights, int filter) {
    constexpr int COUNT = IN_CHANNELS * TAPS, AT_ONCE = 4;
    RunningStatistics seen;
    for (int first = threadIdx.x; first < COUNT; first += AT_ONCE * MEASURE_THREADS) {
        float found[AT_ONCE];
        #pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = first + j * MEASURE_THREADS;
            found[j] = i < COUNT && filter < OUT_CHANNELS ? weights.at(filter, i / TAPS, i % TAPS) : 0;
        }
        #pragma unroll
        for (float x : found) seen.add(x);
    }
    seen.merge_block();
    if (threadIdx.x > 0) return;
    made.filters[filter] = seen.known(MIN_NORMAL, 1);
}

// The weights of FILTERS filters and the channels of a plane to scratch, in halves or in pieces, by a block.
constexpr int FILTER_PACKS = 2 * FILTER_BLOCKS * CHANNEL_BLOCKS * GROUPS;
__device__ __forceinline__ void pack_filters(const ConvScratch &made, const WeightReader &weights, int piece) {
    const bool in_halves = piece % 2;
    const int plane = piece / 2 % GROUPS, chunk = piece / (2 * GROUPS) % CHANNEL_BLOCKS, block = piece / (2 * GROUPS * CHANNEL_BLOCKS);
    #pragma unroll 1
    for (int i = threadIdx.x; i < FILTERS * TAPS; i += PACK_THREADS) {
        const WeightChunk at(block, chunk, i / FILTERS, plane, i % FILTERS);
        const int filter = block * FILTERS + at.line;
        float found[CHUNK_ELEMENTS];
        weights.read(found, filter, at.channel(), at.tap);
        if (!in_halves) {
            store_split(made.bf16_weights, at, found);
            continue;
        }
        Chunk words[FP16_PARTS];
        split_fp16x2(words, found, made.filters[filter].up);
        char *to = made.fp16_weights + at.stage() * WeightLayout::SIZE;
        #pragma unroll
        for (int p = 0; p < FP16_PARTS; p++) *(Chunk *)(to + WeightLayout::offset(p, plane, at.line)) = words[p];
    }
}

// First: statistics of filters and images.
KERNEL __launch_bounds__(PACK_THREADS, PACK_BLOCKS) measure_operands(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const ConvScratch made(scratch);
    for (int filter = blockIdx.x; filter < FILTER_BLOCKS * FILTERS; filter += gridDim.x) {
        measure_filter(made, {w}, filter);
        __syncthreads();
    }
    laid_images(made, batch).measure(InputImages{x, (int)batch});
}

// Then: both packed, the filters as bf16x3 too.
KERNEL __launch_bounds__(PACK_THREADS, PACK_BLOCKS) pack_operands(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const ConvScratch made(scratch);
    for (int i = blockIdx.x; i < FILTER_PACKS; i += gridDim.x) pack_filters(made, {w}, i);
    laid_images(made, batch).lay(InputImages{x, (int)batch});
}
