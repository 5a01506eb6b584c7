// Input gradient of a stride-1 convolution that is followed by 2 x 2 max pooling. Read conv/sparse_pool.cuh first.
//
// It is the convolution of the gradient with flipped weights. The rows of the product are pairs of the gradient, the sparse
// operand. The columns are two neighbouring outputs of TILE_CHANNELS channels: x = 2 j + side - ODD_PADDING for pair j.
// Position c of pair j - (PW + ODD_PADDING) / 2 + e is multiplied by tap 2 e + c - side of a row of the window. So each row
// of the window and each e from 0 to KW / 2 has a matrix of weights, with 2 k per filter and 2 columns per channel. Its
// elements are 0 where there is no such tap.
//
// Rounded operands (MANTISSA) have one term, in tf32 or bfloat16, and WGMMA sums all their products. Other operands are bf16x3. Then
// WGMMA sums the products of first terms over one matrix, as in conv/shifted_bf16x3.cu. One WGMMA multiplies by two neighbouring
// terms of the weights, so the low-order products have two accumulators: products with second terms, and smaller ones. The
// products of third terms of the gradient use the accumulator of the first terms, and are added to the smaller ones.
#include "conv/sparse_pool.cuh"
#include "conv/shifted_pipeline.cuh"

constexpr int MMA_WARPGROUPS = CONSUMER_WARPGROUPS, ROWS = 64, TILE = MMA_WARPGROUPS * ROWS; // ROWS: pairs of a warpgroup
constexpr int PRODUCERS = 256, LOADERS = PRODUCERS - WARP, CONSUMERS = MMA_WARPGROUPS * WARPGROUP,
    THREADS = PRODUCERS + CONSUMERS;
constexpr int TILE_CHANNELS = 32, COLUMNS = 2 * TILE_CHANNELS, SUMS = COLUMNS / 2; // SUMS: accumulators of a thread
constexpr int FILTER_BLOCKS = (OUT_CHANNELS + TILE_CHANNELS - 1) / TILE_CHANNELS,
    CHANNEL_BLOCKS = (IN_CHANNELS + STAGE_CHANNELS - 1) / STAGE_CHANNELS;
// ROW_PAIRS: pairs that a row of the window reads
constexpr int ODD_PADDING = PW % 2, ROW_PAIRS = KW / 2 + 1, WEIGHT_MATRICES = KH * ROW_PAIRS;
// pairs from a window's first one to its output
constexpr int PAIRS_BACK = PH * PAIR_PITCH + (PW + ODD_PADDING) / 2;
constexpr int PAIR_REACH = (KH - 1) * PAIR_PITCH + ROW_PAIRS - 1; // from its first to its last one
constexpr int GROUPS = STAGE_CHANNELS / CHUNK_ELEMENTS, GRADIENT_STAGES = 2;
constexpr int TERMS = KMajorOperand::TERMS;
constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = MMA_WARPGROUPS == 2 ? 184 : 112;
static_assert(registers_suffice(PRODUCERS, PRODUCER_REGISTERS, CONSUMERS, CONSUMER_REGISTERS), "warpgroup_reg_alloc");
constexpr int FILTERS_OF_WORD = CHUNK_ELEMENTS / 2;
typedef PooledGradients<IN_CHANNELS, IN_ROWS, IN_COLUMNS> Gradients;
typedef KMajorLayout<(TILE + PAIR_REACH + 7) / 8 * 8, GROUPS> GradientLayout;
typedef KMajorLayout<TERMS * COLUMNS, 2 * GROUPS, 1> WeightLayout; // columns: first terms, second, third
constexpr int STEPS = GradientLayout::COLUMNS / 2; // products of a stage
constexpr bool RESIDENT_WEIGHTS = FILTER_BLOCKS == 1 && WEIGHT_STAGES == CHANNEL_BLOCKS * WEIGHT_MATRICES;
typedef TilePipeline<GRADIENT_STAGES, WEIGHT_STAGES, PRODUCERS, CONSUMERS, RESIDENT_WEIGHTS> SparsePipeline;

// A stage of the gradient: its terms, then for each chunk of channels and each pair the sparse metadata.
constexpr int GRADIENT_STAGE = GradientLayout::SIZE + GradientLayout::COLUMNS * GradientLayout::ROWS * 2;
static_assert(GRADIENT_STAGE % CHUNK_BYTES == 0, "stages begin at chunks");

// Packs the weights as operands, in scratch, in the order of the stages.
KERNEL pack_weights(const T *g, const int32_t *where, const T *w, const Epilogue epilogue, int64_t batch,
    char *scratch) {
    wait_for_inputs();
    constexpr int WORDS = WeightLayout::GROUPS * COLUMNS; // of a matrix
    const WeightReader weights = {w};
    for (int i = grid_index(); i < FILTER_BLOCKS * CHANNEL_BLOCKS * WEIGHT_MATRICES * WORDS; i += grid_size()) {
        const int column = i % COLUMNS, group = i / COLUMNS % WeightLayout::GROUPS, stage = i / WORDS;
        const int channel_block = stage / WEIGHT_MATRICES % CHANNEL_BLOCKS, down = stage % WEIGHT_MATRICES / ROW_PAIRS,
            e = stage % ROW_PAIRS;
        const int out = stage / (WEIGHT_MATRICES * CHANNEL_BLOCKS) * TILE_CHANNELS + column % TILE_CHANNELS,
            side = column / TILE_CHANNELS;
        float found[CHUNK_ELEMENTS];
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) {
            const int filter = channel_block * STAGE_CHANNELS + group * FILTERS_OF_WORD + j / 2,
                right = 2 * e + j % 2 - side;
            const bool inside = right >= 0 && right < KW && out < OUT_CHANNELS && filter < IN_CHANNELS;
            found[j] = inside ? weights.at(out, filter, down * KW + right) : 0;
        }
        Chunk chunks[KMajorOperand::CHUNKS];
        KMajorOperand::split(chunks, found);
        char *to = SCRATCH_WEIGHTS(char[WeightLayout::SIZE], scratch)[stage];
        #pragma unroll
        for (int i = 0; i < KMajorOperand::CHUNKS; i++) // WeightLayout has one term: others are columns
            *(Chunk *)(to + WeightLayout::chunk(i % KMajorOperand::TERM_CHUNKS, group,
                i / KMajorOperand::TERM_CHUNKS * COLUMNS + column)) = chunks[i];
    }
}

// Stores what PooledGradientLoader loads in a stage.
struct StoreSparse {
    char *to;

    __device__ __forceinline__ void operator()(
        int group, int pair, const Chunk (&chunks)[KMajorOperand::CHUNKS], uint32_t selectors) const {
        #pragma unroll
        for (int i = 0; i < KMajorOperand::CHUNKS; i++)
            *(Chunk *)(to + GradientLayout::chunk(i, group, pair)) = chunks[i];
        #pragma unroll
        for (int i = 0; i < KMajorOperand::TERM_CHUNKS; i++) {
            const uint32_t column = group * KMajorOperand::TERM_CHUNKS + i;
            *(uint16_t *)(to + GradientLayout::SIZE + (column * GradientLayout::ROWS + pair) * 2) =
                KMajorOperand::KIND == TF32 ? tf32_metadata(selectors >> 4 * i & 15) : bfloat16_metadata(selectors);
        }
    }

  private:
    // Two channels are four k, of which WGMMA takes two: two bits each, 0 or 1 of the first channel, 2 or 3 of the second.
    static __device__ __forceinline__ uint16_t bfloat16_metadata(uint32_t selectors) {
        uint32_t code = (selectors | selectors << 4) & 0x0f0f;
        code = (code | code << 2) & 0x3333;
        code = (code | code << 1) & 0x5555;
        return code | 0x8888;
    }
    // A channel is two k, of which WGMMA takes one: four bits, 0100 for the first and 1110 for the second.
    static __device__ __forceinline__ uint16_t tf32_metadata(uint32_t selectors) {
        uint32_t code = (selectors | selectors << 6) & 0x0303;
        code = (code | code << 3) & 0x1111;
        return code * 10 | 0x4444;
    }
};

struct SparseAccumulator {
    float main[SUMS];

    // Starts the products of a term of the gradient with a term of the weights, and with the next one if there are
    // accumulators for it.
    template <int COUNT> static __device__ __forceinline__ void start_products(float (&sums)[COUNT], uint64_t a,
        uint64_t b, const uint32_t (&metadata)[STEPS], TermPair terms, bool add) {
        #pragma unroll
        for (int k = 0; k < STEPS; k++)
            wgmma_sparse<KMajorOperand::KIND, false, false>(sums, a + GradientLayout::offset(terms.a, 2 * k, 0) / CHUNK_BYTES,
                b + WeightLayout::offset(0, 4 * k, terms.b * COLUMNS) / CHUNK_BYTES, metadata[k], add || k > 0);
    }

    // The operands of the products with a matrix of weights, and the sparse metadata of this thread's rows (see wgmma_sparse).
    struct Operands {
        uint64_t a, b;
        uint32_t metadata[STEPS];

        __device__ __forceinline__ void load(const char *gradient, const char *weights, int warpgroup, int matrix) {
            const int pair = warpgroup * ROWS + matrix / ROW_PAIRS * PAIR_PITCH + matrix % ROW_PAIRS;
            a = smem_descriptor(gradient + pair * CHUNK_BYTES, GradientLayout::COLUMN_BYTES, CORE_MATRIX_BYTES, NO_SWIZZLE);
            b = smem_descriptor(weights, WeightLayout::COLUMN_BYTES, CORE_MATRIX_BYTES, NO_SWIZZLE);
            #pragma unroll
            for (int k = 0; k < STEPS; k++) {
                const uint16_t *codes = (const uint16_t *)(gradient + GradientLayout::SIZE) +
                    (2 * k + threadIdx.x % 2) * GradientLayout::ROWS + pair;
                metadata[k] = codes[accumulator_row(0)] | (uint32_t)codes[accumulator_row(2)] << 16;
            }
        }
        // Keeps the registers of `metadata` until here.
        __device__ __forceinline__ void keep() const {
            #pragma unroll
            for (int k = 0; k < STEPS; k++) asm volatile("" ::"r"(metadata[k]));
        }
    };

    // Operands of one term: WGMMA sums all products. Those of a matrix run while the next ones are started.
    __device__ __forceinline__ void multiply_one_term(SparsePipeline &pipeline, const char *gradients, const char *weights,
        int warpgroup, PipelineState<GRADIENT_STAGES> &gradient, PipelineState<WEIGHT_STAGES> &weight) {
        Operands operands[2];
        int last_weight = 0, last_gradient = 0;
        for (int channel_block = 0; channel_block < CHANNEL_BLOCKS; channel_block++, gradient.advance()) {
            pipeline.images.wait_full(gradient);
            #pragma unroll
            for (int i = 0; i < WEIGHT_MATRICES; i++, weight.advance()) {
                pipeline.wait_weights(weight);
                Operands &own = operands[i % 2];
                own.load(gradients + gradient.stage * GRADIENT_STAGE, weights + weight.stage * WeightLayout::SIZE, warpgroup, i);
                wgmma_fence();
                start_products(main, own.a, own.b, own.metadata, {0, 0}, channel_block + i > 0);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                operands[(i + 1) % 2].keep();
                if (channel_block + i > 0) pipeline.release_weights(last_weight);
                if (channel_block > 0 && i == 0) arrive_per_warp(pipeline.images.empty[last_gradient]);
                last_weight = weight.stage;
            }
            if (WEIGHT_MATRICES % 2 == 1) wgmma_wait_group<0>(); // the next matrix has the same registers
            last_gradient = gradient.stage;
        }
        wgmma_wait_group<0>();
        operands[(WEIGHT_MATRICES - 1) % 2].keep();
        wgmma_fence_operand(main);
        pipeline.release_weights(last_weight);
        arrive_per_warp(pipeline.images.empty[last_gradient]);
    }

    __device__ __forceinline__ void multiply_bf16x3(SparsePipeline &pipeline, const char *gradients, const char *weights,
        int warpgroup, PipelineState<GRADIENT_STAGES> &gradient, PipelineState<WEIGHT_STAGES> &weight) {
        float large[SUMS], others[2 * SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        for (int channel_block = 0; channel_block < CHANNEL_BLOCKS; channel_block++, gradient.advance()) {
            pipeline.images.wait_full(gradient);
            for (int i = 0; i < WEIGHT_MATRICES; i++, weight.advance()) {
                pipeline.wait_weights(weight);
                Operands own;
                own.load(gradients + gradient.stage * GRADIENT_STAGE, weights + weight.stage * WeightLayout::SIZE, warpgroup, i);
                wgmma_fence();
                start_products(large, own.a, own.b, own.metadata, {0, 0}, false);
                wgmma_commit_group();
                start_products(others, own.a, own.b, own.metadata, {0, 1}, channel_block + i > 0);
                start_products(others, own.a, own.b, own.metadata, {1, 0}, true);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                wgmma_fence_operand(large);
                #pragma unroll
                for (int j = 0; j < SUMS; j++) main[j] += large[j];
                wgmma_fence();
                start_products(large, own.a, own.b, own.metadata, {2, 0}, false);
                wgmma_commit_group();
                wgmma_wait_group<0>();
                own.keep();
                wgmma_fence_operand(large);
                wgmma_fence_operand(others);
                #pragma unroll
                for (int j = 0; j < SUMS; j++) others[SUMS + j] += large[j];
                pipeline.release_weights(weight.stage);
            }
            arrive_per_warp(pipeline.images.empty[gradient.stage]);
        }
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] += others[i] + others[SUMS + i];
    }
};

// The two outputs of a pair.
struct PairOutputs {
    int image, y, x;

    __device__ explicit PairOutputs(int pair)
        : image(pair / IMAGE_PAIRS), y(pair % IMAGE_PAIRS / PAIR_PITCH), x(pair % PAIR_PITCH * 2 - ODD_PADDING) {}
    __device__ __forceinline__ bool inside(int batch, int side) const {
        return image < batch && y < OUT_ROWS && (unsigned)(x + side) < OUT_COLUMNS;
    }
    __device__ __forceinline__ int index(int channel, int side) const {
        return ((image * OUT_CHANNELS + channel) * OUT_ROWS + y) * OUT_COLUMNS + x + side;
    }
};

// An output by sequential float32 FMA.
__device__ __noinline__ T recompute(const Gradients &gradients, const T *w, const PairOutputs &out, int channel,
    int side) {
    const WeightReader weights = {w};
    T sum = 0;
    for (int filter = 0; filter < IN_CHANNELS; filter++) {
        for (int tap = 0; tap < TAPS; tap++) {
            const int from = gradients.at(out.image, filter, out.y + tap / KW - PH, out.x + side + tap % KW - PW);
            if (from >= 0) sum = fma(rounded(gradients.g[from]), rounded(weights.at(channel, filter, tap)), sum);
        }
    }
    return sum;
}

// By one lane for each channel: prefetches the auxiliary inputs of a tile.
__device__ __forceinline__ void prefetch_aux(const Epilogue &out, int batch, int channel, int pair) {
    for (int image = pair / IMAGE_PAIRS; image < batch && image * IMAGE_PAIRS < pair + TILE; image++) {
        const int from = max(pair - image * IMAGE_PAIRS, 0) / PAIR_PITCH;
        const int to = min((pair + TILE - 1 - image * IMAGE_PAIRS) / PAIR_PITCH + 1, OUT_ROWS);
        if (channel < OUT_CHANNELS && from < to)
            out.prefetch(((image * OUT_CHANNELS + channel) * OUT_ROWS + from) * OUT_COLUMNS, (to - from) * OUT_COLUMNS);
    }
}

// The epilogue for TILE_CHANNELS channels from `channel` on and ROWS pairs from `pair` on. Auxiliary inputs of a row
// are loaded before its first output is written. Sums that are not finite are recomputed, because bf16x3 turns
// infinities into NaN.
__device__ __forceinline__ void write(
    const float (&sums)[SUMS], const Gradients &gradients, const T *w, const Epilogue &epilogue, int channel,
        int pair) {
    constexpr int CHANNELS = SUMS / 4; // of a thread, for each of two rows and two outputs
    const auto own = [&](int i) { return channel + i / 2 * 8 + accumulator_column(i % 2); };
    #pragma unroll
    for (int row = 0; row < 2; row++) {
        const PairOutputs out(pair + accumulator_row(2 * row));
        #pragma unroll
        for (int side = 0; side < 2; side += WIDE_C) {
            const bool inside = out.inside(gradients.images, side);
            Epilogue::Aux<WIDE_C> aux[CHANNELS];
            #pragma unroll
            for (int i = 0; i < CHANNELS; i++)
                if (inside && own(i) < OUT_CHANNELS)
                    aux[i] = epilogue.load_aux<WIDE_C>(
                        out.image, own(i), out.y * OUT_COLUMNS + out.x + side, out.index(own(i), side));
            #pragma unroll
            for (int i = 0; i < CHANNELS; i++) {
                if (!inside || own(i) >= OUT_CHANNELS) continue;
                T value[WIDE_C];
                #pragma unroll
                for (int k = 0; k < WIDE_C; k++) {
                    value[k] = sums[(side + k) * (SUMS / 2) + i / 2 * 4 + row * 2 + i % 2];
                    if (!finite(value[k])) value[k] = recompute(gradients, w, out, own(i), side + k);
                }
                epilogue.write(aux[i], out.index(own(i), side), value);
            }
        }
    }
}

KERNEL __launch_bounds__(THREADS, 1) input_grad_sparse_pool(
    const T *g, const int32_t *where, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Gradients gradients = {g, where, (int)batch};
    const int tiles = ceil_div(batch * IMAGE_PAIRS, TILE) * FILTER_BLOCKS,
              own = ceil_div(tiles - (int)blockIdx.x, gridDim.x);
    const auto channel = [&](int i) { return (blockIdx.x + i * gridDim.x) % FILTER_BLOCKS * TILE_CHANNELS; };
    const auto pair = [&](int i) { return (int)((blockIdx.x + i * gridDim.x) / FILTER_BLOCKS * TILE); };
    char *of_gradients = *SHARED_GRADIENTS(char[GRADIENT_STAGE], shared_bytes);
    char *of_weights = *SHARED_WEIGHTS(char[WeightLayout::SIZE], shared_bytes);
    __shared__ SparsePipeline pipeline;
    if (threadIdx.x == 0) pipeline.init();
    __syncthreads();
    PipelineState<GRADIENT_STAGES> gradient;
    PipelineState<WEIGHT_STAGES> weight;
    if (threadIdx.x < PRODUCERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x < WARP) { // takes part in the pipeline of the gradient, so that it is not far ahead of it
            for (int i = 0; i < own; i++) {
                for (int channel_block = 0; channel_block < CHANNEL_BLOCKS; channel_block++, gradient.advance()) {
                    pipeline.images.wait_empty(gradient);
                    arrive_per_warp(pipeline.images.full[gradient.stage]);
                    if (channel_block == 0) prefetch_aux(epilogue, batch, channel(i) + threadIdx.x, pair(i));
                    const int first = (channel(i) / TILE_CHANNELS * CHANNEL_BLOCKS + channel_block) * WEIGHT_MATRICES;
                    if (threadIdx.x == 0)
                        pipeline.load_stages<WeightLayout::SIZE, WEIGHT_MATRICES>(
                            weight, of_weights, SCRATCH_WEIGHTS(char[WeightLayout::SIZE], scratch)[first]);
                    __syncwarp();
                }
            }
        } else {
            constexpr bool ROUNDED = TERMS == 1;
            PooledGradientLoader<GradientLayout, KMajorOperand, LOADERS, ROUNDED ? 2 : 1, !ROUNDED, Gradients> loader = {
                gradients, (int)threadIdx.x - WARP};
            const auto start = [&](int i) {
                if (i < own * CHANNEL_BLOCKS)
                    loader.start(pair(i / CHANNEL_BLOCKS) - PAIRS_BACK, i % CHANNEL_BLOCKS * STAGE_CHANNELS);
            };
            start(0);
            #pragma unroll 1
            for (int i = 0; i < own * CHANNEL_BLOCKS; i++, gradient.advance()) {
                pipeline.images.wait_empty(gradient);
                loader.finish(StoreSparse{of_gradients + gradient.stage * GRADIENT_STAGE});
                fence_proxy_async();
                arrive_per_warp(pipeline.images.full[gradient.stage]);
                start(i + 1);
            }
        }
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const int warpgroup = __shfl_sync(FULL_MASK, (threadIdx.x - PRODUCERS) / WARPGROUP, 0); // uniform in a warp
        for (int i = 0; i < own; i++) {
            SparseAccumulator sums;
            if constexpr (TERMS == 1)
                sums.multiply_one_term(pipeline, of_gradients, of_weights, warpgroup, gradient, weight);
            else
                sums.multiply_bf16x3(pipeline, of_gradients, of_weights, warpgroup, gradient, weight);
            write(sums.main, gradients, w, epilogue, channel(i), pair(i) + warpgroup * ROWS);
        }
    }
}
