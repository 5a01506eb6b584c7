// Stride-1 convolution y = x * w by shifted implicit GEMM in bf16x3. FLIPPED: the input gradient, which is the
// convolution of the output gradient with flipped weights. Read conv/shifted_tiles.cuh first.
//
// FALLBACK: computes only the outputs that conv/shifted_fp16x2.cu has marked. POOLING: the epilogue is 2 x 2 max pooling.
//
// Rounded operands (MANTISSA) have one term, in tf32 or bfloat16, and WGMMA sums all their products.
//
// WGMMA truncates when it adds. So in bf16x3 it sums the products of first terms, which are exact, over one tap only; float32
// additions sum the results. The low-order products, 2^-8 of the others, have accumulators of their own.
//
// STACKED, for at most 32 filters: half of the rows are first terms, the other half second terms of the same filters; then
// third terms and zeros. Four products compute all six, and the two halves of the rows are added at the end.
#ifndef FALLBACK
#define FALLBACK 0
#endif
constexpr int MMA_WARPGROUPS = CONSUMER_WARPGROUPS, COLUMNS = WARPGROUP_COLUMNS, PRODUCERS = PRODUCER_THREADS,
    LOADERS = PRODUCERS - 32;
#include "conv/shifted_tiles.cuh"

constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = MMA_WARPGROUPS == 2 ? 216 : 112;
static_assert(registers_suffice(PRODUCERS, PRODUCER_REGISTERS, CONSUMERS, CONSUMER_REGISTERS), "warpgroup_reg_alloc");
constexpr int LOW_PAIRS = STACKED ? 3 : KMajorOperand::TERMS == 3 ? LOW_ORDER_PAIRS : 0;
typedef KMajorLayout<TILE + REACH, GROUPS> ImageLayout;
typedef KMajorWeightLayout WeightLayout;
typedef ConvPipeline<PRODUCERS, FILTER_BLOCKS == 1 && WEIGHT_STAGES == CHANNEL_BLOCKS * TAPS> Pipelines;

// The terms of low-order product i.
__device__ constexpr TermPair low_pair(int i) {
    constexpr TermPair pairs[] = {{0, 2}, {1, 0}, {0, 1}};
    return STACKED ? pairs[i] : low_order_pair(i);
}

// Packs the weights as operands, in scratch. For FALLBACK conv/shifted_fp16x2.cu packs them.
KERNEL pack_weights(const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const WeightReader weights = {w};
    for (int i = grid_index(); i < FILTER_BLOCKS * FILTERS * WEIGHT_CHUNKS; i += grid_size()) {
        const int filter = i % FILTERS + i / (FILTERS * WEIGHT_CHUNKS) * FILTERS;
        const WeightChunk at(filter, i / FILTERS % WEIGHT_CHUNKS);
        float found[CHUNK_ELEMENTS];
        weights.read(found, filter, at.channel(), at.tap);
        store_weights(scratch, at, found);
    }
}

// The tiles that a block computes. FALLBACK: only tiles with marked positions.
struct BlockTiles {
    const Tiles &tiles;
    const ConvScratch &scratch_layout;
    int positions; // of all images

    __device__ __forceinline__ bool takes(int tile) const {
        if (!FALLBACK) return true;
        const int filter = tiles.filter(tile), first = tiles.position(tile), end = min(first + TILE, positions);
        bool found = false;
        const int begin = first / FALLBACK_POSITIONS * FALLBACK_POSITIONS;
        for (int position = begin; position < end; position += FALLBACK_POSITIONS)
            found |= scratch_layout.falls_back(position, filter);
        return found;
    }
    // The first of them from `tile` on.
    __device__ __forceinline__ int next(int tile) const {
        while (tile < tiles.count && !takes(tile)) tile += gridDim.x;
        return tile;
    }
    __device__ __forceinline__ int first() const { return next(blockIdx.x); }
    __device__ __forceinline__ int after(int tile) const { return next(tile + gridDim.x); }

    // Whether there are any. By all threads.
    __device__ __forceinline__ bool any() const {
        __shared__ bool found;
        found = false;
        __syncthreads();
        for (int tile = blockIdx.x + threadIdx.x * gridDim.x; tile < tiles.count; tile += blockDim.x * gridDim.x)
            if (takes(tile)) found = true;
        __syncthreads();
        return found;
    }
};

// By the first warp: copies the weights of all tiles that a block computes, and prefetches their auxiliary inputs. It takes part in
// the pipeline of the images, so that it is not far ahead of them.
__device__ __forceinline__ void load_weights(const BlockTiles &taken, const Tiles &tiles, const Epilogue &epilogue, int batch,
    Pipelines &pipeline, char *shared, const char *all) {
    PipelineState<IMAGE_STAGES> image;
    PipelineState<WEIGHT_STAGES> weight;
    for (int tile = taken.first(); tile < tiles.count; tile = taken.after(tile)) {
        for (int channel_block = 0; channel_block < CHANNEL_BLOCKS; channel_block++, image.advance()) {
            pipeline.images.wait_empty(image);
            arrive_per_warp(pipeline.images.full[image.stage]);
            if (threadIdx.x > 0) continue;
            if (!POOLING && !FALLBACK && channel_block == 0)
                prefetch_aux(epilogue, batch, tiles.filter(tile), tiles.position(tile));
            pipeline.load_weights<WeightLayout>(tile, channel_block, weight, shared, all);
        }
    }
}

// By the other producers: loads the images of these tiles.
__device__ __forceinline__ void load_images(
    const InputImages &images, const BlockTiles &taken, const Tiles &tiles, Pipelines &pipeline, char *shared) {
    ImageLoader<ImageLayout, LOADERS, REACH_BACK> loader = {images, (int)threadIdx.x - WARP};
    const auto start = [&](int tile, int channel_block) {
        if (tile < tiles.count) loader.start(tiles.position(tile) - REACH_BACK, channel_block * STAGE_CHANNELS);
    };
    PipelineState<IMAGE_STAGES> state;
    int tile = taken.first(), channel_block = 0;
    start(tile, channel_block);
    #pragma unroll 1
    for (; tile < tiles.count; state.advance()) {
        pipeline.images.wait_empty(state);
        loader.finish(StoreOperand<ImageLayout, KMajorOperand>{shared + state.stage * ImageLayout::SIZE});
        fence_proxy_async();
        arrive_per_warp(pipeline.images.full[state.stage]);
        if (++channel_block == CHANNEL_BLOCKS) tile = taken.after(tile), channel_block = 0;
        start(tile, channel_block);
    }
}

struct Accumulator {
    static constexpr bool ONE_TERM = LOW_PAIRS == 0; // WGMMA sums all products
    float main[SUMS], low[SUMS];

    // See Fp16x2Accumulator::multiply.
    __device__ __forceinline__ void multiply(Pipelines &pipeline, const char *images, const char *weights, int warpgroup,
        bool first_tile, PipelineState<IMAGE_STAGES> &image, PipelineState<WEIGHT_STAGES> &weight) {
        if (first_tile) pipeline.wait_for_start(warpgroup);
        float high[SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        int last_image = 0, last_weight = 0;
        for (int channel_block = 0; channel_block < CHANNEL_BLOCKS; channel_block++, image.advance()) {
            pipeline.images.wait_full(image);
            for (int tap = 0; tap < TAPS; tap++, weight.advance()) {
                pipeline.wait_weights(weight);
                const char *left = weights + weight.stage * WeightLayout::SIZE;
                const int offset = tap_offset(tap / KW, tap % KW) * CHUNK_BYTES;
                const char *right = images + image.stage * ImageLayout::SIZE + offset;
                const uint64_t a = smem_descriptor(left, WeightLayout::COLUMN_BYTES, CORE_MATRIX_BYTES, NO_SWIZZLE);
                const uint64_t b = smem_descriptor(right, ImageLayout::COLUMN_BYTES, CORE_MATRIX_BYTES, NO_SWIZZLE);
                const auto products = [&](float (&sums)[SUMS], TermPair terms, bool add) {
                    #pragma unroll
                    for (int k = 0; k < ImageLayout::COLUMNS; k += 2)
                        wgmma<KMajorOperand::KIND>(sums, a + WeightLayout::offset(terms.a, k, 0) / CHUNK_BYTES,
                            b + ImageLayout::offset(terms.b, k, 0) / CHUNK_BYTES, add || k > 0);
                };
                wgmma_fence();
                products(ONE_TERM ? main : high, {0, 0}, ONE_TERM && channel_block + tap > 0);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                if (channel_block + tap > 0) pipeline.release_weights(last_weight);
                if (channel_block > 0 && tap == 0) arrive_per_warp(pipeline.images.empty[last_image]);
                if (first_tile) pipeline.start_next(warpgroup, channel_block * TAPS + tap);
                last_weight = weight.stage;
                if (ONE_TERM) continue;
                #pragma unroll
                for (int i = 0; i < LOW_PAIRS; i++) products(low, low_pair(i), channel_block + tap + i > 0);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                wgmma_fence_operand(high);
                #pragma unroll
                for (int i = 0; i < SUMS; i++) main[i] += high[i];
            }
            last_image = image.stage;
        }
        wgmma_wait_group<0>();
        wgmma_fence_operand(ONE_TERM ? main : low);
        pipeline.release_weights(last_weight);
        arrive_per_warp(pipeline.images.empty[last_image]);
        if (ONE_TERM) return;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] += low[i];
    }
};

// An output by sequential float32 FMA.
__device__ __noinline__ T recompute(const T *x, const T *w, int filter, int position) {
    const OutputPosition at(position);
    const WeightReader weights = {w};
    T sum = 0;
    for (int channel = 0; channel < IN_CHANNELS; channel++) {
        #pragma unroll 1
        for (int tap = 0; tap < TAPS; tap++) {
            const int down = at.y + tap / KW * DH - PH, right = at.x + tap % KW * DW - PW;
            const bool inside = (unsigned)down < IN_ROWS && (unsigned)right < IN_COLUMNS;
            const int from = (at.image * IN_CHANNELS + channel) * InputImages::AREA + down * IN_COLUMNS + right;
            sum = fma(inside ? rounded(x[from]) : 0, rounded(weights.at(filter, channel, tap)), sum);
        }
    }
    return sum;
}

// The mask of `write`.
struct FallbackMask {
    const ConvScratch &scratch_layout;
    int filter;
    float rows[2] = {1, 1};

    __device__ __forceinline__ bool takes(int position) const {
        return !FALLBACK || scratch_layout.falls_back(position, filter);
    }
    __device__ __forceinline__ float scale(int) const { return 1; }
};

KERNEL __launch_bounds__(THREADS, 1) conv_shifted_bf16x3(const T *x, const T *w, const Epilogue epilogue,
    int64_t batch, char *scratch) {
    wait_for_inputs();
    const InputImages images = {x, (int)batch};
    const Tiles tiles(batch);
    const ConvScratch scratch_layout(scratch);
    const BlockTiles taken = {tiles, scratch_layout, (int)batch * IMAGE_PITCH};
    if (FALLBACK && !taken.any()) return;
    char *of_images = *SHARED_IMAGES(char[ImageLayout::SIZE], shared_bytes);
    char *of_weights = *SHARED_WEIGHTS(char[WeightLayout::SIZE], shared_bytes);
    T *buffer = SHARED_COMBINED(T, shared_bytes);
    __shared__ Pipelines pipeline;
    if (threadIdx.x == 0) pipeline.init();
    __syncthreads();
    PipelineState<IMAGE_STAGES> image;
    PipelineState<WEIGHT_STAGES> weight;
    if (threadIdx.x < PRODUCERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x < WARP)
            load_weights(taken, tiles, epilogue, batch, pipeline, of_weights, scratch_layout.k_major_weights);
        else
            load_images(images, taken, tiles, pipeline, of_images);
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const int warpgroup = consumer_warpgroup();
        for (int tile = taken.first(); tile < tiles.count; tile = taken.after(tile)) {
            const int filter = tiles.filter(tile), position = tiles.position(tile) + warpgroup * COLUMNS;
            Accumulator sums;
            const bool first_tile = !FALLBACK && tile == blockIdx.x;
            sums.multiply(pipeline, of_images + warpgroup * COLUMNS * CHUNK_BYTES, of_weights, warpgroup, first_tile,
                image, weight);
            float own[OUTPUTS];
            combine_stacked(sums.main, own, buffer + warpgroup * COMBINE_ELEMENTS);
            recompute_non_finite(own, [&](int i) {
                const int row = filter + output_row(i), at = position + output_column(i);
                return row < OUT_CHANNELS && OutputPosition(at).inside(batch) ? recompute(x, w, row, at) : own[i];
            });
            if (POOLING)
                write_pooled(own, epilogue, filter, position);
            else
                write(own, epilogue, batch, filter, position, FallbackMask{scratch_layout, filter});
        }
    }
}
