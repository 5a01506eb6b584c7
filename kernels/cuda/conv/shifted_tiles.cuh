// What the kernels of convolutions by positions share: their tiles, weights, stages, and how sums are written. Read
// conv/shifted.cuh first.
//
// Rows are FILTERS filters, columns TILE positions, k STAGE_CHANNELS channels of an element of the window at a time. Of
// PRODUCERS threads a warp has the copies of weights, which are cut beforehand, on their way; LOADERS bring the
// images' positions (conv/shifted_bf16x3.cu gathers and cuts them, conv/shifted_fp16x2.cu has them copied); MMA_WARPGROUPS warpgroups multiply, each
// COLUMNS of the columns.
//
// Tiles run on from image to image, or, where there are TILES_PER_IMAGE, so many begin with each image, and what lies behind its
// last output is not computed, but for the rest of a tile. IMAGE_PITCH is then no less than their positions.
#pragma once
#include "conv/fp16x2.cuh"
#include "conv/shifted_pipeline.cuh"
#ifndef TILES_PER_IMAGE
#define TILES_PER_IMAGE 0
#endif

constexpr int TILE = MMA_WARPGROUPS * COLUMNS, MMA_ROWS = 64;      // MMA_ROWS: rows of the matrix units
constexpr bool STACKED = OUT_CHANNELS <= MMA_ROWS / 2; // then half of the rows are the same filters' second parts
constexpr int FILTERS = STACKED ? MMA_ROWS / 2 : MMA_ROWS;
constexpr int CONSUMERS = MMA_WARPGROUPS * WARPGROUP, THREADS = PRODUCERS + CONSUMERS;
constexpr int IMAGE_STAGES = 2, GROUPS = STAGE_CHANNELS / CHUNK_ELEMENTS;
constexpr int CHANNEL_BLOCKS = (IN_CHANNELS + STAGE_CHANNELS - 1) / STAGE_CHANNELS, FILTER_BLOCKS = (OUT_CHANNELS + FILTERS - 1) / FILTERS;
constexpr int SUMS = COLUMNS / 2, OUTPUTS = SUMS * FILTERS / MMA_ROWS; // of a thread; that it writes
constexpr int COMBINE_ELEMENTS = STACKED ? OUTPUTS * WARPGROUP : 0;         // of a warpgroup, with `give`
constexpr int CONSECUTIVE_TILES = TILES_PER_IMAGE > 0 ? TILES_PER_IMAGE : 1 << 30;      // tiles that follow one another
typedef CoreMatrixLayout<MMA_ROWS, GROUPS, STACKED ? 2 : 3> Bf16x3WeightLayout;
typedef CoreMatrixLayout<MMA_ROWS, GROUPS, FP16_PARTS> Fp16x2WeightLayout;

// A word of a filter's weights, in the order in which stages want them: for each FILTERS filters and STAGE_CHANNELS channels
// the elements of the window, of each its pieces, of each its planes.
struct WeightChunk {
    int block, chunk, tap, plane, line;

    __device__ WeightChunk(int block, int chunk, int tap, int plane, int line)
        : block(block), chunk(chunk), tap(tap), plane(plane), line(line) {}
    __device__ WeightChunk(int filter, int i)
        : block(filter / FILTERS), chunk(i / (GROUPS * TAPS)), tap(i / GROUPS % TAPS), plane(i % GROUPS),
          line(filter % FILTERS) {}
    __device__ __forceinline__ int channel() const { return chunk * STAGE_CHANNELS + plane * CHUNK_ELEMENTS; }
    __device__ __forceinline__ int64_t stage() const { return ((int64_t)block * CHANNEL_BLOCKS + chunk) * TAPS + tap; }
};
constexpr int WEIGHT_CHUNKS = CHANNEL_BLOCKS * TAPS * GROUPS; // of a filter

// Puts a word in pieces to its place.
__device__ __forceinline__ void store_split(char *pieces, const WeightChunk &at, const float (&found)[CHUNK_ELEMENTS]) {
    Chunk words[BF16X3_TERMS];
    split_bf16x3(words, found);
    char *to = pieces + at.stage() * Bf16x3WeightLayout::SIZE;
    #pragma unroll
    for (int p = 0; p < BF16X3_TERMS + STACKED; p++) {
        const int piece = STACKED ? p / 2 : p, row = STACKED ? at.line + p % 2 * FILTERS : at.line;
        *(Chunk *)(to + Bf16x3WeightLayout::offset(piece, at.plane, row)) = p < BF16X3_TERMS ? words[p] : Chunk{};
    }
}

// The tiles of a block: those of the same positions, which read the same images, at the same time.
struct Tiles {
    int count;

    __device__ explicit Tiles(int batch)
        : count((TILES_PER_IMAGE > 0 ? batch * TILES_PER_IMAGE : ceil_div(batch * IMAGE_PITCH, TILE)) * FILTER_BLOCKS) {}
    __device__ __forceinline__ int filter(int tile) const { return tile % FILTER_BLOCKS * FILTERS; }
    __device__ __forceinline__ int position(int tile) const {
        const int i = tile / FILTER_BLOCKS;
        return i / CONSECUTIVE_TILES * IMAGE_PITCH + i % CONSECUTIVE_TILES * TILE;
    }
};

constexpr int FALLBACK_POSITIONS = 144; // positions that are left to pieces together

// Where what is made on the way lies in scratch.
struct ConvScratch {
    char *bf16_weights, *fp16_weights;
    Statistics *filters;
    int *marks; // of FALLBACK_POSITIONS positions and FILTERS filters, whether they are left to pieces

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

// Elements of the window that a warpgroup is ahead of the next one: so few that neither the stages of weights nor those of
// images are too few for all teams.
__device__ constexpr int stagger() {
    const int even = TAPS * CHANNEL_BLOCKS / MMA_WARPGROUPS, most = (WEIGHT_STAGES - 1) / (MMA_WARPGROUPS - 1);
    const int found = even < most ? even : most;
    return found < 1 ? 1 : found < TAPS ? found : TAPS;
}
constexpr int STAGGER = stagger();

// A consumer's warpgroup, by a shuffle, so that the compiler knows it to be a whole warp's: where threads may part it has products
// wait for one another.
__device__ __forceinline__ int consumer_warpgroup() { return __shfl_sync(~0u, (threadIdx.x - PRODUCERS) / WARPGROUP, 0); }

struct ConvPipeline : TilePipeline<IMAGE_STAGES, WEIGHT_STAGES, LOADERS, CONSUMERS> {
    Mbarrier started[MMA_WARPGROUPS];

    __device__ void init() {
        for (Mbarrier &warpgroup : started) warpgroup.init(WARPGROUP / WARP);
        TilePipeline::init();
    }

    // In a block's first tile each warpgroup waits until the one before it is STAGGER elements of the window ahead: so they end
    // their tiles one after another, while the others multiply.
    __device__ __forceinline__ void wait_for_start(int warpgroup) {
        if (warpgroup > 0) started[warpgroup].wait(0);
    }
    __device__ __forceinline__ void start_next(int warpgroup, int element) {
        if (warpgroup + 1 < MMA_WARPGROUPS && element == STAGGER - 1) arrive_per_warp(started[warpgroup + 1]);
    }

    // Of one thread: starts the copies of a tile's weights.
    template <class WeightLayout> __device__ __forceinline__ void load_weights(
        int tile, PipelineState<WEIGHT_STAGES> &turn, char *shared, const char *all) {
        constexpr int COUNT = CHANNEL_BLOCKS * TAPS;
        TilePipeline::load_weights<WeightLayout::SIZE, COUNT>(
            turn, shared, all + (int64_t)(tile % FILTER_BLOCKS) * COUNT * WeightLayout::SIZE);
    }
};

// Of the sums that a thread writes: filter and column of sum i.
__device__ __forceinline__ int output_row(int i) { return accumulator_row(i) % FILTERS; }
__device__ __forceinline__ int output_column(int i) { return accumulator_row(i) / FILTERS * (COLUMNS / 2) + accumulator_column(i); }

// Those sums. STACKED two threads have sums of a filter, and each adds up half of them; what they give to each other
// passes through what the warpgroup has `buffer`.
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

// By one thread: asks for what the epilogue reads beside the outputs of a tile, those of an image and a filter being
// neighbours.
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

// Hands the sums of FILTERS filters from `filter` on and COLUMNS positions from `position` on to the epilogue, which is
// asked for what it reads beside several of them before the first one is written. how: which positions it takes, and what
// their sums are multiplied by, of an image and of a sum's row.
template <class How> __device__ __forceinline__ void write(
    const float (&sums)[OUTPUTS], const Epilogue &out, int batch, int filter, int position, const How &how) {
    constexpr int EACH = 4, AT_ONCE = 4; // EACH: sums of two neighbouring positions and two rows
    const auto row = [&](int i) { return filter + output_row(i); };
    const auto index = [&](int image, int place, int r) {
        return (image * OUT_CHANNELS + row(2 * r)) * (OUT_ROWS * OUT_COLUMNS) + place;
    };
    #pragma unroll
    for (int h = 0; h < 2; h += WIDE_C) {
        OutputPosition at(position + output_column(h));
        #pragma unroll
        for (int first = h; first < OUTPUTS; first += AT_ONCE * EACH) {
            int image[AT_ONCE], place[AT_ONCE];
            float scale[AT_ONCE];
            Epilogue::Aux<WIDE_C> beside[AT_ONCE][2];
            // 8: output_column(EACH) - output_column(0)
            #pragma unroll
            for (int i = 0; i < AT_ONCE && first + i * EACH < OUTPUTS; i++, at.advance(8)) {
                image[i] = at.image;
                const bool taken = at.inside(batch) && how.takes(position + output_column(first + i * EACH));
                place[i] = taken ? at.y * OUT_COLUMNS + at.x : -1;
                scale[i] = taken ? how.scale(at.image) : 0;
                #pragma unroll
                for (int r = 0; r < 2; r++)
                    if (place[i] >= 0 && row(2 * r) < OUT_CHANNELS)
                        beside[i][r] = out.load_aux<WIDE_C>(image[i], row(2 * r), place[i], index(image[i], place[i], r));
            }
            #pragma unroll
            for (int i = 0; i < AT_ONCE && first + i * EACH < OUTPUTS; i++) {
                #pragma unroll
                for (int r = 0; r < 2; r++) {
                    if (place[i] < 0 || row(2 * r) >= OUT_CHANNELS) continue;
                    T value[WIDE_C];
                    #pragma unroll
                    for (int k = 0; k < WIDE_C; k++)
                        value[k] = sums[first + i * EACH + 2 * r + k] * how.rows[r] * scale[i];
                    out.write(beside[i][r], index(image[i], place[i], r), value);
                }
            }
        }
    }
}

// Hands the same sums to the epilogue by windows of two rows and columns, of which a thread's positions are whole pairs of
// rows: of one row a window's two columns are neighbours in a thread, and those of the row below PAIRS pairs of columns
// further on, so NEXT lanes of four, and a group of eight columns later in the lanes that this leads round.
__device__ __forceinline__ void write_pooled(
    const float (&sums)[OUTPUTS], const Epilogue &out, int filter, int position) {
    constexpr int PAIRS = PITCH / 2, NEXT = PAIRS % 4, GROUPS = OUTPUTS / 4, ROWS = OUT_ROWS / 2, COLS = OUT_COLUMNS / 2;
    const OutputPosition first(position + output_column(0) - accumulator_column(0));
    const int lane = threadIdx.x % WARP, mine = lane % 4;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = filter + output_row(2 * r);
        const bool real = row < OUT_CHANNELS;
        Epilogue::Aux<4> beside;
        if (real) beside = out.load_aux<4>(first.image, row, 0, 0);
        const auto sum = [&](int group, int column) { return sums[min(group, GROUPS - 1) * 4 + 2 * r + column]; };
        #pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            if (group * 4 / PAIRS % 2 == 1 && (group * 4 + 3) / PAIRS % 2 == 1) continue; // rows below alone
            T window[4];
            #pragma unroll
            for (int column = 0; column < 2; column++) {
                const int below = group + PAIRS / 4;
                window[column] = sum(group, column);
                const T given = mine < NEXT ? sum(below + 1, column) : sum(below, column);
                window[2 + column] = __shfl_sync(~0u, given, lane - mine + (mine + NEXT) % 4);
            }
            const int pair = group * 4 + mine, y = first.y / 2 + pair / PITCH, x = pair % PITCH;
            if (real && y < ROWS && x < COLS)
                out.write<4>(beside, ((first.image * OUT_CHANNELS + row) * ROWS + y) * COLS + x, window);
        }
    }
}
