// Packs the operands of conv/shifted_fp16x2.cu: filters as fp16x2 and, for the fallback, as bf16x3, and images as
// fp16x2. Read conv/shifted_fp16x2.cuh first.
#include "conv/shifted_fp16x2.cuh"

// Computes the statistics of a filter. By a block.
__device__ __forceinline__ void measure_filter(const ConvScratch &scratch_layout, const WeightReader &weights,
    int filter) {
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
    scratch_layout.filters[filter] = seen.statistics(MIN_NORMAL, 1);
}

// Packs the weights of FILTERS filters for one group of channels, as fp16x2 or bf16x3. By a block.
constexpr int WEIGHT_ITEMS = 2 * FILTER_BLOCKS * CHANNEL_BLOCKS * GROUPS;
__device__ __forceinline__ void pack_filters(const ConvScratch &scratch_layout, const WeightReader &weights, int item) {
    const bool fp16 = item % 2;
    const int group = item / 2 % GROUPS, channel_block = item / (2 * GROUPS) % CHANNEL_BLOCKS;
    const int filter_block = item / (2 * GROUPS * CHANNEL_BLOCKS);
    #pragma unroll 1
    for (int i = threadIdx.x; i < FILTERS * TAPS; i += PACK_THREADS) {
        const WeightChunk at(filter_block, channel_block, i / FILTERS, group, i % FILTERS);
        const int filter = filter_block * FILTERS + at.row;
        float found[CHUNK_ELEMENTS];
        weights.read(found, filter, at.channel(), at.tap);
        if (!fp16) {
            store_weights(scratch_layout.k_major_weights, at, found);
            continue;
        }
        Chunk terms[FP16_TERMS];
        split_fp16x2(terms, found, scratch_layout.filters[filter].scale);
        char *to = scratch_layout.fp16_weights + at.stage() * WeightLayout::SIZE;
        #pragma unroll
        for (int p = 0; p < FP16_TERMS; p++) *(Chunk *)(to + WeightLayout::offset(p, group, at.row)) = terms[p];
    }
}

// Launch 1: statistics of filters and images.
KERNEL __launch_bounds__(PACK_THREADS, PACK_BLOCKS) measure_operands(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const ConvScratch scratch_layout(scratch);
    for (int filter = blockIdx.x; filter < FILTER_BLOCKS * FILTERS; filter += gridDim.x) {
        measure_filter(scratch_layout, {w}, filter);
        __syncthreads();
    }
    packed_images(scratch, batch).measure(InputImages{x, (int)batch});
}

// Launch 2: packs both.
KERNEL __launch_bounds__(PACK_THREADS, PACK_BLOCKS) pack_operands(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const ConvScratch scratch_layout(scratch);
    for (int i = blockIdx.x; i < WEIGHT_ITEMS; i += gridDim.x) pack_filters(scratch_layout, {w}, i);
    packed_images(scratch, batch).pack(InputImages{x, (int)batch});
}
