// Stride-1 convolution y = x * w by shifted implicit GEMM in bf16x3. FLIPPED: the input gradient, which is the
// convolution of the output gradient with flipped weights. Read conv/shifted_tiles.cuh first.
//
// FALLBACK: computes only the outputs that conv/shifted_fp16x2.cu has marked. POOLING: the epilogue is 2 x 2 max pooling.
//
// WGMMA truncates when it adds. So it sums the products of first terms, which are exact, over one tap only; float32 additions
// sum the results. The low-order products, 2^-8 of the others, have accumulators of their own.
//
// STACKED, for at most 32 filters: half of the rows are first terms, the other half second terms of the same filters; then
// third terms and zeros. Four products compute all six, and the two halves of the rows are added at the end.
#ifndef FALLBACK
#define FALLBACK 0
#endif
constexpr int MMA_WARPGROUPS = 2, COLUMNS = WARPGROUP_COLUMNS, PRODUCERS = 128, LOADERS = 96;
#include "conv/shifted_tiles.cuh"

constexpr int LOW_PAIRS = STACKED ? (TERMS_USED == 3 ? 3 : TERMS_USED - 1) : LOW_ORDER_PAIRS;
constexpr int LOADS_IN_FLIGHT = 4; // chunks that a thread is loading
typedef CoreMatrixLayout<TILE + REACH, GROUPS> ImageLayout;
typedef Bf16x3WeightLayout WeightLayout;

// The byte counts of shifted.py are large enough.
static_assert(SHARED_BYTES >= 128 + IMAGE_STAGES * ImageLayout::SIZE + WEIGHT_STAGES * WeightLayout::SIZE +
                  (LOADS_IN_FLIGHT * CHUNK_ELEMENTS * LOADERS + MMA_WARPGROUPS * COMBINE_ELEMENTS) * (int)sizeof(T),
                      "dynamic shared memory");
#ifdef WEIGHT_BYTES
static_assert(WEIGHT_BYTES >= (int64_t)FILTER_BLOCKS * CHANNEL_BLOCKS * TAPS * WeightLayout::SIZE, "scratch");
#endif

// The terms of low-order product i.
__device__ constexpr TermPair low_pair(int i) {
    constexpr TermPair pairs[] = {{0, 2}, {1, 0}, {0, 1}};
    return STACKED ? pairs[3 - LOW_PAIRS + i] : low_order_pair(i);
}

// Splits the weights into bf16x3, to scratch. For FALLBACK conv/pack_images.cu splits them.
KERNEL split_weights(const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const WeightReader weights = {w};
    for (int i = grid_index(); i < FILTER_BLOCKS * FILTERS * WEIGHT_CHUNKS; i += grid_size()) {
        const int filter = i % FILTERS + i / (FILTERS * WEIGHT_CHUNKS) * FILTERS;
        const WeightChunk at(filter, i / FILTERS % WEIGHT_CHUNKS);
        float found[CHUNK_ELEMENTS];
        weights.read(found, filter, at.channel(), at.tap);
        store_split(scratch, at, found);
    }
}

__device__ __forceinline__ void load_tile(const InputImages &images, int position, ConvPipeline &pipeline,
    PipelineState<IMAGE_STAGES> &state, char *shared, T *staging) {
    for (int channel_block = 0; channel_block < CHANNEL_BLOCKS; channel_block++, state.advance()) {
        images.load<ImageLayout, LOADERS, LOADS_IN_FLIGHT>(
            StoreSplit<ImageLayout>{shared + state.stage * ImageLayout::SIZE}, staging,
            threadIdx.x - WARP, position - REACH_BACK, channel_block * STAGE_CHANNELS,
            pipeline.images.empty[state.stage], state.phase ^ 1);
        fence_proxy_async();
        arrive_per_warp(pipeline.images.full[state.stage]);
    }
}

struct Bf16x3Accumulator {
    float main[SUMS], low[SUMS];

    // See Fp16x2Accumulator::multiply.
    __device__ __forceinline__ void multiply(ConvPipeline &pipeline, const char *images, const char *weights, int warpgroup,
        bool first_tile, PipelineState<IMAGE_STAGES> &image, PipelineState<WEIGHT_STAGES> &weight) {
        if (first_tile) pipeline.wait_for_start(warpgroup);
        float high[SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        int last_image = 0, last_weight = 0;
        for (int channel_block = 0; channel_block < CHANNEL_BLOCKS; channel_block++, image.advance()) {
            pipeline.images.wait_full(image);
            for (int tap = 0; tap < TAPS; tap++, weight.advance()) {
                pipeline.weights.wait_full(weight);
                const char *left = weights + weight.stage * WeightLayout::SIZE;
                const int offset = tap_offset(tap / KW, tap % KW) * CHUNK_BYTES;
                const char *right = images + image.stage * ImageLayout::SIZE + offset;
                const uint64_t a = smem_descriptor(left, WeightLayout::GROUP_BYTES, CORE_MATRIX_BYTES, NO_SWIZZLE);
                const uint64_t b = smem_descriptor(right, ImageLayout::GROUP_BYTES, CORE_MATRIX_BYTES, NO_SWIZZLE);
                const auto products = [&](float (&sums)[SUMS], TermPair terms, bool add) {
                    #pragma unroll
                    for (int k = 0; k < GROUPS; k += 2)
                        wgmma<BFLOAT16, false, false>(sums, a + WeightLayout::offset(terms.a, k, 0) / CHUNK_BYTES,
                            b + ImageLayout::offset(terms.b, k, 0) / CHUNK_BYTES, add || k > 0);
                };
                wgmma_fence();
                products(high, {0, 0}, false);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                if (channel_block + tap > 0) arrive_per_warp(pipeline.weights.empty[last_weight]);
                if (channel_block > 0 && tap == 0) arrive_per_warp(pipeline.images.empty[last_image]);
                if (first_tile) pipeline.start_next(warpgroup, channel_block * TAPS + tap);
                #pragma unroll
                for (int i = 0; i < LOW_PAIRS; i++) products(low, low_pair(i), channel_block + tap + i > 0);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                wgmma_fence_operand(high);
                #pragma unroll
                for (int i = 0; i < SUMS; i++) main[i] += high[i];
                last_weight = weight.stage;
            }
            last_image = image.stage;
        }
        wgmma_wait_group<0>();
        wgmma_fence_operand(low);
        arrive_per_warp(pipeline.weights.empty[last_weight]);
        arrive_per_warp(pipeline.images.empty[last_image]);
        if (LOW_PAIRS == 0) return;
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
        for (int tap = 0; tap < TAPS; tap++) {
            const int down = at.y + tap / KW * DH - PH, right = at.x + tap % KW * DW - PW;
            const bool inside = (unsigned)down < IN_ROWS && (unsigned)right < IN_COLUMNS;
            const int from = (at.image * IN_CHANNELS + channel) * InputImages::AREA + down * IN_COLUMNS + right;
            sum = fma(inside ? rounded(x[from]) : 0, rounded(weights.at(filter, channel, tap)), sum);
        }
    }
    return sum;
}

// Recomputes outputs that are not finite, because bf16x3 turns infinities into NaN.
__device__ __forceinline__ void recompute_non_finite(
    float (&sums)[OUTPUTS], const T *x, const T *w, int batch, int filter, int position) {
    float zero = 0;
    #pragma unroll
    for (int i = 0; i < OUTPUTS; i++) zero = fma(sums[i], 0.0f, zero);
    if (zero == 0) return;
    #pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {
        const int row = filter + output_row(i), at = position + output_column(i);
        if (!finite(sums[i]) && row < OUT_CHANNELS && OutputPosition(at).inside(batch))
            sums[i] = recompute(x, w, row, at);
    }
}

// The tiles that a block computes. FALLBACK: only tiles with marked positions.
struct FallbackTiles {
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
    const FallbackTiles taken = {tiles, scratch_layout, (int)batch * IMAGE_PITCH};
    if (FALLBACK && !taken.any()) return;
    char *of_images = aligned_shared<128>();
    char *of_weights = of_images + IMAGE_STAGES * ImageLayout::SIZE;
    T *staging = (T *)(of_weights + WEIGHT_STAGES * WeightLayout::SIZE);
    T *buffer = staging + LOADS_IN_FLIGHT * CHUNK_ELEMENTS * LOADERS;
    __shared__ ConvPipeline pipeline;
    if (threadIdx.x == 0) pipeline.init();
    __syncthreads();
    PipelineState<IMAGE_STAGES> image;
    PipelineState<WEIGHT_STAGES> weight;
    if (threadIdx.x < PRODUCERS) {
        warpgroup_reg_dealloc<56>();
        if (threadIdx.x == 0) {
            for (int tile = taken.first(); tile < tiles.count; tile = taken.after(tile)) {
                if (!POOLING && !FALLBACK) prefetch_aux(epilogue, batch, tiles.filter(tile), tiles.position(tile));
                pipeline.load_weights<WeightLayout>(tile, weight, of_weights, scratch_layout.bf16_weights);
            }
        } else if (threadIdx.x >= WARP) {
            for (int tile = taken.first(); tile < tiles.count; tile = taken.after(tile))
                load_tile(images, tiles.position(tile), pipeline, image, of_images, staging);
        }
    } else {
        warpgroup_reg_alloc<224>();
        const int warpgroup = consumer_warpgroup();
        for (int tile = taken.first(); tile < tiles.count; tile = taken.after(tile)) {
            const int filter = tiles.filter(tile), position = tiles.position(tile) + warpgroup * COLUMNS;
            Bf16x3Accumulator sums;
            const bool first_tile = !FALLBACK && tile == blockIdx.x;
            sums.multiply(pipeline, of_images + warpgroup * COLUMNS * CHUNK_BYTES, of_weights, warpgroup, first_tile,
                image, weight);
            float own[OUTPUTS];
            combine_stacked(sums.main, own, buffer + warpgroup * COMBINE_ELEMENTS);
            recompute_non_finite(own, x, w, batch, filter, position);
            if (POOLING)
                write_pooled(own, epilogue, filter, position);
            else
                write(own, epilogue, batch, filter, position, FallbackMask{scratch_layout, filter});
        }
    }
}
