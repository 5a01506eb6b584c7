// The gradient of weight_hh: the cotangents of the sums of all steps, transposed, times the hidden states before each step, by
// WGMMA in fp16x2. rnn/grid_recurrent_grad.cu has packed the operands (WeightGradInputs). K is the rows of all groups in all
// steps. A block computes one split of K of a tile of 128 x 128; the first split of a tile adds the sums of the others. One
// thread copies; two warpgroups multiply, each 64 rows of the tile. The other warps add up the gradients of the biases.
//
// Macros (GridDivision in recurrent.py): those of rnn/grid.cuh. WEIGHT_GRAD_SPLITS: of K.
#include "rnn/grid.cuh"

// A stage has K_OF_STAGE of K. An operand of a stage is boxes of TILE_K columns of the tile, each with one term.
constexpr int TILE = WEIGHT_GRAD_TILE, COLUMN_TILES = HIDDEN / TILE, K_OF_STAGE = WeightGradInputs::SCALED_ROWS;
constexpr int SCALED = WeightGradInputs::SCALED_COLUMNS;
constexpr int BOX_BYTES = K_OF_STAGE * 128, BOXES = TILE / TILE_K * TERMS, OPERAND = BOXES * BOX_BYTES;
static_assert(SUMS == TILE / 2 && 2 * OPERAND <= STAGE, "the accumulators and the stages are those of grid.cuh");
typedef Layout<HIDDEN / TILE_N, SUMS_OF_STEP> Packed;

KERNEL __launch_bounds__(THREADS, 1) grid_weight_grad(
    T *dw, T *dx_sum, IF(GRU, T *ds_sum,) int64_t rows, int64_t length, char *scratch) {
    wait_for_inputs();
    const Packed layout(rows, scratch);
    const WeightGradInputs inputs = layout.weight_grad(length);
    const Stages stages;
    TilePipeline &pipeline = stages.pipeline();
    pipeline.start(1, CONSUMER_WARPS);
    PipelineState<STAGES> state;
    const int tile = blockIdx.x % WEIGHT_GRAD_TILES, split = blockIdx.x / WEIGHT_GRAD_TILES;
    const int tile_row = tile / COLUMN_TILES, tile_column = tile % COLUMN_TILES;
    const int64_t slices = length * layout.groups * 2; // K, the rows of all steps, in slices of half a group
    const int64_t begin = slices * split / WEIGHT_GRAD_SPLITS, end = slices * (split + 1) / WEIGHT_GRAD_SPLITS;
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<24>();
        constexpr int OTHERS = WARPGROUP - WARP, BIAS_COLUMNS = WeightGradInputs::BIAS_COLUMNS;
        for (int i = blockIdx.x * OTHERS + threadIdx.x - WARP; threadIdx.x >= WARP && i < BIAS_COLUMNS; i += gridDim.x * OTHERS) {
            float sum = 0;
            for (int warp = 0; warp < layout.groups * CONSUMER_WARPS; warp++) sum += inputs.bias_sums(0, warp)[i];
#if GRU
            if (i < SUMS_OF_STEP) ds_sum[i] = sum;
            if (i < 2 * HIDDEN) dx_sum[i] = sum;
            if (i >= SUMS_OF_STEP) dx_sum[i - HIDDEN] = sum;
#else
            dx_sum[i] = sum;
#endif
        }
        if (threadIdx.x > 0) return;
        for (int64_t i = begin; i < end; i++, state.advance()) {
            Mbarrier &full = pipeline.expect(state, 2 * OPERAND);
            char *const to = stages.at + state.stage * STAGE;
            for (int box = 0; box < 2 * BOXES; box++) {
                const int at = box < BOXES ? tile_row : SUMS_OF_STEP / TILE + tile_column;
                const char *const packed = inputs.tile(i / 2, at * (TILE / TILE_K) + box % BOXES / TERMS);
                bulk_copy<BOX_BYTES>(to + box * BOX_BYTES, packed + box % TERMS * TERM_A + i % 2 * BOX_BYTES, full);
            }
        }
        return;
    }
    warpgroup_reg_alloc<240>();
    const int warpgroup = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x - WARPGROUP;
    // The descriptor of 16 of K of a term, which is contiguous along M or N.
    const auto operand = [&](const char *boxes, int term, int k) {
        return smem_descriptor(boxes + term * BOX_BYTES + k * 16 * 128, TERMS * BOX_BYTES, 8 * 128, SWIZZLE_128B);
    };
    float main[SUMS] = {};
    for (int64_t i = begin; i < end; i++, state.advance()) {
        const float *const scales = inputs.inverse_scales(i / 2, i % 2);
        const float of_row = scales[(tile_row * TILE + thread / WARP * 16) / SCALED];
        const Vector<float, 4> of_columns = load<float, 4>(scales + (SUMS_OF_STEP + tile_column * TILE) / SCALED);
        pipeline.wait_full(state);
        const char *const a = stages.at + state.stage * STAGE + warpgroup * (TERMS * BOX_BYTES);
        const char *const b = stages.at + state.stage * STAGE + OPERAND;
        float sums[SUMS];
        wgmma_fence();
        #pragma unroll
        for (int pair = 0; pair < TERM_PAIRS; pair++)
            #pragma unroll
            for (int k = 0; k < K_OF_STAGE / 16; k++)
                wgmma<FP16X2, true, true>(sums, operand(a, low_of_a(pair), k), operand(b, low_of_b(pair), k), pair + k > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
        if (threadIdx.x % WARP == 0) pipeline.empty[state.stage].arrive();
        #pragma unroll
        for (int j = 0; j < SUMS; j++) main[j] = fma(sums[j], of_row * of_columns.lane[j * 2 / SCALED], main[j]);
    }
#if WEIGHT_GRAD_SPLITS > 1
    // The sums of this thread in another split than the first.
    const auto partial = [&](int split) {
        return inputs.partials() + ((int64_t)(split - 1) * WEIGHT_GRAD_TILES + tile) * (TILE * TILE / 4) + thread;
    };
    int *const counter = layout.weight_grad_counters() + tile;
    if (split > 0) {
        #pragma unroll
        for (int j = 0; j < SUMS; j += 4)
            partial(split)[j / 4 * CONSUMER_THREADS] = {main[j], main[j + 1], main[j + 2], main[j + 3]};
        publish(counter);
        return;
    }
    if (threadIdx.x % WARP == 0) wait_for_count(counter, WEIGHT_GRAD_SPLITS - 1);
    __syncwarp();
    for (int other = 1; other < WEIGHT_GRAD_SPLITS; other++) // in this order in each run
        #pragma unroll
        for (int j = 0; j < SUMS; j += 4) {
            const float4 v = load_shared_by_blocks(partial(other) + j / 4 * CONSUMER_THREADS);
            main[j] += v.x, main[j + 1] += v.y, main[j + 2] += v.z, main[j + 3] += v.w;
        }
#endif
    #pragma unroll
    for (int j = 0; j < SUMS; j += 2) {
        const int down = tile_row * TILE + warpgroup * 64 + accumulator_row(j);
        const int right = tile_column * TILE + accumulator_column(j);
        const int64_t row = sum_of_chunk(down / 8, down % 8);
        store<T, 2>(dw, row * HIDDEN + unit_of_chunk(right / 8, right % 8), {main[j], main[j + 1]});
    }
}
