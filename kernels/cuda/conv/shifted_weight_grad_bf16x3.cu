// Weight gradient of a stride-1 convolution with 3 x 3 windows in bf16x3. Read conv/shifted_weight_grad.cuh first.
//
// Four warps load the gradients, four the images. The products of first terms and the low-order products share
// accumulators, to save registers: each are summed by WGMMA over SUM_POSITIONS positions, then added in float32.
#include "conv/shifted_weight_grad.cuh"

constexpr int LOADERS = PRODUCERS / 2, LOADS_IN_FLIGHT = 4;
constexpr int SUM_POSITIONS = 64, STEP = 16; // positions that WGMMA sums; positions of one instruction
typedef CoreMatrixLayout<STAGE_POSITIONS, FILTERS / CHUNK_ELEMENTS, BF16X3_TERMS> GradientLayout;
typedef ImageArray<OUT_CHANNELS, OUT_ROWS, OUT_COLUMNS> Gradients;
constexpr int STAGE = (ImageLayout::SIZE + GradientLayout::SIZE + 1023) / 1024 * 1024;

// Loads one operand of all stages. It begins `before` positions before the gradients.
template <class Layout, class Source> __device__ __forceinline__ void load_operand(const PositionSplit &split,
    const Source &images, int before, int channel, Pipeline<STAGES> &pipeline, char *shared, T *staging) {
    PipelineState<STAGES> state;
    for (int i = split.begin; i < split.end; i++, state.advance()) {
        images.template load<Layout, LOADERS, LOADS_IN_FLIGHT>(StoreOperand<Layout, Bf16x3Operand>{shared + state.stage * STAGE},
            staging, threadIdx.x % LOADERS, split.position(i) - before, channel, pipeline.empty[state.stage], state.phase ^ 1);
        fence_proxy_async();
        arrive_per_warp(pipeline.full[state.stage]);
    }
}

// The sums of a row of the window. By a warpgroup.
__device__ __forceinline__ void multiply(
    float (&main)[SUMS], const PositionSplit &split, int row, Pipeline<STAGES> &pipeline, const char *shared) {
    #pragma unroll
    for (int i = 0; i < SUMS; i++) main[i] = 0;
    PipelineState<STAGES> state;
    for (int i = split.begin; i < split.end; i++, state.advance()) {
        pipeline.wait_full(state);
        const char *stage = shared + state.stage * STAGE;
        #pragma unroll 1
        for (int at = 0; at < STAGE_POSITIONS; at += SUM_POSITIONS) {
            const uint64_t a = smem_descriptor(
                stage + ImageLayout::SIZE + at * CHUNK_BYTES, CORE_MATRIX_BYTES, GradientLayout::COLUMN_BYTES, NO_SWIZZLE);
            const uint64_t b = smem_descriptor(stage + (at + tap_offset(row, 0)) * ImageLayout::ROW_BYTES,
                DW * ImageLayout::ROW_BYTES, 8 * ImageLayout::ROW_BYTES, SWIZZLE_64B);
            float sums[SUMS];
            const auto products = [&](TermPair terms, bool add) {
                #pragma unroll
                for (int k = 0; k < SUM_POSITIONS; k += STEP)
                    wgmma<BFLOAT16, true, true>(sums, a + (terms.a * GradientLayout::TERM_BYTES + k * CHUNK_BYTES) / CHUNK_BYTES,
                        b + (terms.b * ImageLayout::TERM_BYTES + k * ImageLayout::ROW_BYTES) / CHUNK_BYTES,
                            add || k > 0);
            };
            add_products(main, sums, products, [] {});
        }
        arrive_per_warp(pipeline.empty[state.stage]);
    }
}

// An element by sequential float32 FMA.
__device__ __noinline__ T recompute(
    const PositionSplit &split, const InputImages &images, const Gradients &gradients, int filter, int channel,
        int tap) {
    T sum = 0;
    for (int i = split.begin * STAGE_POSITIONS; i < split.end * STAGE_POSITIONS; i++) {
        const int position = split.position(i / STAGE_POSITIONS) + i % STAGE_POSITIONS;
        const int from_g = gradients.at(position);
        const int from_x = images.at(position - REACH_BACK + tap_offset(tap / KW, tap % KW));
        if (from_g < 0) continue;
        const T x = from_x < 0 ? 0 : rounded(images.x[from_x + channel * InputImages::AREA]);
        sum = fma(rounded(gradients.x[from_g + filter * Gradients::AREA]), x, sum);
    }
    return sum;
}

KERNEL __launch_bounds__(THREADS, 1) weight_grad_shifted_bf16x3(const T *x, const T *g, T *w, int64_t batch,
    int64_t splits IF(SPLIT, , char *scratch)) {
    wait_for_inputs();
    IF(SPLIT, w = SCRATCH_SUMS(T, scratch, splits);)
    const InputImages images = {x, (int)batch};
    const PositionSplit split(batch, splits);
    const Gradients gradients = {g, split.images};
#if FALLBACK
    const int *marks = SCRATCH_FALLS_BACK(int, scratch, splits) + (blockIdx.y * gridDim.x + blockIdx.x) * KH;
    if (!(marks[0] | marks[1] | marks[2])) return;
#endif
    char *shared = *SHARED_STAGES(char[STAGE], shared_bytes);
    T *staging = SHARED_LOADS(T, shared_bytes);
    __shared__ Pipeline<STAGES> pipeline;
    if (threadIdx.x == 0) {
        pipeline.init(PRODUCERS / WARP, CONSUMERS / WARP);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < PRODUCERS) {
        warpgroup_reg_dealloc<48>();
        if (threadIdx.x < LOADERS)
            load_operand<ImageLayout>(split, images, REACH_BACK, split.channel, pipeline, shared, staging);
        else
            load_operand<GradientLayout>(split, gradients, 0, split.filter, pipeline, shared + ImageLayout::SIZE,
                staging + LOADS_IN_FLIGHT * CHUNK_ELEMENTS * LOADERS);
    } else {
        warpgroup_reg_alloc<128>();
        const int row = threadIdx.x / WARPGROUP - 2;
        float sums[SUMS];
        multiply(sums, split, row, pipeline, shared);
        write(sums, split, row, w,
            [&](int filter, int channel, int tap) {
                return recompute(split, images, gradients, filter, channel, tap);
            });
    }
}

KERNEL __launch_bounds__(SUM_THREADS) sum_weight_grad_splits(const T *x, const T *g, T *w, int64_t batch,
    int64_t splits, char *scratch) {
    wait_for_inputs();
    sum_splits(w, nullptr, splits, SCRATCH_SUMS(T, scratch, splits));
}
