// Convolution with stride 1 on Hopper's matrix units: y = x * w, or FLIPPED the gradient by the images, which is the
// convolution of the outputs' gradients with the weights turned round. Read conv/shifted_tiles.cuh first.
//
// Operands are in pieces. FALLBACK: only the outputs that conv/shifted_fp16x2.cu has left.
//
// The largest products of pieces are exact. The matrix units, which cut bits off where they add, sum them over one
// element of the window; float32 additions go on. The others, 2^-8 of them, have sums of their own.
//
// Of 32 filters or fewer the pieces are STACKED: half of the rows are the first ones, the others the second ones of the
// same filters, or the third ones and zeros. Four products of these hold the six, and in the end rows are added.
//
// POOLING: the epilogue is handed the windows of a max pooling, see `write_pooled`.
#ifndef FALLBACK
#define FALLBACK 0
#endif
#ifndef WARPGROUP_COLUMNS
#define WARPGROUP_COLUMNS 128
#define TILES_PER_IMAGE 0
#define POOLING 0
#endif
constexpr int MMA_WARPGROUPS = 2, COLUMNS = WARPGROUP_COLUMNS, PRODUCERS = 128, LOADERS = 96;
#include "conv/shifted_tiles.cuh"

constexpr int LOW_PAIRS = STACKED ? (TERMS_USED == 3 ? 3 : TERMS_USED - 1) : LOW_ORDER_PAIRS;
constexpr int LOADS_IN_FLIGHT = 4; // words that a thread has under way
typedef CoreMatrixLayout<TILE + REACH, GROUPS> ImageLayout;
typedef Bf16x3WeightLayout WeightLayout;

// What the launch asks for, and the scratch of the weights, as the rule computes them.
static_assert(SHARED_BYTES >= 128 + IMAGE_STAGES * ImageLayout::SIZE + WEIGHT_STAGES * WeightLayout::SIZE +
                  (LOADS_IN_FLIGHT * CHUNK_ELEMENTS * LOADERS + MMA_WARPGROUPS * COMBINE_ELEMENTS) * (int)sizeof(T), "dynamic shared memory");
#ifdef WEIGHT_BYTES
static_assert(WEIGHT_BYTES >= (int64_t)FILTER_BLOCKS * CHANNEL_BLOCKS * TAPS * WeightLayout::SIZE, "scratch");
#endif

// The products beside the largest ones.
__device__ constexpr TermPair low_pair(int i) {
    constexpr TermPair pairs[] = {{0, 2}, {1, 0}, {0, 1}};
    return STACKED ? pairs[3 - LOW_PAIRS + i] : low_order_pair(i);
}

// Weights to scratch, where conv/pack_images.cu has not put them.
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

__device__ __forceinline__ void load_tile(const InputImages &images, int position, ConvPipeline &stages,
    PipelineState<IMAGE_STAGES> &turn, char *shared, T *staging) {
    for (int chunk = 0; chunk < CHANNEL_BLOCKS; chunk++, turn.advance()) {
        images.gather<ImageLayout, LOADERS, LOADS_IN_FLIGHT>(StoreSplit<ImageLayout>{shared + turn.stage * ImageLayout::SIZE}, staging,
            threadIdx.x - WARP, position - REACH_BACK, chunk * STAGE_CHANNELS, stages.images_read[turn.stage], turn.phase ^ 1);
        fence_proxy_async();
        arrive_per_warp(stages.images[turn.stage]);
    }
}

struct Bf16x3Accumulator {
    float main[SUMS], beside[SUMS];

    // As in conv/shifted_fp16x2.cu.
    __device__ __forceinline__ void multiply(ConvPipeline &stages, const char *images, const char *weights, int warpgroup,
        bool first_tile, PipelineState<IMAGE_STAGES> &image, PipelineState<WEIGHT_STAGES> &weight) {
        if (first_tile) stages.wait_for_start(warpgroup);
        float high[SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        int last_image = 0, last_weight = 0;
        for (int chunk = 0; chunk < CHANNEL_BLOCKS; chunk++, image.advance()) {
            stages.images[image.stage].wait(image.phase);
            for (int tap = 0; tap < TAPS; tap++, weight.advance()) {
                stages.weights[weight.stage].wait(weight.phase);
                const char *left = weights + weight.stage * WeightLayout::SIZE;
                const char *right = images + image.stage * ImageLayout::SIZE + tap_offset(tap / KW, tap % KW) * CHUNK_BYTES;
                const uint64_t a = smem_descriptor(left, WeightLayout::GROUP_BYTES, CORE_MATRIX_BYTES, NO_SWIZZLE);
                const uint64_t b = smem_descriptor(right, ImageLayout::GROUP_BYTES, CORE_MATRIX_BYTES, NO_SWIZZLE);
                const auto products = [&](float (&sums)[SUMS], TermPair pieces, bool add) {
                    #pragma unroll
                    for (int k = 0; k < GROUPS; k += 2)
                        wgmma<BFLOAT16, false, false>(sums, a + WeightLayout::offset(pieces.a, k, 0) / CHUNK_BYTES,
                            b + ImageLayout::offset(pieces.b, k, 0) / CHUNK_BYTES, add || k > 0);
                };
                wgmma_fence();
                products(high, {0, 0}, false);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                if (chunk + tap > 0) arrive_per_warp(stages.weights_read[last_weight]);
                if (chunk > 0 && tap == 0) arrive_per_warp(stages.images_read[last_image]);
                if (first_tile) stages.start_next(warpgroup, chunk * TAPS + tap);
                #pragma unroll
                for (int i = 0; i < LOW_PAIRS; i++) products(beside, low_pair(i), chunk + tap + i > 0);
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
        wgmma_fence_operand(beside);
        arrive_per_warp(stages.weights_read[last_weight]);
        arrive_per_warp(stages.images_read[last_image]);
        if (LOW_PAIRS == 0) return;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] += beside[i];
    }
};

// An output by recompute multiply-adds.
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

// Pieces make NaN of infinities: what is not finite is computed again.
__device__ __forceinline__ void recompute_nonfinite(
    float (&sums)[OUTPUTS], const T *x, const T *w, int batch, int filter, int position) {
    float zero = 0;
    #pragma unroll
    for (int i = 0; i < OUTPUTS; i++) zero = fma(sums[i], 0.0f, zero);
    if (zero == 0) return;
    #pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {
        const int row = filter + output_row(i), at = position + output_column(i);
        if (!finite(sums[i]) && row < OUT_CHANNELS && OutputPosition(at).inside(batch)) sums[i] = recompute(x, w, row, at);
    }
}

// What of the tiles of a block is computed here.
struct FallbackTiles {
    const Tiles &tiles;
    const ConvScratch &made;
    int positions; // of all images

    __device__ __forceinline__ bool takes(int tile) const {
        if (!FALLBACK) return true;
        const int filter = tiles.filter(tile), first = tiles.position(tile), end = min(first + TILE, positions);
        bool found = false;
        for (int position = first / FALLBACK_POSITIONS * FALLBACK_POSITIONS; position < end; position += FALLBACK_POSITIONS)
            found |= made.falls_back(position, filter);
        return found;
    }
    // From one on.
    __device__ __forceinline__ int next(int tile) const {
        while (tile < tiles.count && !takes(tile)) tile += gridDim.x;
        return tile;
    }
    __device__ __forceinline__ int first() const { return next(blockIdx.x); }
    __device__ __forceinline__ int after(int tile) const { return next(tile + gridDim.x); }

    // Whether there are any, asked by all threads.
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

// See `write`.
struct FallbackMask {
    const ConvScratch &made;
    int filter;
    float rows[2] = {1, 1};

    __device__ __forceinline__ bool takes(int position) const { return !FALLBACK || made.falls_back(position, filter); }
    __device__ __forceinline__ float scale(int) const { return 1; }
};

KERNEL __launch_bounds__(THREADS, 1) conv_shifted_bf16x3(const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const InputImages images = {x, (int)batch};
    const Tiles tiles(batch);
    const ConvScratch made(scratch);
    const FallbackTiles taken = {tiles, made, (int)batch * IMAGE_PITCH};
    if (FALLBACK && !taken.any()) return;
    char *of_images = aligned_shared<128>();
    char *of_weights = of_images + IMAGE_STAGES * ImageLayout::SIZE;
    T *staging = (T *)(of_weights + WEIGHT_STAGES * WeightLayout::SIZE);
    T *buffer = staging + LOADS_IN_FLIGHT * CHUNK_ELEMENTS * LOADERS;
    __shared__ ConvPipeline stages;
    if (threadIdx.x == 0) stages.init();
    __syncthreads();
    PipelineState<IMAGE_STAGES> image;
    PipelineState<WEIGHT_STAGES> weight;
    if (threadIdx.x < PRODUCERS) {
        warpgroup_reg_dealloc<56>();
        if (threadIdx.x == 0) {
            for (int tile = taken.first(); tile < tiles.count; tile = taken.after(tile)) {
                if (!POOLING && !FALLBACK) prefetch_aux(epilogue, batch, tiles.filter(tile), tiles.position(tile));
                stages.load_weights<WeightLayout>(tile, weight, of_weights, made.bf16_weights);
            }
        } else if (threadIdx.x >= WARP) {
            for (int tile = taken.first(); tile < tiles.count; tile = taken.after(tile))
                load_tile(images, tiles.position(tile), stages, image, of_images, staging);
        }
    } else {
        warpgroup_reg_alloc<224>();
        const int warpgroup = consumer_warpgroup();
        for (int tile = taken.first(); tile < tiles.count; tile = taken.after(tile)) {
            const int filter = tiles.filter(tile), position = tiles.position(tile) + warpgroup * COLUMNS;
            Bf16x3Accumulator sums;
            const bool first_tile = !FALLBACK && tile == blockIdx.x;
            sums.multiply(stages, of_images + warpgroup * COLUMNS * CHUNK_BYTES, of_weights, warpgroup, first_tile, image, weight);
            float own[OUTPUTS];
            combine_stacked(sums.main, own, buffer + warpgroup * COMBINE_ELEMENTS);
            recompute_nonfinite(own, x, w, batch, filter, position);
            if (POOLING)
                write_pooled(own, epilogue, filter, position);
            else
                write(own, epilogue, batch, filter, position, FallbackMask{made, filter});
        }
    }
}
