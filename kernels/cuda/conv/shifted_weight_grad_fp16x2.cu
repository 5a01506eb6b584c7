// Weight gradient of a stride-1 convolution with 3 x 3 windows in fp16x2: three products instead of six; one where
// operands are rounded. Two launches before compute statistics of images and gradients, and pack them. Read
// conv/packed_images.cuh first.
//
// A block has FILTERS filters, STAGE_CHANNELS channels, all taps and one split of the images. One thread starts the copies of
// packed rows. Three warpgroups multiply, one for each row of the window, whose taps are one packed row apart. WGMMA sums
// SUM_POSITIONS positions of an image, which have one scale. A split falls back to bf16x3
// - if an image or gradient is not representable, if there are too few effective products, or if scales are so small that
//   squares of sums would underflow;
// - if its sums are small compared with their products;
// - if a sum is small compared with the error of small elements.
// For rounded operands only the first reason (without the number of products) and the last apply.
#include "conv/packed_images.cuh"

constexpr int FILTERS = 64, PRODUCERS = WARPGROUP, CONSUMERS = KH * WARPGROUP, THREADS = PRODUCERS + CONSUMERS;
constexpr int STEP = 16, SUM_POSITIONS = 4 * STEP, SUMS_PER_STAGE = 2; // positions of one WGMMA, and of a sum by WGMMA
static_assert(KH == 3 && KW == 3 && STAGE_CHANNELS == ROW_CHANNELS, "registers suffice for this");

// An image's positions from its first output to its last, in runs of SUM_POSITIONS; the last run may be shorter.
constexpr int STEPS = ceil_div((OUT_ROWS - 1) * PITCH + OUT_COLUMNS, STEP), SUMS_PER_IMAGE = ceil_div(STEPS, 4);
constexpr int LAST_STEPS = STEPS - 4 * (SUMS_PER_IMAGE - 1), PASSES = ceil_div(SUMS_PER_IMAGE, SUMS_PER_STAGE);
static_assert(STEPS * STEP <= IMAGE_PITCH, "the next image begins after them");

// Rows before position 0 of the gradients, as those of the transposed convolution.
constexpr int REACH_AHEAD = REACH - REACH_BACK, GRADIENT_LEADING_ROWS = (REACH_AHEAD + 7) / 8 * 8,
    SKIPPED_ROWS = LEADING_ROWS - REACH_BACK;
constexpr int SIZE = OUT_CHANNELS * IN_CHANNELS * TAPS, SUMS = KW * STAGE_CHANNELS / 2;
constexpr float SMALLEST = 0x1p-80f; // least product of an image's inverse scales
typedef ImageArray<OUT_CHANNELS, OUT_ROWS, OUT_COLUMNS> Gradients;

// A stage: both terms of images, then both terms of gradients, each in two blocks of 32 filters. Rows begin at a multiple
// of eight, the period of the swizzle, so up to seven of them are not used.
struct StageLayout {
    static constexpr int STAGE_POSITIONS = SUMS_PER_STAGE * SUM_POSITIONS;
    static constexpr int IMAGE_BYTES = (7 + STAGE_POSITIONS + REACH + 7) / 8 * 8 * ROW_BYTES,
        GRADIENT_BYTES = (STAGE_POSITIONS + 8) * ROW_BYTES;
    static constexpr int GRADIENTS = FP16_TERMS * IMAGE_BYTES, SIZE = GRADIENTS + 2 * FP16_TERMS * GRADIENT_BYTES;
};

// Packed images and gradients in scratch.
struct PackedOperands {
    PackedImages images, gradients;

    __device__ PackedOperands(char *scratch, int64_t splits, int batch)
        : images(SCRATCH_PACKED(char, scratch, splits), batch, IN_CHANNELS, LEADING_ROWS),
          gradients(images.end, batch, OUT_CHANNELS, GRADIENT_LEADING_ROWS) {}
};
constexpr int FILTER_BLOCKS = ceil_div(OUT_CHANNELS, FILTERS) * ceil_div(IN_CHANNELS, STAGE_CHANNELS);

// Launch 1: statistics of images and gradients.
KERNEL __launch_bounds__(PACK_THREADS, PACK_BLOCKS) measure_operands(
    const T *x, const T *g, T *w, int64_t batch, int64_t splits, char *scratch) {
    wait_for_inputs();
    const PackedOperands packed(scratch, splits, batch);
    packed.images.measure(InputImages{x, (int)batch});
    packed.gradients.measure(Gradients{g, (int)batch});
}

// Launch 2: packs both.
KERNEL __launch_bounds__(PACK_THREADS, PACK_BLOCKS) pack_operands(
    const T *x, const T *g, T *w, int64_t batch, int64_t splits, char *scratch) {
    wait_for_inputs();
    const PackedOperands packed(scratch, splits, batch);
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

// The first row of a stage, and the number of its rows before the first one that is used.
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
            for (int i = 0; i < FP16_TERMS; i++) {
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
    const auto products = [&](TermPair terms, bool add) {
        #pragma unroll
        for (int k = 0; k < COUNT; k++)
            wgmma<FP16X2, true, true>(sums, a + (terms.a * 2 * StageLayout::GRADIENT_BYTES + k * STEP * ROW_BYTES) / CHUNK_BYTES,
                b + (terms.b * StageLayout::IMAGE_BYTES + k * STEP * ROW_BYTES) / CHUNK_BYTES, add || k > 0);
    };
    const auto add = [&](float scale) {
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = fma(sums[i], scale, main[i]);
    };
    if (FP16_TERMS == 2) {
        wgmma_fence();
        products({0, 1}, false);
        products({1, 0}, true);
        add(scale * LOW);
    }
    wgmma_fence();
    products({0, 0}, false);
    add(scale);
}

// The bounds of a split's sums: the expected square of a sum without cancellation, and the minimum magnitude of a sum with
// small elements (SMALL_ELEMENT_LOSS).
struct SumBounds {
    float squares = 0, min_size = 0;
};

// The sums of a row of the window. By a warpgroup.
__device__ __forceinline__ SumBounds multiply(float (&main)[SUMS], const PackedOperands &packed,
    const ImageSplit &split, int row, Pipeline<PIPELINE_STAGES> &pipeline, const char *shared) {
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
                StageLayout::GRADIENT_BYTES, 8 * ROW_BYTES, SWIZZLE_64B);
            const uint64_t b = smem_descriptor(stage + (of_images + tap_offset(row, 0)) * ROW_BYTES, DW * ROW_BYTES,
                8 * ROW_BYTES, SWIZZLE_64B);
            #pragma unroll 1
            for (int i = 0; i < SUMS_PER_STAGE; i++) {
                const int run = pass * SUMS_PER_STAGE + i, offset = i * SUM_POSITIONS * ROW_BYTES / CHUNK_BYTES;
                if (run < SUMS_PER_IMAGE - 1)
                    multiply<4>(main, a + offset, b + offset, scale);
                else if (run == SUMS_PER_IMAGE - 1)
                    multiply<LAST_STEPS>(main, a + offset, b + offset, scale);
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
    const PackedOperands packed(scratch, splits, batch);
    const ImageSplit split(batch, splits);
    int *marks = SCRATCH_FALLS_BACK(int, scratch, splits) + (blockIdx.y * FILTER_BLOCKS + blockIdx.x) * KH; // of each row
    char *shared = *SHARED_STAGES(char[StageLayout::SIZE], shared_bytes);
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
        if (FP16_TERMS == 2) sign += sums[i] * sums[i] - bounds.squares / MAX_CANCELLATION;
        SCRATCH_SUMS(float, scratch, splits)[blockIdx.y * (int64_t)SIZE + split_offset(filter, channel, row * KW + column)] = sums[i];
    }
    sign = over_lanes<Sum, WARP>(sign);
    float *of_row = signs + row * (WARPGROUP / WARP);
    if (threadIdx.x % WARP == 0) of_row[threadIdx.x % WARPGROUP / WARP] = sign;
    named_barrier_sync(WARPGROUP, 1 + row);
    if (threadIdx.x % WARPGROUP == 0) marks[row] = !(of_row[0] + of_row[1] + of_row[2] + of_row[3] >= 0);
}
