// Tiles, weights, pipeline and epilogue of the shifted implicit GEMM kernels for y and dx. Read conv/shifted.cuh first.
//
// A tile has FILTERS filters as rows and TILE positions as columns; a pipeline stage has STAGE_CHANNELS channels of one tap.
// Of PRODUCERS threads one copies the weights, which an earlier launch has packed, and LOADERS load the images. Each of
// MMA_WARPGROUPS warpgroups computes COLUMNS of the columns.
//
// TILES_PER_IMAGE = 0: tiles cover the flat index without gaps. Otherwise each image starts with a tile and has
// TILES_PER_IMAGE tiles, at most IMAGE_PITCH positions; the padding after them is skipped.
#pragma once
#include "conv/fp16x2.cuh"
#include "conv/shifted_pipeline.cuh"
#ifndef TILES_PER_IMAGE
#define TILES_PER_IMAGE 0
#endif

constexpr int TILE = MMA_WARPGROUPS * COLUMNS, MMA_ROWS = 64;
constexpr bool STACKED = OUT_CHANNELS <= MMA_ROWS / 2 && TERMS_USED == 3; // two terms of at most 32 filters fill the rows
constexpr int FILTERS = STACKED ? MMA_ROWS / 2 : MMA_ROWS;
constexpr int CONSUMERS = MMA_WARPGROUPS * WARPGROUP, THREADS = PRODUCERS + CONSUMERS;
constexpr int IMAGE_STAGES = 2, GROUPS = STAGE_CHANNELS / CHUNK_ELEMENTS;
constexpr int CHANNEL_BLOCKS = (IN_CHANNELS + STAGE_CHANNELS - 1) / STAGE_CHANNELS,
    FILTER_BLOCKS = (OUT_CHANNELS + FILTERS - 1) / FILTERS;
constexpr int SUMS = COLUMNS / 2, OUTPUTS = SUMS * FILTERS / MMA_ROWS; // of a thread: accumulators, and outputs that it writes
constexpr int COMBINE_ELEMENTS = STACKED ? OUTPUTS * WARPGROUP : 0;         // of a warpgroup's buffer in combine_stacked()
constexpr int CONSECUTIVE_TILES = TILES_PER_IMAGE > 0 ? TILES_PER_IMAGE : 1 << 30;      // tiles without a gap between them
typedef KMajorLayout<MMA_ROWS, GROUPS, STACKED ? 2 : KMajorOperand::TERMS> KMajorWeightLayout;
typedef CoreMatrixLayout<MMA_ROWS, GROUPS, FP16_TERMS> Fp16x2WeightLayout;

// A chunk of 8 channels of a filter's weights. Stages are in the order of filter block, channel block and tap; within a stage
// the order is term, group of channels, row.
struct WeightChunk {
    int filter_block, channel_block, tap, group, row;

    __device__ WeightChunk(int filter_block, int channel_block, int tap, int group, int row)
        : filter_block(filter_block), channel_block(channel_block), tap(tap), group(group), row(row) {}
    __device__ WeightChunk(int filter, int i)
        : filter_block(filter / FILTERS), channel_block(i / (GROUPS * TAPS)), tap(i / GROUPS % TAPS), group(i % GROUPS),
          row(filter % FILTERS) {}
    __device__ __forceinline__ int channel() const { return channel_block * STAGE_CHANNELS + group * CHUNK_ELEMENTS; }
    __device__ __forceinline__ int64_t stage() const { return ((int64_t)filter_block * CHANNEL_BLOCKS + channel_block) * TAPS + tap; }
};
constexpr int WEIGHT_CHUNKS = CHANNEL_BLOCKS * TAPS * GROUPS; // of a filter

// Stores eight channels of a filter as an operand. STACKED: the first two terms of a filter are two rows of the first block of
// rows; the third term and zeros are two rows of the second.
__device__ __forceinline__ void store_weights(char *weights, const WeightChunk &at, const float (&x)[CHUNK_ELEMENTS]) {
    Chunk chunks[KMajorOperand::CHUNKS];
    KMajorOperand::split(chunks, x);
    char *to = weights + at.stage() * KMajorWeightLayout::SIZE;
    #pragma unroll
    for (int i = 0; i < KMajorOperand::CHUNKS + STACKED; i++) {
        const int chunk = STACKED ? i / 2 : i, row = STACKED ? at.row + i % 2 * FILTERS : at.row;
        *(Chunk *)(to + KMajorWeightLayout::chunk(chunk, at.group, row)) = i < KMajorOperand::CHUNKS ? chunks[i] : Chunk{};
    }
}

// The tiles in the order of blocks. Tiles of the same positions are neighbours: they run together and share the images in L2.
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

constexpr int FALLBACK_POSITIONS = 144; // fp16x2 falls back to bf16x3 in units of so many positions

// Scratch of a convolution: weights as K-major operands, and for fp16x2 also weights in fp16x2, statistics of filters, marks of
// units that fall back, and packed images (conv/packed_images.cuh).
struct ConvScratch {
    char *k_major_weights, *fp16_weights;
    Statistics *filters;
    int *marks; // for each FALLBACK_POSITIONS positions and FILTERS filters

    __device__ explicit ConvScratch(char *scratch)
        : k_major_weights(*SCRATCH_K_MAJOR_WEIGHTS(char[KMajorWeightLayout::SIZE], scratch, 0)),
          fp16_weights(*SCRATCH_FP16_WEIGHTS(char[Fp16x2WeightLayout::SIZE], scratch, 0)),
          filters(SCRATCH_FILTERS(Statistics, scratch, 0)), marks(SCRATCH_MARKS(int, scratch, 0)) {}
    __device__ __forceinline__ int &falls_back(int position, int filter) const {
        return marks[position / FALLBACK_POSITIONS * FILTER_BLOCKS + filter / FILTERS];
    }
};

// The number of taps by which a warpgroup is ahead of the next one; the stages in shared memory limit it.
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

template <int IMAGE_PRODUCERS, bool RESIDENT>
struct ConvPipeline : TilePipeline<IMAGE_STAGES, WEIGHT_STAGES, IMAGE_PRODUCERS, CONSUMERS, RESIDENT> {
    Mbarrier started[MMA_WARPGROUPS];

    __device__ void init() {
        for (Mbarrier &warpgroup : started) warpgroup.init(WARPGROUP / WARP);
        ConvPipeline::TilePipeline::init();
    }

    // In a block's first tile a warpgroup waits until the previous one is STAGGER taps ahead, so that one warpgroup's
    // epilogue overlaps the products of the others.
    __device__ __forceinline__ void wait_for_start(int warpgroup) {
        if (warpgroup > 0) started[warpgroup].wait(0);
    }
    __device__ __forceinline__ void start_next(int warpgroup, int taps_done) {
        if (warpgroup + 1 < MMA_WARPGROUPS && taps_done == STAGGER - 1) arrive_per_warp(started[warpgroup + 1]);
    }

    // By one thread: copies the weights of a block of a tile's channels.
    template <class WeightLayout> __device__ __forceinline__ void load_weights(
        int tile, int channel_block, PipelineState<WEIGHT_STAGES> &state, char *shared, const char *all) {
        const int first = (tile % FILTER_BLOCKS * CHANNEL_BLOCKS + channel_block) * TAPS;
        this->template load_stages<WeightLayout::SIZE, TAPS>(state, shared, all + (int64_t)first * WeightLayout::SIZE);
    }
};

// Filter and column of output i of this thread.
__device__ __forceinline__ int output_row(int i) { return accumulator_row(i) % FILTERS; }
__device__ __forceinline__ int output_column(int i) {
    return accumulator_row(i) / FILTERS * (COLUMNS / 2) + accumulator_column(i);
}

// The thread's outputs. STACKED: two threads have sums of the same filter. They exchange halves through `buffer`, and each
// adds one half.
__device__ __forceinline__ void combine_stacked(const float (&sums)[SUMS], float (&own)[OUTPUTS], T *buffer) {
    const int thread = threadIdx.x % WARPGROUP, barrier = threadIdx.x / WARPGROUP;
    const bool lower = thread < WARPGROUP / 2;
    #pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {
        const float first = sums[i], second = sums[SUMS - OUTPUTS + i];
        own[i] = lower ? first : second;
        if (STACKED) buffer[i * WARPGROUP + thread] = lower ? second : first;
    }
    if (!STACKED) return;
    named_barrier_sync(WARPGROUP, barrier);
    #pragma unroll
    for (int i = 0; i < OUTPUTS; i++) own[i] += buffer[i * WARPGROUP + (thread ^ WARPGROUP / 2)];
    named_barrier_sync(WARPGROUP, barrier);
}

// By one thread: prefetches the auxiliary inputs of a tile.
__device__ __forceinline__ void prefetch_aux(const Epilogue &out, int batch, int filter, int position) {
    const auto pixel = [](int at) { return at / PITCH * OUT_COLUMNS + min(at % PITCH, OUT_COLUMNS); };
    for (int image = position / IMAGE_PITCH; image < batch && image * IMAGE_PITCH < position + TILE; image++) {
        const int from = pixel(max(position - image * IMAGE_PITCH, 0));
        const int count = pixel(min(position - image * IMAGE_PITCH + TILE, OUT_ROWS * PITCH)) - from;
        #pragma unroll 1
        for (int row = filter; row < min(filter + FILTERS, OUT_CHANNELS) && count > 0; row++)
            out.prefetch((image * OUT_CHANNELS + row) * (OUT_ROWS * OUT_COLUMNS) + from, count);
    }
}

// The epilogue for FILTERS filters from `filter` on and COLUMNS positions from `position` on. Auxiliary inputs of
// several outputs are loaded before the first one is written. mask: takes(position) is whether a position is written;
// scale(image) and rows[] are factors of the sums.
template <class Mask> __device__ __forceinline__ void write(
    const float (&sums)[OUTPUTS], const Epilogue &out, int batch, int filter, int position, const Mask &mask) {
    constexpr int QUAD = 4, QUADS_AT_ONCE = 4; // QUAD: accumulators of two neighbouring positions and two rows
    const auto row = [&](int i) { return filter + output_row(i); };
    const auto index = [&](int image, int pixel, int r) {
        return (image * OUT_CHANNELS + row(2 * r)) * (OUT_ROWS * OUT_COLUMNS) + pixel;
    };
    #pragma unroll
    for (int h = 0; h < 2; h += WIDE_C) {
        OutputPosition at(position + output_column(h));
        #pragma unroll
        for (int first = h; first < OUTPUTS; first += QUADS_AT_ONCE * QUAD) {
            int image[QUADS_AT_ONCE], pixel[QUADS_AT_ONCE];
            float scale[QUADS_AT_ONCE];
            Epilogue::Aux<WIDE_C> aux[QUADS_AT_ONCE][2];
            // 8: output_column(QUAD) - output_column(0)
            #pragma unroll
            for (int i = 0; i < QUADS_AT_ONCE && first + i * QUAD < OUTPUTS; i++, at.advance(8)) {
                image[i] = at.image;
                const bool taken = at.inside(batch) && mask.takes(position + output_column(first + i * QUAD));
                pixel[i] = taken ? at.y * OUT_COLUMNS + at.x : -1;
                scale[i] = taken ? mask.scale(at.image) : 0;
                #pragma unroll
                for (int r = 0; r < 2; r++)
                    if (pixel[i] >= 0 && row(2 * r) < OUT_CHANNELS)
                        aux[i][r] = out.load_aux<WIDE_C>(image[i], row(2 * r), pixel[i], index(image[i], pixel[i], r));
            }
            #pragma unroll
            for (int i = 0; i < QUADS_AT_ONCE && first + i * QUAD < OUTPUTS; i++) {
                #pragma unroll
                for (int r = 0; r < 2; r++) {
                    if (pixel[i] < 0 || row(2 * r) >= OUT_CHANNELS) continue;
                    T value[WIDE_C];
                    #pragma unroll
                    for (int k = 0; k < WIDE_C; k++)
                        value[k] = sums[first + i * QUAD + 2 * r + k] * mask.rows[r] * scale[i];
                    out.write(aux[i][r], index(image[i], pixel[i], r), value);
                }
            }
        }
    }
}

// The same with 2 x 2 max pooling. A thread's positions are whole pairs of image rows. The two columns of a window are
// neighbours in a thread. The row below is PAIRS pairs of columns further: NEXT lanes further among four and, after the
// last of the four lanes, in the next group of eight columns.
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
            if (group * 4 / PAIRS % 2 == 1 && (group * 4 + 3) / PAIRS % 2 == 1) continue; // lower rows only
            T window[4];
            #pragma unroll
            for (int column = 0; column < 2; column++) {
                const int below = group + PAIRS / 4;
                window[column] = sum(group, column);
                const T sent = lane_of_four < NEXT ? sum(below + 1, column) : sum(below, column);
                window[2 + column] = __shfl_sync(~0u, sent, lane - lane_of_four + (lane_of_four + NEXT) % 4);
            }
            const int pair = group * 4 + lane_of_four, y = first.y / 2 + pair / PITCH, x = pair % PITCH;
            if (real && y < ROWS && x < COLS)
                out.write<4>(aux, ((first.image * OUT_CHANNELS + row) * ROWS + y) * COLS + x, window);
        }
    }
}
