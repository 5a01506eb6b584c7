// Weight gradient of a stride-1 convolution with 3 x 3 windows that is followed by 2 x 2 max pooling. Read
// conv/sparse_pool.cuh and conv/shifted_weight_grad.cuh first.
//
// The gradient is the sparse operand along K, the positions: two neighbouring pairs are four positions. Each producer
// warp loads images while it stores gradients, and vice versa. Accumulators are as in conv/shifted_weight_grad_bf16x3.cu, but
// over all positions of a stage, of which at most half are not zero.
//
// BIAS: also the bias gradient, as the product of the gradient and ones; each warpgroup multiplies one term. So the bias
// gradient sums rounded numbers (MANTISSA) too.
#include "conv/shifted_weight_grad.cuh"
#include "conv/sparse_pool.cuh"

constexpr int STEP = 32; // positions of one instruction
constexpr int IDLE_LOADERS = PRODUCERS - (ImageLayout::ROWS + WARP - 1) / WARP * WARP; // the last threads load no images
typedef CoreMatrixLayout<STAGE_POSITIONS / 2, FILTERS / CHUNK_ELEMENTS, BF16X3_TERMS> GradientLayout;
typedef PooledGradients<OUT_CHANNELS, OUT_ROWS, OUT_COLUMNS> Gradients;

// The selectors follow the gradient's terms: a byte for each group of channels and each pair, a bit for each channel.
constexpr int SELECTORS = ImageLayout::SIZE + GradientLayout::SIZE;
constexpr int STAGE = (SELECTORS + GradientLayout::GROUPS * GradientLayout::ROWS + 1023) / 1024 * 1024;
typedef Chunk Ones[STEP]; // of eight columns

// Stores what PooledGradientLoader loads in a stage.
struct StoreSparse {
    char *stage;

    __device__ __forceinline__ void operator()(
        int group, int pair, const Chunk (&terms)[TERMS_USED], uint32_t selectors) const {
        #pragma unroll
        for (int p = 0; p < TERMS_USED; p++)
            *(Chunk *)(stage + ImageLayout::SIZE + GradientLayout::chunk(p, group, pair)) = terms[p];
        stage[SELECTORS + group * GradientLayout::ROWS + pair] = selectors;
    }
};

// A channel's selector bits of eight pairs as sparse metadata: two bits each, of every second pair 2 or 3.
__device__ __forceinline__ uint32_t metadata_of(uint64_t bytes, int bit) {
    // moves the lowest bits of bytes to every second bit of the last byte
    constexpr uint32_t CLOSE = 1 << 24 | 1 << 18 | 1 << 12 | 1 << 6;
    const uint32_t first = (uint32_t)(bytes >> bit) & 0x01010101, second = (uint32_t)(bytes >> 32 >> bit) & 0x01010101;
    return (first * CLOSE >> 24 & 0x55) | (second * CLOSE >> 16 & 0x5500) | 0x8888;
}

// Of a warpgroup: the sums of a row of the window, and the bias gradient of one term for two rows of filters.
struct WeightAndBiasSums {
    float main[SUMS], bias[2];
};

// Adds those over a stage. row: of the window, and the term of the bias gradient.
__device__ __forceinline__ void multiply(WeightAndBiasSums &all, int row, const char *shared, int own_stage) {
    const char *stage = shared + own_stage * STAGE;
    const uint64_t a = smem_descriptor(stage + ImageLayout::SIZE, CORE_MATRIX_BYTES, GradientLayout::COLUMN_BYTES,
        NO_SWIZZLE);
    const uint64_t b = smem_descriptor(
        stage + tap_offset(row, 0) * ImageLayout::ROW_BYTES, DW * ImageLayout::ROW_BYTES, 8 * ImageLayout::ROW_BYTES,
            SWIZZLE_64B);
    uint32_t metadata[STAGE_POSITIONS / STEP]; // sparse metadata of this thread's two filters
    #pragma unroll
    for (int k = 0; k < STAGE_POSITIONS / STEP; k++) {
        const char *bits = stage + SELECTORS + (k * STEP / 2 + threadIdx.x % 2 * CHUNK_ELEMENTS);
        const auto of_row = [&](int row) {
            return metadata_of(*(const uint64_t *)(bits + row / CHUNK_ELEMENTS * GradientLayout::ROWS),
                row % CHUNK_ELEMENTS);
        };
        metadata[k] = of_row(accumulator_row(0)) | of_row(accumulator_row(2)) << 16;
    }
    float sums[SUMS], bias[4];
    const auto products = [&](TermPair terms, bool add) {
        #pragma unroll
        for (int k = 0; k < STAGE_POSITIONS / STEP; k++)
            wgmma_sparse<BFLOAT16, true, true>(sums, a + (terms.a * GradientLayout::TERM_BYTES + k * STEP / 2 * CHUNK_BYTES) / CHUNK_BYTES,
                b + (terms.b * ImageLayout::TERM_BYTES + k * STEP * ImageLayout::ROW_BYTES) / CHUNK_BYTES, metadata[k],
                    add || k > 0);
    };
    add_products(all.main, sums, products, [&] {
#if BIAS
        const uint64_t b_of_ones =
            smem_descriptor((const char *)SHARED_ONES(Ones, shared_bytes), CORE_MATRIX_BYTES, CORE_MATRIX_BYTES, NO_SWIZZLE);
        // With fewer terms than warpgroups, some warpgroups multiply the last term again; their sums are dropped below.
        const int term = TERMS_USED == BF16X3_TERMS ? row : min(row, TERMS_USED - 1);
        #pragma unroll
        for (int k = 0; k < STAGE_POSITIONS / STEP; k++)
            wgmma_sparse<BFLOAT16, true, true>(
                bias, a + (term * GradientLayout::TERM_BYTES + k * STEP / 2 * CHUNK_BYTES) / CHUNK_BYTES, b_of_ones,
                    metadata[k], k > 0);
#endif
    });
#if BIAS
    wgmma_fence_operand(bias);
    #pragma unroll
    for (int i = 0; i < 2; i++) // the other columns are the same
        all.bias[i] += TERMS_USED == BF16X3_TERMS || row < TERMS_USED ? bias[2 * i] : 0;
#endif
}

// An element by sequential float32 FMA.
__device__ __noinline__ T recompute(
    const PositionSplit &split, const InputImages &images, const Gradients &gradients, int filter, int channel,
        int tap) {
    T sum = 0;
    for (int i = split.begin * STAGE_POSITIONS; i < split.end * STAGE_POSITIONS; i++) {
        const int position = split.position(i / STAGE_POSITIONS) + i % STAGE_POSITIONS;
        const OutputPosition at(position);
        const int from_g = gradients.at(at.image, filter, at.y, at.x);
        const int from_x = images.at(position - REACH_BACK + tap_offset(tap / KW, tap % KW));
        const T x = from_x < 0 ? 0 : rounded(images.x[from_x + channel * InputImages::AREA]);
        if (from_g >= 0) sum = fma(rounded(gradients.g[from_g]), x, sum);
    }
    return sum;
}

// The bias gradient by sequential additions.
__device__ __noinline__ T recompute(const PositionSplit &split, const Gradients &gradients, int filter) {
    T sum = 0;
    for (int i = split.begin * STAGE_POSITIONS; i < split.end * STAGE_POSITIONS; i++) {
        const OutputPosition at(split.position(i / STAGE_POSITIONS) + i % STAGE_POSITIONS);
        const int from = gradients.at(at.image, filter, at.y, at.x);
        if (from >= 0) sum += rounded(gradients.g[from]);
    }
    return sum;
}

KERNEL __launch_bounds__(THREADS, 1) weight_grad_sparse_pool(
    const T *x, const T *g, const int32_t *where, T *w, IF(BIAS, T *bias,) int64_t batch, int64_t splits
    IF(SPLIT, , char *scratch)) {
    wait_for_inputs();
    IF(SPLIT, w = SCRATCH_SUMS(T, scratch, splits);)
    const InputImages images = {x, (int)batch};
    const PositionSplit split(batch, splits);
    const Gradients gradients = {g, where, (int)batch};
    char *shared = *SHARED_STAGES(char[STAGE], shared_bytes);
    __shared__ Pipeline<STAGES> pipeline;
    if (BIAS && threadIdx.x < STEP)
        (*SHARED_ONES(Ones, shared_bytes))[threadIdx.x] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    fence_proxy_async();
    if (threadIdx.x == 0) {
        pipeline.init(PRODUCERS / WARP, CONSUMERS / WARP);
        fence_mbarrier_init();
    }
    __syncthreads();
    PipelineState<STAGES> state;
    if (threadIdx.x < PRODUCERS) {
        warpgroup_reg_dealloc<56>();
        T *staging = SHARED_LOADS(T, shared_bytes);
        PooledGradientLoader<GradientLayout, Bf16x3Operand, PRODUCERS, 1, false, Gradients> loader = {gradients,
            (int)(threadIdx.x + IDLE_LOADERS) % PRODUCERS}; // those are the first that load more than one item
        const auto start_images = [&](int i) {
            if (i < split.end)
                images.start_load<ImageLayout, PRODUCERS>(staging, threadIdx.x, split.position(i) - REACH_BACK,
                    split.channel);
        };
        const auto start_gradients = [&](int i) {
            if (i < split.end) loader.start(split.position(i) / 2, split.filter);
        };
        start_images(split.begin);
        start_gradients(split.begin);
        #pragma unroll 1
        for (int i = split.begin; i < split.end; i++, state.advance()) {
            char *stage = shared + state.stage * STAGE;
            pipeline.wait_empty(state);
            loader.finish(StoreSparse{stage});
            InputImages::finish_load<ImageLayout, PRODUCERS>(StoreOperand<ImageLayout, Bf16x3Operand>{stage}, staging, threadIdx.x);
            start_images(i + 1);
            fence_proxy_async();
            arrive_per_warp(pipeline.full[state.stage]);
            start_gradients(i + 1);
        }
    } else {
        warpgroup_reg_alloc<120>();
        const int row = __shfl_sync(FULL_MASK, threadIdx.x / WARPGROUP - PRODUCERS / WARPGROUP, 0); // uniform in a warp
        WeightAndBiasSums sums = {};
        for (int i = split.begin; i < split.end; i++, state.advance()) {
            pipeline.wait_full(state);
            multiply(sums, row, shared, state.stage);
            arrive_per_warp(pipeline.empty[state.stage]);
        }
        write(sums.main, split, row, w,
            [&](int filter, int channel, int tap) { return recompute(split, images, gradients, filter, channel,
                tap); });
#if BIAS
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int filter = split.filter + accumulator_row(2 * i);
            if (threadIdx.x % 4 != 0 || split.channel > 0 || filter >= OUT_CHANNELS) continue;
            T &to = w[blockIdx.y * (int64_t)SPLIT_ELEMENTS + SIZE + row * OUT_CHANNELS + filter];
            to = finite(sums.bias[i]) ? sums.bias[i] : row == 0 ? recompute(split, gradients, filter) : 0;
        }
#endif
    }
}

KERNEL __launch_bounds__(SUM_THREADS) sum_weight_grad_splits(
    const T *x, const T *g, const int32_t *where, T *w, IF(BIAS, T *bias,) int64_t batch, int64_t splits, char *scratch) {
    wait_for_inputs();
#if !BIAS
    T *const bias = nullptr;
#endif
    sum_splits(w, bias, splits, SCRATCH_SUMS(T, scratch, splits));
}
