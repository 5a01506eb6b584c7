// The gradient by the images of a convolution with stride 1, behind which a max pooling of windows of 2 x 2 is, on Hopper's
// matrix units. Read conv/sparse_pool.cuh first.
//
// It is the convolution of the gradient with the weights turned round. A product's rows are lines of the gradient, its
// sparse operand, and its columns two neighbouring outputs of OUTS channels: x = 2 j + side - ODD, of line j. These need, of
// position c of line j - (PW + ODD) / 2 + e, element 2 e + c - side of a row of the window. So for each row and each e, from 0
// to KW / 2, weights are a matrix of 2 k a filter by 2 columns a channel, 0 where there is no such element.
//
// Operands are in pieces. The largest products are summed by the matrix units over one such matrix, as in conv/shifted_bf16x3.cu.
// Two sums of the others lie side by side, as one product is of two neighbouring pieces of the weights: of first by second
// pieces, and of all smaller ones. Those of the gradient's third pieces, which have no such neighbour, are summed where the
// largest ones were, and added to the smaller ones.
#include "conv/sparse_pool.cuh"
#include "conv/shifted_pipeline.cuh"

constexpr int TEAMS = 2, ROWS = 64, TILE = TEAMS * ROWS; // ROWS: lines of a warpgroup
constexpr int BRINGING = 256, GATHERERS = BRINGING - WARP, CONSUMERS = TEAMS * WARPGROUP, THREADS = BRINGING + CONSUMERS;
constexpr int OUTS = 32, COLUMNS = 2 * OUTS, SUMS = COLUMNS / 2; // SUMS: of a thread
constexpr int BLOCKS = (OUT_CHANNELS + OUTS - 1) / OUTS, CHUNKS = (IN_CHANNELS + CHANNELS - 1) / CHANNELS;
constexpr int ODD = PW % 2, REACHED = KW / 2 + 1, MATRICES = KH * REACHED; // REACHED: lines of a row
constexpr int BACK = PH * LINE_PITCH + (PW + ODD) / 2;     // lines that a window reaches back
constexpr int FORTH = (KH - 1) * LINE_PITCH + REACHED - 1; // from its first to its last one
constexpr int PLANES = CHANNELS / CHUNK_ELEMENTS, STEPS = PLANES / 2, GRADIENT_STAGES = 2;
constexpr int FILTERS_OF_WORD = CHUNK_ELEMENTS / 2;
typedef PooledGradients<IN_CHANNELS, IN_ROWS, IN_COLUMNS> Gradients;
typedef Planes<(TILE + FORTH + 7) / 8 * 8, PLANES> OfGradients;
typedef Planes<BF16X3_TERMS * COLUMNS, 2 * PLANES, 1> OfWeights; // columns of the first pieces, of the second, of the third
typedef TileStages<GRADIENT_STAGES, TILE_STAGES, GATHERERS, CONSUMERS> Stages;

// A stage of the gradient: its pieces, then for each plane and line what wgmma is told of its positions.
constexpr int GRADIENT_STAGE = OfGradients::SIZE + PLANES * OfGradients::LINES * 2; // bytes
static_assert(GRADIENT_STAGE % CHUNK_BYTES == 0, "stages begin at words");
static_assert(SHARED_BYTES >= 128 + GRADIENT_STAGES * GRADIENT_STAGE + TILE_STAGES * OfWeights::SIZE, "dynamic shared memory");
#ifdef WEIGHT_BYTES
static_assert(WEIGHT_BYTES >= (int64_t)BLOCKS * CHUNKS * MATRICES * OfWeights::SIZE, "scratch");
#endif

// Weights to scratch, in the order in which stages want them.
KERNEL cut_weights(const T *g, const int32_t *where, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    constexpr int WORDS = OfWeights::PLANES * COLUMNS; // of a matrix
    const Weights weights = {w};
    for (int i = grid_index(); i < BLOCKS * CHUNKS * MATRICES * WORDS; i += grid_size()) {
        const int column = i % COLUMNS, plane = i / COLUMNS % OfWeights::PLANES, stage = i / WORDS;
        const int chunk = stage / MATRICES % CHUNKS, down = stage % MATRICES / REACHED, e = stage % REACHED;
        const int out = stage / (MATRICES * CHUNKS) * OUTS + column % OUTS, side = column / OUTS;
        float found[CHUNK_ELEMENTS];
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) {
            const int filter = chunk * CHANNELS + plane * FILTERS_OF_WORD + j / 2, right = 2 * e + j % 2 - side;
            const bool inside = right >= 0 && right < KW && out < OUT_CHANNELS && filter < IN_CHANNELS;
            found[j] = inside ? weights.at(out, filter, down * KW + right) : 0;
        }
        Chunk words[BF16X3_TERMS];
        split_bf16x3(words, found);
        #pragma unroll
        for (int p = 0; p < BF16X3_TERMS; p++)
            *(Chunk *)(scratch + (int64_t)stage * OfWeights::SIZE + OfWeights::offset(0, plane, p * COLUMNS + column)) = words[p];
    }
}

// Puts what Gathering finds to its place in a stage.
struct Put {
    char *to;

    __device__ __forceinline__ void operator()(
        int plane, int line, const Chunk (&words)[BF16X3_TERMS], uint32_t which) const {
        #pragma unroll
        for (int p = 0; p < TERMS_USED; p++) *(Chunk *)(to + OfGradients::offset(p, plane, line)) = words[p];
        // Two channels are four k of which wgmma takes two: two bits each, 0 or 1 of the first one, 2 or 3 of the second.
        uint32_t code = (which | which << 4) & 0x0f0f;
        code = (code | code << 2) & 0x3333;
        code = (code | code << 1) & 0x5555;
        *(uint16_t *)(to + OfGradients::SIZE + (plane * OfGradients::LINES + line) * 2) = code | 0x8888;
    }
};

struct Sums {
    float main[SUMS];

    // Starts the products of a piece of the gradient and one of the weights, and as many more as there are sums for.
    template <int COUNT> static __device__ __forceinline__ void start_products(float (&sums)[COUNT], uint64_t a, uint64_t b,
        const uint32_t (&which)[STEPS], TermPair pieces, bool add) {
        #pragma unroll
        for (int k = 0; k < STEPS; k++)
            wgmma_sparse<false, false>(sums, a + OfGradients::offset(pieces.a, 2 * k, 0) / CHUNK_BYTES,
                b + OfWeights::offset(0, 4 * k, pieces.b * COLUMNS) / CHUNK_BYTES, which[k], add || k > 0);
    }

    __device__ __forceinline__ void multiply(Stages &stages, const char *gradients, const char *weights, int team,
        PipelineState<GRADIENT_STAGES> &gradient, PipelineState<TILE_STAGES> &weight) {
        float large[SUMS], others[2 * SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        for (int chunk = 0; chunk < CHUNKS; chunk++, gradient.advance()) {
            stages.images[gradient.stage].wait(gradient.phase);
            const char *stage = gradients + gradient.stage * GRADIENT_STAGE;
            for (int i = 0; i < MATRICES; i++, weight.advance()) {
                const int line = team * ROWS + i / REACHED * LINE_PITCH + i % REACHED;
                stages.weights[weight.stage].wait(weight.phase);
                const uint64_t a = smem_descriptor(stage + line * CHUNK_BYTES, OfGradients::PLANE, CORE_MATRIX_BYTES, NO_SWIZZLE);
                const uint64_t b = smem_descriptor(
                    weights + weight.stage * OfWeights::SIZE, OfWeights::PLANE, CORE_MATRIX_BYTES, NO_SWIZZLE);
                uint32_t which[STEPS]; // see wgmma_sparse: of a plane, of this thread's rows
                #pragma unroll
                for (int k = 0; k < STEPS; k++) {
                    const uint16_t *codes = (const uint16_t *)(stage + OfGradients::SIZE) +
                        (2 * k + threadIdx.x % 2) * OfGradients::LINES + line;
                    which[k] = codes[accumulator_row(0)] | (uint32_t)codes[accumulator_row(2)] << 16;
                }
                wgmma_fence();
                start_products(large, a, b, which, {0, 0}, false);
                wgmma_commit_group();
                if (TERMS_USED > 1) {
                    start_products(others, a, b, which, {0, 1}, chunk + i > 0);
                    start_products(others, a, b, which, {1, 0}, true);
                }
                wgmma_commit_group();
                wgmma_wait_group<1>();
                wgmma_fence_operand(large);
                #pragma unroll
                for (int j = 0; j < SUMS; j++) main[j] += large[j];
                if (TERMS_USED == 3) {
                    wgmma_fence();
                    start_products(large, a, b, which, {2, 0}, false);
                    wgmma_commit_group();
                }
                wgmma_wait_group<0>(); // before `which` changes
                wgmma_fence_operand(large);
                wgmma_fence_operand(others);
                if (TERMS_USED == 3)
                    #pragma unroll
                    for (int j = 0; j < SUMS; j++) others[SUMS + j] += large[j];
                arrive_per_warp(stages.weights_read[weight.stage]);
            }
            arrive_per_warp(stages.images_read[gradient.stage]);
        }
        if (TERMS_USED == 1) return;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] += others[i] + others[SUMS + i];
    }
};

// The two outputs of a line.
struct Outputs {
    int image, y, x;

    __device__ explicit Outputs(int line)
        : image(line / IMAGE_LINES), y(line % IMAGE_LINES / LINE_PITCH), x(line % LINE_PITCH * 2 - ODD) {}
    __device__ __forceinline__ bool inside(int batch, int side) const {
        return image < batch && y < OUT_ROWS && (unsigned)(x + side) < OUT_COLUMNS;
    }
    __device__ __forceinline__ int index(int channel, int side) const {
        return ((image * OUT_CHANNELS + channel) * OUT_ROWS + y) * OUT_COLUMNS + x + side;
    }
};

// An output by plain multiply-adds.
__device__ __noinline__ T plain(const Gradients &gradients, const T *w, const Outputs &out, int channel, int side) {
    const Weights weights = {w};
    T sum = 0;
    for (int filter = 0; filter < IN_CHANNELS; filter++) {
        for (int tap = 0; tap < TAPS; tap++) {
            const int from = gradients.at(out.image, filter, out.y + tap / KW - PH, out.x + side + tap % KW - PW);
            if (from >= 0) sum = fma(rounded(gradients.g[from]), rounded(weights.at(channel, filter, tap)), sum);
        }
    }
    return sum;
}

// Of a channel's lane, asks for what the epilogue reads beside the outputs of a tile.
__device__ __forceinline__ void ask(const Epilogue &out, int batch, int channel, int line) {
    for (int image = line / IMAGE_LINES; image < batch && image * IMAGE_LINES < line + TILE; image++) {
        const int from = max(line - image * IMAGE_LINES, 0) / LINE_PITCH;
        const int to = min((line + TILE - 1 - image * IMAGE_LINES) / LINE_PITCH + 1, OUT_ROWS);
        if (channel < OUT_CHANNELS && from < to)
            out.prefetch(((image * OUT_CHANNELS + channel) * OUT_ROWS + from) * OUT_COLUMNS, (to - from) * OUT_COLUMNS);
    }
}

// Hands the sums of OUTS channels from `channel` on and ROWS lines from `line` on to the epilogue, which is asked for what it
// reads beside those of a row before the first is written. Pieces make NaN of infinities: what is not finite is computed
// again.
__device__ __forceinline__ void write(
    const float (&sums)[SUMS], const Gradients &gradients, const T *w, const Epilogue &epilogue, int channel, int line) {
    constexpr int EACH = SUMS / 4; // of a thread's two rows, and of a line's two outputs
    const auto own = [&](int i) { return channel + i / 2 * 8 + accumulator_column(i % 2); };
    #pragma unroll
    for (int row = 0; row < 2; row++) {
        const Outputs out(line + accumulator_row(2 * row));
        #pragma unroll
        for (int side = 0; side < 2; side += WIDE_C) {
            const bool inside = out.inside(gradients.images, side);
            Epilogue::Aux<WIDE_C> beside[EACH];
            #pragma unroll
            for (int i = 0; i < EACH; i++)
                if (inside && own(i) < OUT_CHANNELS)
                    beside[i] = epilogue.load_aux<WIDE_C>(
                        out.image, own(i), out.y * OUT_COLUMNS + out.x + side, out.index(own(i), side));
            #pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (!inside || own(i) >= OUT_CHANNELS) continue;
                T value[WIDE_C];
                #pragma unroll
                for (int k = 0; k < WIDE_C; k++) {
                    value[k] = sums[(side + k) * (SUMS / 2) + i / 2 * 4 + row * 2 + i % 2];
                    if (!finite(value[k])) value[k] = plain(gradients, w, out, own(i), side + k);
                }
                epilogue.write(beside[i], out.index(own(i), side), value);
            }
        }
    }
}

KERNEL __launch_bounds__(THREADS, 1) conv_pooled_input_grad(
    const T *g, const int32_t *where, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Gradients gradients = {g, where, (int)batch};
    const int tiles = parts(batch * IMAGE_LINES, TILE) * BLOCKS, own = parts(tiles - (int)blockIdx.x, gridDim.x);
    const auto channel = [&](int i) { return (blockIdx.x + i * gridDim.x) % BLOCKS * OUTS; };
    const auto line = [&](int i) { return (int)((blockIdx.x + i * gridDim.x) / BLOCKS * TILE); };
    char *of_gradients = aligned_shared<128>();
    char *of_weights = of_gradients + GRADIENT_STAGES * GRADIENT_STAGE;
    __shared__ Stages stages;
    if (threadIdx.x == 0) stages.init();
    __syncthreads();
    PipelineState<GRADIENT_STAGES> gradient;
    PipelineState<TILE_STAGES> weight;
    if (threadIdx.x < BRINGING) {
        warpgroup_reg_dealloc<72>();
        if (threadIdx.x < WARP) {
            for (int i = 0; i < own; i++) {
                ask(epilogue, batch, channel(i) + threadIdx.x, line(i));
                constexpr int COUNT = CHUNKS * MATRICES;
                if (threadIdx.x == 0)
                    stages.bring<OfWeights::SIZE, COUNT>(
                        weight, of_weights, scratch + (int64_t)channel(i) / OUTS * COUNT * OfWeights::SIZE);
                __syncwarp();
            }
        } else {
            Gathering<OfGradients, GATHERERS, Gradients> gathering = {gradients, (int)threadIdx.x - WARP};
            const auto start = [&](int i) {
                if (i < own * CHUNKS) gathering.start(line(i / CHUNKS) - BACK, i % CHUNKS * CHANNELS);
            };
            start(0);
            #pragma unroll 1
            for (int i = 0; i < own * CHUNKS; i++, gradient.advance()) {
                stages.images_read[gradient.stage].wait(gradient.phase ^ 1);
                gathering.finish(Put{of_gradients + gradient.stage * GRADIENT_STAGE});
                fence_proxy_async();
                arrive_per_warp(stages.images[gradient.stage]);
                start(i + 1);
            }
        }
    } else {
        warpgroup_reg_alloc<184>();
        const int team = __shfl_sync(FULL_MASK, (threadIdx.x - BRINGING) / WARPGROUP, 0); // of a whole warp, as the compiler sees
        for (int i = 0; i < own; i++) {
            Sums sums;
            sums.multiply(stages, of_gradients, of_weights, team, gradient, weight);
            write(sums.main, gradients, w, epilogue, channel(i), line(i) + team * ROWS);
        }
    }
}
