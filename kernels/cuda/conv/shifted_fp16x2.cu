// Stride-1 convolution by shifted implicit GEMM in fp16x2: three products instead of six; one where operands are
// rounded. Read conv/fp16x2.cuh first. Bulk copies load the packed operands: one producer warp starts those of
// the weights, one those of the images; with another one it sums the squares of their rows.
//
// high x high products are exact. WGMMA sums them over one tap; float32 additions sum the results. high x low and low x high
// have an accumulator of their own, so its truncation is relative to their size.
//
// A window is inside one image, so all products of a sum have one scale. These fall back to bf16x3:
// - tiles with an image or a filter that is not representable, infinity and NaN included;
// - tiles whose sums have too few effective products (Statistics::share): sequential FMA has almost no rounding error there;
// - units of FALLBACK_POSITIONS positions whose sums are small compared with their products: cancellation exposes the bits
//   that fp16x2 has lost;
// - units with a sum that is small compared with the error of an image's small elements.
// For rounded operands only the first and the last reason apply.
//
// LOADERS: a warp for each consumer warpgroup.
constexpr int MMA_WARPGROUPS = 2, COLUMNS = 144, PRODUCERS = 128, LOADERS = MMA_WARPGROUPS * 32;
#include "conv/shifted_tiles.cuh"
#include "conv/packed_images.cuh"

typedef Fp16x2WeightLayout WeightLayout;

constexpr int SKIPPED_ROWS = LEADING_ROWS - REACH_BACK; // leading rows of a tile's stage that no window reads
static_assert(!STACKED, "at least 33 filters");
static_assert(STAGE_CHANNELS == ROW_CHANNELS && TILE % 8 == 0, "a stage has whole packed rows with one swizzle phase");

// Packed rows of one stage in shared memory.
struct ImageLayout {
    static constexpr int ROWS = (SKIPPED_ROWS + TILE + REACH + 7) / 8 * 8;
    static constexpr int TERM_BYTES = ROWS * ROW_BYTES, SIZE = FP16_TERMS * TERM_BYTES;
};

__device__ __forceinline__ PackedImages packed_images(char *scratch, int batch) {
    const unsigned marks = ceil_div(batch * IMAGE_PITCH, TILE) * (TILE / FALLBACK_POSITIONS) * FILTER_BLOCKS;
    return PackedImages(SCRATCH_PACKED(char, scratch, marks), batch, IN_CHANNELS, LEADING_ROWS);
}

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

struct Fp16x2Pipeline : ConvPipeline<LOADERS, false> {
    float squares[IMAGE_STAGES][MMA_WARPGROUPS];      // sum of the squares of the rows that a warpgroup multiplies
    float shares[FILTER_BLOCKS];                    // the least share of a tile's filters
    float signs[2][MMA_WARPGROUPS][WARPGROUP / WARP]; // see Fp16x2Accumulator::accurate

    __device__ void load_filter_shares(const ConvScratch &scratch_layout) {
        for (int i = threadIdx.x / WARP; i < FILTER_BLOCKS; i += THREADS / WARP) {
            float share = INFINITY;
            for (int j = threadIdx.x % WARP; j < FILTERS; j += WARP)
                share = fminf(share, scratch_layout.filters[i * FILTERS + j].share);
            share = over_lanes<Min, WARP>(share);
            if (threadIdx.x % WARP == 0) shares[i] = share;
        }
    }

    // The maximum number of small elements in an image that a tile reads; NOT_REPRESENTABLE if the whole tile falls back.
    __device__ __forceinline__ int small(const PackedImages &packed, int batch, int tile, int position) const {
        const int end = min((position - REACH_BACK + TILE + REACH - 1) / IMAGE_PITCH, batch - 1);
        float share = INFINITY;
        int most = 0;
        for (int image = max(position - REACH_BACK, 0) / IMAGE_PITCH; image <= end; image++) {
            share = fminf(share, packed.statistics[image].share);
            most = max(most, packed.small[image]);
        }
        return share * shares[tile % FILTER_BLOCKS] >= MIN_PRODUCTS && most <= MAX_SMALL ? most : NOT_REPRESENTABLE;
    }
};

// By a warp for each consumer warpgroup: sums the squares of its rows. The first warp starts the copies for all.
__device__ __forceinline__ void load_images(
    const PackedImages &packed, int position, Fp16x2Pipeline &pipeline, PipelineState<IMAGE_STAGES> &state,
        char *shared) {
    const int warpgroup = threadIdx.x / WARP - 1, lane = threadIdx.x % WARP;
    for (int channel_block = 0; channel_block < CHANNEL_BLOCKS; channel_block++, state.advance()) {
        float squares = 0;
        if (FP16_TERMS == 2) {
            const float *of_rows =
                packed.squares + (int64_t)channel_block * packed.count + position + SKIPPED_ROWS + warpgroup * COLUMNS;
            for (int i = lane; i < COLUMNS + REACH; i += WARP) squares += of_rows[i];
            squares = over_lanes<Sum, WARP>(squares);
        }
        if (lane > 0) continue;
        pipeline.images.wait_empty(state);
        Mbarrier &full = pipeline.images.full[state.stage];
        pipeline.squares[state.stage][warpgroup] = squares;
        if (warpgroup > 0) {
            full.arrive();
            continue;
        }
        full.arrive_expect_tx(ImageLayout::SIZE);
        #pragma unroll
        for (int i = 0; i < FP16_TERMS; i++) {
            char *to = shared + state.stage * ImageLayout::SIZE + i * ImageLayout::TERM_BYTES;
            bulk_copy<ImageLayout::TERM_BYTES>(to, packed.at(i, channel_block, position), full);
        }
    }
}

struct Fp16x2Accumulator {
    float main[SUMS], squares; // sum of the squares of the images' rows

    // The products of a tile. images: the stages of images in shared memory, from this warpgroup's columns on; weights: the
    // stages of weights; first_tile: this is the block's first tile.
    __device__ __forceinline__ void multiply(Fp16x2Pipeline &pipeline, const char *images, const char *weights, int warpgroup,
        bool first_tile, PipelineState<IMAGE_STAGES> &image, PipelineState<WEIGHT_STAGES> &weight) {
        float low[SUMS];
        squares = 0;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        if (first_tile) pipeline.wait_for_start(warpgroup);
        int last = 0; // the stage of weights that running products read
        for (int channel_block = 0, taps_done = 0; channel_block < CHANNEL_BLOCKS; channel_block++, image.advance()) {
            pipeline.images.wait_full(image);
            squares += pipeline.squares[image.stage][warpgroup];
            #pragma unroll 1
            for (int tap = 0; tap < TAPS; tap++, taps_done++, weight.advance()) {
                pipeline.wait_weights(weight);
                const char *left = weights + weight.stage * WeightLayout::SIZE;
                const int offset = tap_offset(tap / KW, tap % KW) * ROW_BYTES;
                const char *right = images + image.stage * ImageLayout::SIZE + offset;
                const uint64_t a = smem_descriptor(left, WeightLayout::COLUMN_BYTES, CORE_MATRIX_BYTES, NO_SWIZZLE);
                const uint64_t b = smem_descriptor(right, CHUNK_BYTES, 8 * ROW_BYTES, SWIZZLE_64B);
                const auto products = [&](float (&sums)[SUMS], TermPair terms, bool more) {
                    #pragma unroll
                    for (int k = 0; k < GROUPS; k += 2)
                        wgmma<FP16X2>(sums, a + WeightLayout::offset(terms.a, k, 0) / CHUNK_BYTES,
                            b + (terms.b * ImageLayout::TERM_BYTES) / CHUNK_BYTES + k, more || k > 0);
                };
                float high[SUMS];
                wgmma_fence();
                products(FP16_TERMS == 1 ? main : high, {0, 0}, FP16_TERMS == 1 && taps_done > 0);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                if (taps_done > 0) pipeline.release_weights(last);
                if (channel_block > 0 && tap == 0)
                    arrive_per_warp(pipeline.images.empty[(image.stage + 1) % IMAGE_STAGES]);
                last = weight.stage;
                if (first_tile) pipeline.start_next(warpgroup, taps_done);
                if (FP16_TERMS == 1) continue;
                products(low, {0, 1}, taps_done > 0);
                products(low, {1, 0}, true);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                wgmma_fence_operand(high);
                #pragma unroll
                for (int i = 0; i < SUMS; i++) main[i] += high[i];
            }
        }
        wgmma_wait_group<0>();
        wgmma_fence_operand(FP16_TERMS == 1 ? main : low);
        pipeline.release_weights(last);
        arrive_per_warp(pipeline.images.empty[(image.stage + 1) % IMAGE_STAGES]);
        if (FP16_TERMS == 1) return;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = fma(low[i], LOW, main[i]);
    }

    // Whether a warpgroup's sums are large enough compared with their products, and with the error of small elements.
    // filters: the sum of squares of this thread's two filters; small: the maximum number of small elements in an image.
    __device__ __forceinline__ bool accurate(
        float filters, int small, Fp16x2Pipeline &pipeline, int warpgroup, int &parity) const {
        if (FP16_TERMS == 1 && small == 0) return true;
        parity ^= 1; // double buffer: all warps have read the other one
        float sign = 0;
        if (FP16_TERMS == 2) {
            // The squares of the sums minus 1 / MAX_CANCELLATION of their expectation without cancellation. There are
            // OUTPUTS / 2 sums of each of two rows. The mean square of a filter per channel is filters / IN_CHANNELS,
            // that of a row is squares / (COLUMNS + REACH).
            sign = -filters / IN_CHANNELS * squares * (OUTPUTS / 2.0f / (COLUMNS + REACH) / MAX_CANCELLATION);
            #pragma unroll
            for (int i = 0; i < OUTPUTS; i++) sign = fma(main[i], main[i], sign);
        }
        if (any_below(main, small * SMALL_ELEMENT_LOSS)) sign = -INFINITY;
        sign = over_lanes<Sum, WARP>(sign);
        float (&signs)[WARPGROUP / WARP] = pipeline.signs[parity][warpgroup];
        if (threadIdx.x % WARP == 0) signs[threadIdx.x % WARPGROUP / WARP] = sign;
        named_barrier_sync(WARPGROUP, threadIdx.x / WARPGROUP);
        return signs[0] + signs[1] + signs[2] + signs[3] >= 0;
    }
};

// The mask of `write`.
struct Unscale {
    const Statistics *images;
    float rows[2];

    __device__ __forceinline__ bool takes(int) const { return true; }
    __device__ __forceinline__ float scale(int image) const { return images[image].inverse_scale; }
};

// Launch 3: multiplies.
KERNEL __launch_bounds__(THREADS, 1) conv_shifted_fp16x2(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Tiles tiles(batch);
    const ConvScratch scratch_layout(scratch);
    const PackedImages packed = packed_images(scratch, batch);
    char *of_images = *SHARED_IMAGES(char[ImageLayout::SIZE], shared_bytes);
    char *of_weights = *SHARED_WEIGHTS(char[WeightLayout::SIZE], shared_bytes);
    __shared__ Fp16x2Pipeline pipeline;
    if (threadIdx.x == 0) pipeline.init();
    pipeline.load_filter_shares(scratch_layout);
    __syncthreads();
    const auto small_in = [&](int tile) { return pipeline.small(packed, batch, tile, tiles.position(tile)); };
    PipelineState<IMAGE_STAGES> image;
    PipelineState<WEIGHT_STAGES> weight;
    if (threadIdx.x < PRODUCERS) {
        warpgroup_reg_dealloc<40>();
        if (threadIdx.x == 0) {
            for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x)
                if (small_in(tile) != NOT_REPRESENTABLE) {
                    prefetch_aux(epilogue, batch, tiles.filter(tile), tiles.position(tile));
                    for (int channel_block = 0; channel_block < CHANNEL_BLOCKS; channel_block++)
                        pipeline.load_weights<WeightLayout>(
                            tile, channel_block, weight, of_weights, scratch_layout.fp16_weights);
                }
        } else if (threadIdx.x >= WARP && threadIdx.x < WARP + LOADERS) {
            for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x)
                if (small_in(tile) != NOT_REPRESENTABLE)
                    load_images(packed, tiles.position(tile), pipeline, image, of_images);
        }
    } else {
        warpgroup_reg_alloc<232>();
        const int warpgroup = consumer_warpgroup();
        bool first_tile = true;
        for (int tile = blockIdx.x, parity = 0; tile < tiles.count; tile += gridDim.x) {
            const int filter = tiles.filter(tile), position = tiles.position(tile) + warpgroup * COLUMNS;
            const int small = small_in(tile);
            const bool leader = threadIdx.x % WARPGROUP == 0;
            if (leader) scratch_layout.falls_back(position, filter) = small == NOT_REPRESENTABLE;
            if (small == NOT_REPRESENTABLE) continue;
            Fp16x2Accumulator sums;
            sums.multiply(pipeline, of_images + (SKIPPED_ROWS + warpgroup * COLUMNS) * ROW_BYTES, of_weights,
                warpgroup, first_tile, image, weight);
            first_tile = false;
            const Statistics rows[2] = {scratch_layout.filters[filter + output_row(0)],
                scratch_layout.filters[filter + output_row(2)]};
            if (sums.accurate(rows[0].squares + rows[1].squares, small, pipeline, warpgroup, parity))
                write(sums.main, epilogue, batch, filter, position,
                    Unscale{packed.statistics, {rows[0].inverse_scale, rows[1].inverse_scale}});
            else if (leader)
                scratch_layout.falls_back(position, filter) = true;
        }
    }
}
