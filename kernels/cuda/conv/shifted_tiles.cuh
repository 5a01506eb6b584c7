// Tiles, weights, pipeline and epilogue of the shifted implicit GEMM kernels for y and dx. Read conv/shifted.cuh first.
//
// A tile has FILTERS filters as rows and TILE positions as columns; K is STAGE_CHANNELS channels of one element of the
// window at a time. Of PRODUCERS threads one copies the weights, which a launch before has split, and LOADERS load the
// images. MMA_WARPGROUPS warpgroups multiply COLUMNS of the columns each.
//
// Tiles run on from image to image. Where TILES_PER_IMAGE > 0 so many start with each image, the padding behind its
// last output is skipped, and IMAGE_PITCH is at least their positions.
#pragma once
#include "conv/fp16x2.cuh"
#include "conv/shifted_pipeline.cuh"
#ifndef TILES_PER_IMAGE
#define TILES_PER_IMAGE 0
#endif

constexpr int TILE = MMA_WARPGROUPS * COLUMNS, MMA_ROWS = 64;
constexpr bool STACKED = OUT_CHANNELS <= MMA_ROWS / 2; // two terms of at most 32 filters fill the rows
constexpr int FILTERS = STACKED ? MMA_ROWS / 2 : MMA_ROWS;
constexpr int CONSUMERS = MMA_WARPGROUPS * WARPGROUP, THREADS = PRODUCERS + CONSUMERS;
constexpr int IMAGE_STAGES = 2, GROUPS = STAGE_CHANNELS / CHUNK_ELEMENTS;
constexpr int CHANNEL_BLOCKS = (IN_CHANNELS + STAGE_CHANNELS - 1) / STAGE_CHANNELS,
    FILTER_BLOCKS = (OUT_CHANNELS + FILTERS - 1) / FILTERS;
constexpr int SUMS = COLUMNS / 2, OUTPUTS = SUMS * FILTERS / MMA_ROWS; // of a thread: accumulators, and what it writes
constexpr int COMBINE_ELEMENTS = STACKED ? OUTPUTS * WARPGROUP : 0;         // of a warpgroup, with `give`
constexpr int CONSECUTIVE_TILES = TILES_PER_IMAGE > 0 ? TILES_PER_IMAGE : 1 << 30;      // tiles that follow one another
typedef CoreMatrixLayout<MMA_ROWS, GROUPS, STACKED ? 2 : 3> Bf16x3WeightLayout;
typedef CoreMatrixLayout<MMA_ROWS, GROUPS, FP16_PARTS> Fp16x2WeightLayout;

// A chunk of 8 channels of a filter's weights, in the order of the stages: block of filters, block of channels, element
// of the window, term, group of channels.
struct WeightChunk {
    int block, chunk, tap, group, row;

    __device__ WeightChunk(int block, int chunk, int tap, int group, int row)
        : block(block), chunk(chunk), tap(tap), group(group), row(row) {}
    __device__ WeightChunk(int filter, int i)
        : block(filter / FILTERS), chunk(i / (GROUPS * TAPS)), tap(i / GROUPS % TAPS), group(i % GROUPS),
          row(filter % FILTERS) {}
    __device__ __forceinline__ int channel() const { return chunk * STAGE_CHANNELS + group * CHUNK_ELEMENTS; }
    __device__ __forceinline__ int64_t stage() const { return ((int64_t)block * CHANNEL_BLOCKS + chunk) * TAPS + tap; }
};
constexpr int WEIGHT_CHUNKS = CHANNEL_BLOCKS * TAPS * GROUPS; // of a filter

// Splits a chunk into bf16x3 and stores it. STACKED: the first two terms of a filter are two rows of one block; the
// third term and zeros are the next.
__device__ __forceinline__ void store_split(char *weights, const WeightChunk &at, const float (&x)[CHUNK_ELEMENTS]) {
    Chunk terms[BF16X3_TERMS];
    split_bf16x3(terms, x);
    char *to = weights + at.stage() * Bf16x3WeightLayout::SIZE;
    #pragma unroll
    for (int p = 0; p < BF16X3_TERMS + STACKED; p++) {
        const int term = STACKED ? p / 2 : p, row = STACKED ? at.row + p % 2 * FILTERS : at.row;
        *(Chunk *)(to + Bf16x3WeightLayout::offset(term, at.group, row)) = p < BF16X3_TERMS ? terms[p] : Chunk{};
    }
}

// The tiles in the order of blocks: those of the same positions run at the same time and share the images in L2.
struct Tiles {
    int count;

    __device__ explicit Tiles(int batch)
        : count(FILTER_BLOCKS *
                (TILES_PER_IMAGE > 0 ? batch * TILES_PER_IMAGE : ceil_div(batch * IMAGE_PITCH, TILE))) {}
    __device__ __forceinline__ int filter(int tile) const { return tile % FILTER_BLOCKS * FILTERS; }
    __device__ __forceinline__ int position(int tile) const {
        const int i = tile / FILTER_BLOCKS;
        return i / CONSECUTIVE_TILES * IMAGE_PITCH + i % CONSECUTIVE_TILES * TILE;
    }
};

constexpr int FALLBACK_POSITIONS = 144; // the unit in which fp16x2 falls back to bf16x3

// Scratch of a convolution: weights in bf16x3 and, for fp16x2, weights, statistics of filters and the units that fall
// back.
struct ConvScratch {
    char *bf16_weights, *fp16_weights;
    Statistics *filters;
    int *marks; // for each FALLBACK_POSITIONS positions and FILTERS filters

    __device__ explicit ConvScratch(char *scratch) : bf16_weights(scratch) {
        constexpr int64_t STAGES = (int64_t)FILTER_BLOCKS * CHANNEL_BLOCKS * TAPS;
        fp16_weights = bf16_weights + STAGES * Bf16x3WeightLayout::SIZE;
        filters = (Statistics *)(fp16_weights + STAGES * Fp16x2WeightLayout::SIZE);
        marks = (int *)(filters + FILTER_BLOCKS * FILTERS);
    }
    __device__ __forceinline__ int &falls_back(int position, int filter) const {
        return marks[position / FALLBACK_POSITIONS * FILTER_BLOCKS + filter / FILTERS];
    }
};

// How many elements of the window a warpgroup runs ahead of the next: few enough for the stages in shared memory.
__device__ constexpr int stagger() {
    const int even = TAPS * CHANNEL_BLOCKS / MMA_WARPGROUPS, most = (WEIGHT_STAGES - 1) / (MMA_WARPGROUPS - 1);
    const int found = even < most ? even : most;
    return found < 1 ? 1 : found < TAPS ? found : TAPS;
}
constexpr int STAGGER = stagger();

// The consumer's warpgroup. The shuffle tells the compiler that it is uniform in a warp; otherwise it serialises wgmma.
__device__ __forceinline__ int consumer_warpgroup() {
    return __shfl_sync(~0u, (threadIdx.x - PRODUCERS) / WARPGROUP, 0);
}

struct ConvPipeline : TilePipeline<IMAGE_STAGES, WEIGHT_STAGES, LOADERS, CONSUMERS> {
    Mbarrier started[MMA_WARPGROUPS];

    __device__ void init() {
        for (Mbarrier &warpgroup : started) warpgroup.init(WARPGROUP / WARP);
        TilePipeline::init();
    }

    // In a block's first tile a warpgroup waits until the previous one is STAGGER elements of the window ahead, so that
    // one warpgroup's epilogue overlaps the products of the others.
    __device__ __forceinline__ void wait_for_start(int warpgroup) {
        if (warpgroup > 0) started[warpgroup].wait(0);
    }
    __device__ __forceinline__ void start_next(int warpgroup, int element) {
        if (warpgroup + 1 < MMA_WARPGROUPS && element == STAGGER - 1) arrive_per_warp(started[warpgroup + 1]);
    }

    // By one thread: copies a tile's weights.
    template <class WeightLayout> __device__ __forceinline__ void load_weights(
        int tile, PipelineState<WEIGHT_STAGES> &state, char *shared, const char *all) {
        constexpr int COUNT = CHANNEL_BLOCKS * TAPS;
        TilePipeline::load_weights<WeightLayout::SIZE, COUNT>(
            state, shared, all + (int64_t)(tile % FILTER_BLOCKS) * COUNT * WeightLayout::SIZE);
    }
};

// Filter and column of output i of this thread.
__device__ __forceinline__ int output_row(int i) { return accumulator_row(i) % FILTERS; }
__device__ __forceinline__ int output_column(int i) {
    return accumulator_row(i) / FILTERS * (COLUMNS / 2) + accumulator_column(i);
}

// The thread's outputs. STACKED: two threads hold sums of the same filter; they exchange halves through `buffer` and
// each adds up one half.
__device__ __forceinline__ void combine_stacked(const float (&sums)[SUMS], float (&own)[OUTPUTS], T *buffer) {
    const int thread = threadIdx.x % WARPGROUP, place = threadIdx.x / WARPGROUP;
    const bool lower = thread < WARPGROUP / 2;
    #pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {
        const float first = sums[i], second = sums[SUMS - OUTPUTS + i];
        own[i] = lower ? first : second;
        if (STACKED) buffer[i * WARPGROUP + thread] = lower ? second : first;
    }
    if (!STACKED) return;
    named_barrier_sync(WARPGROUP, place);
    #pragma unroll
    for (int i = 0; i < OUTPUTS; i++) own[i] += buffer[i * WARPGROUP + (thread ^ WARPGROUP / 2)];
    named_barrier_sync(WARPGROUP, place);
}

// By one thread: prefetches what the epilogue reads for the outputs of a tile.
__device__ __forceinline__ void prefetch_aux(const Epilogue &out, int batch, int filter, int position) {
    const auto place = [](int at) { return at / PITCH * OUT_COLUMNS + min(at % PITCH, OUT_COLUMNS); };
    for (int image = position / IMAGE_PITCH; image < batch && image * IMAGE_PITCH < position + TILE; image++) {
        const int from = place(max(position - image * IMAGE_PITCH, 0));
        const int count = place(min(position - image * IMAGE_PITCH + TILE, OUT_ROWS * PITCH)) - from;
        #pragma unroll 1
        for (int row = filter; row < min(filter + FILTERS, OUT_CHANNELS) && count > 0; row++)
            out.prefetch((image * OUT_CHANNELS + row) * (OUT_ROWS * OUT_COLUMNS) + from, count);
    }
}

// The epilogue for FILTERS filters from `filter` on and COLUMNS positions from `position` on. Auxiliary inputs of
// several outputs are loaded before the first one is written. mask: takes(position) says which positions are written;
// scale(image) and rows[] are factors of the sums.
template <class Mask> __device__ __forceinline__ void write(
    const float (&sums)[OUTPUTS], const Epilogue &out, int batch, int filter, int position, const Mask &mask) {
    constexpr int GROUP = 4, GROUPS_AT_ONCE = 4; // GROUP: accumulators of two neighbouring positions and two rows
    const auto row = [&](int i) { return filter + output_row(i); };
    const auto index = [&](int image, int place, int r) {
        return (image * OUT_CHANNELS + row(2 * r)) * (OUT_ROWS * OUT_COLUMNS) + place;
    };
    #pragma unroll
    for (int h = 0; h < 2; h += WIDE_C) {
        OutputPosition at(position + output_column(h));
        #pragma unroll
        for (int first = h; first < OUTPUTS; first += GROUPS_AT_ONCE * GROUP) {
            int image[GROUPS_AT_ONCE], place[GROUPS_AT_ONCE];
            float scale[GROUPS_AT_ONCE];
            Epilogue::Aux<WIDE_C> aux[GROUPS_AT_ONCE][2];
            // 8: output_column(GROUP) - output_column(0)
            #pragma unroll
            for (int i = 0; i < GROUPS_AT_ONCE && first + i * GROUP < OUTPUTS; i++, at.advance(8)) {
                image[i] = at.image;
                const bool taken = at.inside(batch) && mask.takes(position + output_column(first + i * GROUP));
                place[i] = taken ? at.y * OUT_COLUMNS + at.x : -1;
                scale[i] = taken ? mask.scale(at.image) : 0;
                #pragma unroll
                for (int r = 0; r < 2; r++)
                    if (place[i] >= 0 && row(2 * r) < OUT_CHANNELS)
                        aux[i][r] = out.load_aux<WIDE_C>(image[i], row(2 * r), place[i], index(image[i], place[i], r));
            }
            #pragma unroll
            for (int i = 0; i < GROUPS_AT_ONCE && first + i * GROUP < OUTPUTS; i++) {
                #pragma unroll
                for (int r = 0; r < 2; r++) {
                    if (place[i] < 0 || row(2 * r) >= OUT_CHANNELS) continue;
                    T value[WIDE_C];
                    #pragma unroll
                    for (int k = 0; k < WIDE_C; k++)
                        value[k] = sums[first + i * GROUP + 2 * r + k] * mask.rows[r] * scale[i];
                    out.write(aux[i][r], index(image[i], place[i], r), value);
                }
            }
        }
    }
}

// The same with 2 x 2 max pooling. A thread's positions are whole pairs of image rows. The two columns of a window are
// neighbours in a thread. Those of the row below are PAIRS pairs of columns further on: NEXT of four lanes on, and,
// where that wraps around, one group of eight columns later.
__device__ __forceinline__ void write_pooled(
    const float (&sums)[OUTPUTS], const Epilogue &out, int filter, int position) {
    constexpr int PAIRS = PITCH / 2, NEXT = PAIRS % 4, GROUPS = OUTPUTS / 4, ROWS = OUT_ROWS / 2,
        COLS = OUT_COLUMNS / 2;
    const OutputPosition first(position + output_column(0) - accumulator_column(0));
    const int lane = threadIdx.x % WARP, lane_of_four = lane % 4;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = filter + output_row(2 * r);
        const bool real = row < OUT_CHANNELS;
        Epilogue::Aux<4> aux;
        if (real) aux = out.load_aux<4>(first.image, row, 0, 0);
        const auto sum = [&](int group, int column) { return sums[min(group, GROUPS - 1) * 4 + 2 * r + column]; };
        #pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            if (group * 4 / PAIRS % 2 == 1 && (group * 4 + 3) / PAIRS % 2 == 1) continue; // only second rows
            T window[4];
            #pragma unroll
            for (int column = 0; column < 2; column++) {
                const int below = group + PAIRS / 4;
                window[column] = sum(group, column);
                const T given = lane_of_four < NEXT ? sum(below + 1, column) : sum(below, column);
                window[2 + column] = __shfl_sync(~0u, given, lane - lane_of_four + (lane_of_four + NEXT) % 4);
            }
            const int pair = group * 4 + lane_of_four, y = first.y / 2 + pair / PITCH, x = pair % PITCH;
            if (real && y < ROWS && x < COLS)
                out.write<4>(aux, ((first.image * OUT_CHANNELS + row) * ROWS + y) * COLS + x, window);
        }
    }
}
