// Weight gradient of a stride-1 convolution with 3 x 3 windows in fp16x2: three products instead of six; one where
// operands are rounded. Images and gradients are measured and packed by the launches before. Read
// conv/packed_images.cuh first.
//
// A block has FILTERS filters, STAGE_CHANNELS channels, all elements of the window and one split of the images. One
// thread starts the copies of packed rows; three warpgroups multiply, one for each row of the window, whose elements
// are one packed row apart. Sums over GROUP positions of an image have one scale. These splits fall back to bf16x3:
// - with an image or gradient that fp16x2 does not represent, with few effective products, or with scales so small that
//   squares of sums would underflow;
// - whose sums' mean square is small beside that of the products;
// - with a sum that is small beside what small elements may have lost.
// Of rounded operands only the first of these, without few products, and the last apply.
#ifndef PIPELINE_STAGES
#define PIPELINE_STAGES 3
#endif
#include "conv/packed_images.cuh"

constexpr int FILTERS = 64, PRODUCERS = WARPGROUP, CONSUMERS = KH * WARPGROUP, THREADS = PRODUCERS + CONSUMERS;
constexpr int STEP = 16, GROUP = 4 * STEP, STAGE_GROUPS = 2; // positions of one WGMMA; positions that WGMMA sums
static_assert(KH == 3 && KW == 3 && STAGE_CHANNELS == ROW_CHANNELS, "registers suffice for this");

// An image's positions from its first output to its last, in groups; the last group may be short.
constexpr int STEPS = ceil_div((OUT_ROWS - 1) * PITCH + OUT_COLUMNS, STEP), GROUPS = ceil_div(STEPS, 4);
constexpr int LAST = STEPS - 4 * (GROUPS - 1), PASSES = ceil_div(GROUPS, STAGE_GROUPS);
static_assert(STEPS * STEP <= IMAGE_PITCH, "the next image first_tile behind them");

// Rows before position 0 of the gradients, as those of the transposed convolution.
constexpr int REACH_AHEAD = REACH - REACH_BACK, GRADIENT_LEADING_ROWS = (REACH_AHEAD + 7) / 8 * 8,
    SKIPPED_ROWS = LEADING_ROWS - REACH_BACK;
constexpr int SIZE = OUT_CHANNELS * IN_CHANNELS * TAPS, SUMS = KW * STAGE_CHANNELS / 2;
constexpr float SMALLEST = 0x1p-80f; // least product of an image's inverse scales
typedef ImageArray<OUT_CHANNELS, OUT_ROWS, OUT_COLUMNS> Gradients;

// A stage: images of both parts, then gradients of both parts, 32 filters and then 32 more. Rows begin at a multiple of
// eight, the period of the swizzle, so up to seven of them are not needed.
struct StageLayout {
    static constexpr int STAGE_POSITIONS = STAGE_GROUPS * GROUP;
    static constexpr int IMAGE_BYTES = (7 + STAGE_POSITIONS + REACH + 7) / 8 * 8 * ROW_BYTES,
        GRADIENT_BYTES = (STAGE_POSITIONS + 8) * ROW_BYTES;
    static constexpr int GRADIENTS = FP16_PARTS * IMAGE_BYTES, SIZE = GRADIENTS + 2 * FP16_PARTS * GRADIENT_BYTES;
};

static_assert(SHARED_BYTES >= 1024 + PIPELINE_STAGES * StageLayout::SIZE, "dynamic shared memory");

struct WeightGradScratch {
    float *sums;     // of each split
    int *falls_back; // for each split, block and row of the window
    char *end;

    __device__ WeightGradScratch(char *scratch, int splits, int blocks)
        : sums((float *)scratch), falls_back((int *)(sums + (int64_t)splits * SIZE)),
            end((char *)(falls_back + splits * blocks * KH)) {}
};

// Packed images and gradients in scratch.
struct PackedOperands {
    PackedImages images, gradients;

    __device__ PackedOperands(const WeightGradScratch &scratch, int batch)
        : images(align_1024(scratch.end), batch, IN_CHANNELS, LEADING_ROWS),
          gradients(align_1024(images.end()), batch, OUT_CHANNELS, GRADIENT_LEADING_ROWS) {}
};
constexpr int FILTER_BLOCKS = ceil_div(OUT_CHANNELS, FILTERS) * ceil_div(IN_CHANNELS, STAGE_CHANNELS);

// Launch 1: statistics of images and gradients.
KERNEL __launch_bounds__(PACK_THREADS, PACK_BLOCKS) measure_operands(
    const T *x, const T *g, T *w, int64_t batch, int64_t splits, char *scratch) {
    wait_for_inputs();
    const PackedOperands packed(WeightGradScratch(scratch, splits, FILTER_BLOCKS), batch);
    packed.images.measure(InputImages{x, (int)batch});
    packed.gradients.measure(Gradients{g, (int)batch});
}

// Launch 2: packs both.
KERNEL __launch_bounds__(PACK_THREADS, PACK_BLOCKS) pack_operands(
    const T *x, const T *g, T *w, int64_t batch, int64_t splits, char *scratch) {
    wait_for_inputs();
    const PackedOperands packed(WeightGradScratch(scratch, splits, FILTER_BLOCKS), batch);
    packed.gradients.pack(Gradients{g, (int)batch});
    packed.images.pack(InputImages{x, (int)batch});
}

// The work of a block.
struct ImageSplit {
    int filter, channel, begin, end; // images

    __device__ ImageSplit(int batch, int splits) {
        constexpr int across = ceil_div(IN_CHANNELS, STAGE_CHANNELS);
        filter = blockIdx.x / across * FILTERS;
        channel = blockIdx.x % across * STAGE_CHANNELS;
        begin = (int64_t)batch * blockIdx.y / splits;
        end = (int64_t)batch * (blockIdx.y + 1) / splits;
    }
    // Whether fp16x2 represents its images, in all threads.
    __device__ __forceinline__ bool representable(const PackedOperands &packed) const {
        __shared__ bool found;
        found = false;
        __syncthreads();
        for (int i = begin + threadIdx.x; i < end; i += THREADS) {
            const Statistics &x = packed.images.statistics[i], &g = packed.gradients.statistics[i];
            if (!(x.share * g.share * Gradients::AREA >= MIN_PRODUCTS)) found = true;
            if (x.inverse_scale * g.inverse_scale < SMALLEST) found = true;
            if (max(packed.images.small[i], packed.gradients.small[i]) > MAX_SMALL) found = true;
        }
        __syncthreads();
        return !found;
    }
};

// The first row of a stage, and how many rows of it are not needed.
struct AlignedRow {
    int row, skipped;
    __device__ explicit AlignedRow(int needed) : row(needed / 8 * 8), skipped(needed % 8) {}
};

// By one thread.
__device__ __forceinline__ void load_stages(const PackedOperands &packed, const ImageSplit &split,
    Pipeline<PIPELINE_STAGES> &pipeline, char *shared) {
    PipelineState<PIPELINE_STAGES> state;
    for (int image = split.begin; image < split.end; image++) {
        for (int pass = 0; pass < PASSES; pass++, state.advance()) {
            const int position = image * IMAGE_PITCH + pass * StageLayout::STAGE_POSITIONS;
            const AlignedRow of_images(position + SKIPPED_ROWS), of_gradients(position + GRADIENT_LEADING_ROWS);
            char *stage = shared + state.stage * StageLayout::SIZE;
            pipeline.wait_empty(state);
            Mbarrier &full = pipeline.full[state.stage];
            full.arrive_expect_tx(StageLayout::SIZE);
            #pragma unroll
            for (int i = 0; i < FP16_PARTS; i++) {
                bulk_copy<StageLayout::IMAGE_BYTES>(stage + i * StageLayout::IMAGE_BYTES,
                    packed.images.at(i, split.channel / ROW_CHANNELS, of_images.row), full);
                #pragma unroll
                for (int j = 0; j < 2; j++)
                    bulk_copy<StageLayout::GRADIENT_BYTES>(stage + StageLayout::GRADIENTS + (2 * i + j) * StageLayout::GRADIENT_BYTES,
                        packed.gradients.at(i,
                            min(split.filter / ROW_CHANNELS + j, packed.gradients.channel_blocks - 1),
                            of_gradients.row),
                        full);
            }
        }
    }
}

// Adds the unscaled products of COUNT steps.
template <int COUNT> __device__ __forceinline__ void multiply(float (&main)[SUMS], uint64_t a, uint64_t b,
    float scale) {
    float sums[SUMS];
    const auto products = [&](TermPair parts, bool add) {
        #pragma unroll
        for (int k = 0; k < COUNT; k++)
            wgmma<FP16X2, true, true>(sums, a + (parts.a * 2 * StageLayout::GRADIENT_BYTES + k * STEP * ROW_BYTES) / CHUNK_BYTES,
                b + (parts.b * StageLayout::IMAGE_BYTES + k * STEP * ROW_BYTES) / CHUNK_BYTES, add || k > 0);
    };
    const auto add = [&](float scale) {
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = fma(sums[i], scale, main[i]);
    };
    if (FP16_PARTS == 2) {
        wgmma_fence();
        products({0, 1}, false);
        products({1, 0}, true);
        add(scale * LOW);
    }
    wgmma_fence();
    products({0, 0}, false);
    add(scale);
}

// What a split's sums are compared with: the expected square of a sum without cancellation, and the least size of a sum
// with small elements (SMALL_ELEMENT_LOSS).
struct SumBounds {
    float squares = 0, min_size = 0;
};

// The sums of a row of the window. By a warpgroup.
__device__ __forceinline__ SumBounds multiply(float (&main)[SUMS], const PackedOperands &packed,
    const ImageSplit &split, int row,
    Pipeline<PIPELINE_STAGES> &pipeline, const char *shared) {
    SumBounds bounds;
    #pragma unroll
    for (int i = 0; i < SUMS; i++) main[i] = 0;
    PipelineState<PIPELINE_STAGES> state;
    for (int image = split.begin; image < split.end; image++) {
        const Statistics x = packed.images.statistics[image], g = packed.gradients.statistics[image];
        const float scale = x.inverse_scale * g.inverse_scale;
        bounds.squares += x.squares / InputImages::SIZE * (g.squares / OUT_CHANNELS) * scale * scale;
        bounds.min_size += (packed.images.small[image] + packed.gradients.small[image]) * SMALL_ELEMENT_LOSS * scale;
        for (int pass = 0; pass < PASSES; pass++, state.advance()) {
            const int position = image * IMAGE_PITCH + pass * StageLayout::STAGE_POSITIONS;
            const int of_images = AlignedRow(position + SKIPPED_ROWS).skipped;
            const int of_gradients = AlignedRow(position + GRADIENT_LEADING_ROWS).skipped;
            pipeline.wait_full(state);
            const char *stage = shared + state.stage * StageLayout::SIZE;
            const uint64_t a = smem_descriptor(stage + StageLayout::GRADIENTS + of_gradients * ROW_BYTES,
                StageLayout::GRADIENT_BYTES, 8 * ROW_BYTES,
                SWIZZLE_64B);
            const uint64_t b = smem_descriptor(stage + (of_images + tap_offset(row, 0)) * ROW_BYTES, DW * ROW_BYTES,
                8 * ROW_BYTES, SWIZZLE_64B);
            #pragma unroll 1
            for (int i = 0; i < STAGE_GROUPS; i++) {
                const int group = pass * STAGE_GROUPS + i, further = i * GROUP * ROW_BYTES / CHUNK_BYTES;
                if (group < GROUPS - 1)
                    multiply<4>(main, a + further, b + further, scale);
                else if (group == GROUPS - 1)
                    multiply<LAST>(main, a + further, b + further, scale);
            }
            arrive_per_warp(pipeline.empty[state.stage]);
        }
    }
    return bounds;
}

// The sums of each split, to scratch.
KERNEL __launch_bounds__(THREADS, 1) weight_grad_shifted_fp16x2(
    const T *x, const T *g, T *w, int64_t batch, int64_t splits, char *scratch) {
    wait_for_inputs();
    const WeightGradScratch scratch_layout(scratch, splits, FILTER_BLOCKS);
    const PackedOperands packed(scratch_layout, batch);
    const ImageSplit split(batch, splits);
    int *marks = scratch_layout.falls_back + (blockIdx.y * FILTER_BLOCKS + blockIdx.x) * KH;
    char *shared = aligned_shared<1024>();
    __shared__ Pipeline<PIPELINE_STAGES> pipeline;
    __shared__ float signs[CONSUMERS / WARP];
    if (threadIdx.x == 0) {
        pipeline.init(1, CONSUMERS / WARP);
        fence_mbarrier_init();
    }
    if (!split.representable(packed)) {
        if (threadIdx.x < KH) marks[threadIdx.x] = true;
        return;
    }
    if (threadIdx.x < PRODUCERS) {
        warpgroup_reg_dealloc<40>();
        if (threadIdx.x == 0) load_stages(packed, split, pipeline, shared);
        return;
    }
    warpgroup_reg_alloc<152>();
    const int row = threadIdx.x / WARPGROUP - 1;
    float sums[SUMS];
    const SumBounds bounds = multiply(sums, packed, split, row, pipeline, shared);
    float sign = any_below(sums, bounds.min_size) ? -INFINITY : 0; // see Fp16x2Accumulator::accurate
    #pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const int filter = split.filter + accumulator_row(i), column = accumulator_column(i) / STAGE_CHANNELS;
        const int channel = split.channel + accumulator_column(i) % STAGE_CHANNELS;
        if (filter >= OUT_CHANNELS || channel >= IN_CHANNELS) continue;
        if (FP16_PARTS == 2) sign += sums[i] * sums[i] - bounds.squares / MAX_CANCELLATION;
        scratch_layout.sums[blockIdx.y * (int64_t)SIZE + split_offset(filter, channel, row * KW + column)] = sums[i];
    }
    sign = over_lanes<Sum, WARP>(sign);
    float *of_row = signs + row * (WARPGROUP / WARP);
    if (threadIdx.x % WARP == 0) of_row[threadIdx.x % WARPGROUP / WARP] = sign;
    named_barrier_sync(WARPGROUP, 1 + row);
    if (threadIdx.x % WARPGROUP == 0) marks[row] = !(of_row[0] + of_row[1] + of_row[2] + of_row[3] >= 0);
}
