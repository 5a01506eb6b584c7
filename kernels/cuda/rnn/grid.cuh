// Recurrent networks whose weight does not fit into a cluster: a step is a matrix product by WGMMA in fp16x2.
//
// TILE_ROWS rows of the batch are a group. PARTS blocks compute a group, from the first to the last step in one launch, and
// wait for each other between steps by counters in global memory (sm90/grid_sync.cuh). The operands of a product are weight_hh
// and what the blocks exchange, states or cotangents. They are in scratch, scaled, split into two float16 terms
// (common/rounding.cuh) and packed: a packed tile has all terms of TILE_K elements of each row, in the 128-byte swizzle of WGMMA.
// It is contiguous, so a bulk copy loads it. One thread of a block copies; two warpgroups multiply, each half of the rows, and
// compute the formulas from their accumulators.
//
// A row of the weight has one scale. A row of hidden states has one for all steps, since no hidden state is larger than 1 or the
// largest one before the first step. A row of cotangents has a scale for each SCALE_K elements, because each block computes
// another part of the row. Elements of at least 2^-15 of the largest one keep 22 bits; smaller ones have errors of up to 2^-40 of
// the largest. In tf32 and bfloat16 an operand is one term, of 11 bits.
//
// Macros (GridDivision in recurrent.py): HIDDEN, TILE_N (columns of a product in a block), SPLITS (blocks that divide K of
// one tile), OPERAND_TERMS, GRADIENT, WEIGHT_GRAD (rnn/grid_weight_grad.cu follows the gradient), LSTM, GRU, RELU, GATED.
#pragma once
#include "common/collectives.cuh"
#include "common/rounding.cuh"
#include "rnn/cells.cuh"
#include "sm90/grid_sync.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

constexpr int SUMS_OF_STEP = GATES * HIDDEN;
constexpr int TILE_ROWS = 128, TILE_K = 64, STAGES = 3;
constexpr int TERMS = OPERAND_TERMS, TERM_PAIRS = TERMS == 2 ? 3 : 1; // products of terms: low x high, high x low, high x high
constexpr int SCALE_K = GRADIENT && GATES % 2 == 1 ? 32 : 64; // of 32 units of one gate, or of two
constexpr int CONSUMER_THREADS = 2 * WARPGROUP, CONSUMER_WARPS = CONSUMER_THREADS / WARP, THREADS = WARPGROUP + CONSUMER_THREADS;
constexpr int SUMS = TILE_N / 2; // accumulators of a thread
constexpr int CHUNK_ELEMENTS = 8, CHUNKS = TILE_K / CHUNK_ELEMENTS; // of a row of a packed tile
typedef Vector<uint32_t, 4> Chunk;                                  // of one term
constexpr int TERM_A = TILE_ROWS * 128, TERM_B = TILE_N * 128;      // bytes of a term of a packed tile
constexpr int SCALES = 2 * TILE_ROWS * sizeof(float); // bytes: of each row two, or one and padding
constexpr int TILE_A = TERMS * TERM_A + SCALES, TILE_B = TERMS * TERM_B, STAGE = TILE_A + TILE_B;
typedef Pipeline<STAGES> TilePipeline;
static_assert(sizeof(TilePipeline) <= PIPELINE_BYTES, "the barriers fit");
constexpr int WEIGHT_GRAD_TILE = 128; // rows and columns of a tile of the gradient of weight_hh
constexpr int WEIGHT_GRAD_TILES = WEIGHT_GRAD ? SUMS_OF_STEP / WEIGHT_GRAD_TILE * (HIDDEN / WEIGHT_GRAD_TILE) : 0;

// What rnn/grid_weight_grad.cu reads: for each step of each group of rows packed tiles, of the cotangents of the sums and then of
// the hidden states before the step. SCALED_ROWS rows of SCALED_COLUMNS columns have one scale. For the biases, of each consumer
// warp of each group: the cotangents of the sums, and of the input of a GRU's candidate, added over the warp's rows and all
// steps.
struct WeightGradInputs {
    static constexpr int SCALED_ROWS = 64, SCALED_COLUMNS = 32;
    static constexpr int COLUMNS = SUMS_OF_STEP + HIDDEN, FIRST_STATE = SUMS_OF_STEP / CHUNK_ELEMENTS; // a chunk
    static constexpr int TILE = TERMS * TERM_A;
    static constexpr int BIAS_COLUMNS = SUMS_OF_STEP + (GRU ? HIDDEN : 0);
    int64_t steps; // those of one group after those of another
    int groups;
    char *scratch;

    // Tile i of a step.
    __device__ __forceinline__ char *tile(int64_t step, int i) const {
        return SCRATCH_TILES(char[TILE], scratch, groups, steps)[step * (COLUMNS / TILE_K) + i];
    }
    // The inverse scales of the first or the second SCALED_ROWS rows.
    __device__ __forceinline__ float *inverse_scales(int64_t step, int half) const {
        return SCRATCH_SCALES(float, scratch, groups, steps) + (step * 2 + half) * (COLUMNS / SCALED_COLUMNS);
    }
    __device__ __forceinline__ float *bias_sums(int group, int warp) const {
        return SCRATCH_BIAS_SUMS(float, scratch, groups, steps) + (int64_t)(group * CONSUMER_WARPS + warp) * BIAS_COLUMNS;
    }
    __device__ __forceinline__ float4 *partials() const { return SCRATCH_WEIGHT_GRAD_SUMS(float4, scratch, groups, steps); }
};

// Scratch: the counters of each group, packed tiles of the weight (TILES times K), for each group two buffers of packed tiles
// of what the blocks exchange (K) and of partial sums of tiles where K is divided, and the inverse scales of the weight's packed
// rows. A block stores in one buffer while others may still read the other. With WEIGHT_GRAD also the counters of
// rnn/grid_weight_grad.cu, what it reads, and its partial sums.
template <int TILES, int K> struct Layout {
    static constexpr int K_TILES = K / TILE_K;
    static constexpr int PARTS = TILES * SPLITS, PART_K = K / PARTS; // the blocks of a group; of K, what a block stores
    static constexpr int COUNTERS = PARTS + (SPLITS > 1 ? TILES : 0); // of a group
    int groups;
    char *scratch;

    __device__ Layout(int64_t rows, char *scratch) : groups((rows + TILE_ROWS - 1) / TILE_ROWS), scratch(scratch) {}
    // For how many steps a block has stored its part of what the blocks exchange.
    __device__ __forceinline__ int *exchanges(int group, int part) const { return SCRATCH_COUNTERS(int, scratch, groups, 0) + group * COUNTERS + part; }
    // How many partial sums of a tile have been stored, of all steps.
    __device__ __forceinline__ int *partials(int group, int tile) const { return exchanges(group, PARTS + tile); }
    __device__ __forceinline__ int *weight_grad_counters() const { return exchanges(groups, 0); }
    __device__ __forceinline__ int all_counters() const { return groups * COUNTERS + WEIGHT_GRAD_TILES; }
    __device__ __forceinline__ char *weight(int tile, int k_tile) const {
        return SCRATCH_WEIGHT(char[TILE_B], scratch, groups, 0)[tile * K_TILES + k_tile];
    }
    __device__ __forceinline__ char *exchanged(int group, int buffer, int k_tile) const {
        return SCRATCH_EXCHANGED(char[TILE_A], scratch, groups, 0)[(group * 2 + buffer) * K_TILES + k_tile];
    }
    // Waits until packed tile k_tile of what the blocks exchange has been stored for this many steps.
    __device__ __forceinline__ void wait_for_exchanged(int group, int k_tile, int steps) const {
        for (int part = k_tile * TILE_K / PART_K; part * PART_K < (k_tile + 1) * TILE_K; part++)
            wait_for_count(exchanges(group, part), steps);
        fence_proxy_async_global();
    }
    // The partial sums of split `from` that block `to` of a tile adds: (SUMS / SPLITS / 4) x CONSUMER_THREADS float4.
    __device__ __forceinline__ float4 *partial(int group, int buffer, int tile, int to, int from) const {
        const int64_t at = ((int64_t)((group * 2 + buffer) * TILES + tile) * SPLITS + to) * SPLITS + from;
        return SCRATCH_PARTIAL_SUMS(float4[TILE_ROWS * TILE_N / 4 / SPLITS], scratch, groups, 0)[at];
    }
    __device__ __forceinline__ float *inverse_scales(int tile) const {
        return SCRATCH_INVERSE_SCALES(float, scratch, groups, 0) + tile * TILE_N;
    }
    __device__ __forceinline__ WeightGradInputs weight_grad(int64_t length) const {
        return {length * groups, groups, scratch};
    }
};

// The hidden units of a thread: in each row, of 32 units, a chunk of two vectors of four neighbours. Lanes with neighbouring
// chunks have neighbouring vectors. The rows of the packed weight, columns of accumulators, are in this order.
__device__ __forceinline__ int unit_of_chunk(int chunk, int j) { return chunk / 4 * 32 + j / 4 * 16 + chunk % 4 * 4 + j % 4; }
__device__ __forceinline__ int unit_of_column(int column) {
    return unit_of_chunk(column / 32 * 4 + column % 8 / 2, column % 32 / 8 * 2 + column % 2);
}
// The same of the sums of a step: those of 32 units, one gate after another, then those of the next 32 units.
__device__ __forceinline__ int sum_of_chunk(int chunk, int j) {
    return chunk / 4 % GATES * HIDDEN + unit_of_chunk(chunk / 4 / GATES * 4 + chunk % 4, j);
}

__device__ __forceinline__ float inverse_power_of_two(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }

// The largest magnitude of the elements, or `largest`.
__device__ __forceinline__ float largest_of(const float (&x)[CHUNK_ELEMENTS], float largest = 0) {
    #pragma unroll
    for (float element : x) largest = Max::of(largest, fabsf(element));
    return largest;
}

// Scales a chunk of a row, splits it into its terms and stores them in a packed tile.
__device__ __forceinline__ void store_chunk(
    char *tile, int term_bytes, int row, int chunk, const float (&x)[CHUNK_ELEMENTS], float scale) {
    Chunk terms[TERMS];
    #pragma unroll
    for (int i = 0; i < CHUNK_ELEMENTS / 2; i++) {
        uint32_t words[TERMS];
        split_terms<FLOAT16>(x[2 * i] * scale, x[2 * i + 1] * scale, words);
        #pragma unroll
        for (int p = 0; p < TERMS; p++) terms[p].lane[i] = words[p];
    }
    #pragma unroll
    for (int p = 0; p < TERMS; p++) *(Chunk *)(tile + p * term_bytes + swizzle_128b(row, chunk)) = terms[p];
}

// The inverse scale of a row's elements SCALE_K part to SCALE_K (part + 1) - 1 in a packed tile of what the blocks exchange.
__device__ __forceinline__ float &inverse_scale(char *tile, int part, int row) {
    return ((float *)(tile + TERMS * TERM_A))[part * TILE_ROWS + row];
}

// Stores a chunk of what the blocks exchange. The scale is that of the row's SCALE_K elements to which it belongs.
__device__ __forceinline__ void store_exchanged(
    char *tile, int row, int chunk, const float (&x)[CHUNK_ELEMENTS], float scale, float inverse) {
    constexpr int SCALED = SCALE_K / CHUNK_ELEMENTS;
    store_chunk(tile, TERM_A, row, chunk, x, scale);
    if (chunk % SCALED == 0) inverse_scale(tile, chunk / SCALED, row) = inverse;
}

// The block's shared memory: stages, numbers that are kept, the inverse scales of the product's columns, maxima of warps, then the
// barriers of the stages.
struct Stages {
    char *at = SHARED_STAGES(char[STAGE], shared_bytes)[0];

    __device__ __forceinline__ float *column_scales() const { return SHARED_COLUMN_SCALES(float, shared_bytes); }
    // The maxima of a warpgroup's warps, two each.
    __device__ __forceinline__ float *maxima(int warpgroup) const {
        return SHARED_MAXIMA(float, shared_bytes) + warpgroup * CONSUMER_WARPS;
    }
    __device__ __forceinline__ TilePipeline &pipeline() const { return *(TilePipeline *)SHARED_PIPELINE(char, shared_bytes); }
    // Numbers 4 i to 4 i + 3 that this thread keeps between steps: of the cell states of an LSTM, in the gradient of their
    // cotangents; in the gradient of a GRU, of the part of the cotangents of hidden states that does not go through s. Eight of a
    // row follow each other.
    __device__ __forceinline__ Vector<T, 4> &kept(int i) const {
        return ((Vector<T, 4> *)SHARED_KEPT(T, shared_bytes))[i * CONSUMER_THREADS + threadIdx.x - WARPGROUP];
    }
    __device__ __forceinline__ uint64_t a(int stage, int term) const {
        return smem_descriptor(at + stage * STAGE + term * TERM_A + (threadIdx.x / WARPGROUP - 1) * (TERM_A / 2));
    }
    __device__ __forceinline__ uint64_t b(int stage, int term) const {
        return smem_descriptor(at + stage * STAGE + TILE_A + term * TERM_B);
    }
    // The inverse scale of part `part` of this thread's first row (of accumulators 0 and 1) or its second.
    __device__ __forceinline__ float row_scale(int stage, int part, int half) const {
        return inverse_scale(at + stage * STAGE, part, (threadIdx.x / WARPGROUP - 1) * 64 + accumulator_row(2 * half));
    }
};

// By one thread: copies packed tiles a(i) (states or cotangents) and b(i) (weight) of a step. ready(i) waits until other blocks
// have written the former; the first tiles of the weight are copied before it.
template <class A, class B, class Ready> __device__ __forceinline__ void produce(
    const Stages &stages, PipelineState<STAGES> &state, int k_tiles, A a, B b, Ready ready) {
    TilePipeline &pipeline = stages.pipeline();
    PipelineState<STAGES> next = state; // the stage of the next tile of the weight
    const auto copy_weight = [&](int i) {
        Mbarrier &full = pipeline.expect(next, STAGE);
        bulk_copy<TILE_B>(stages.at + next.stage * STAGE + TILE_A, b(i), full);
        next.advance();
    };
    const int first = min(STAGES, k_tiles);
    for (int i = 0; i < first; i++) copy_weight(i);
    for (int i = 0; i < k_tiles; i++, state.advance()) {
        ready(i);
        if (i >= first) copy_weight(i);
        bulk_copy<TILE_A>(stages.at + state.stage * STAGE, a(i), pipeline.full[state.stage]);
    }
}

// Whether a product of terms has the low term of its first operand, or of its second one.
__device__ constexpr bool low_of_a(int pair) { return TERMS == 2 && pair == 0; }
__device__ constexpr bool low_of_b(int pair) { return pair == 1; }

// main += the product of a step, by a consumer warpgroup. Its columns keep their scales. Tensor cores truncate when they add,
// so they sum the products over SCALE_K only, the smallest first; float32 additions sum the results.
__device__ __forceinline__ void multiply(
    const Stages &stages, PipelineState<STAGES> &state, int k_tiles, float (&main)[SUMS]) {
    TilePipeline &pipeline = stages.pipeline();
    for (int i = 0; i < k_tiles; i++, state.advance()) {
        pipeline.wait_full(state);
        #pragma unroll
        for (int part = 0; part < TILE_K / SCALE_K; part++) {
            float sums[SUMS];
            wgmma_fence();
            #pragma unroll
            for (int pair = 0; pair < TERM_PAIRS; pair++)
                #pragma unroll
                for (int k = 0; k < SCALE_K / 16; k++) {
                    const int at = (part * (SCALE_K / 16) + k) * DESCRIPTOR_K_STEP;
                    const uint64_t a = stages.a(state.stage, low_of_a(pair)) + at;
                    const uint64_t b = stages.b(state.stage, low_of_b(pair)) + at;
                    wgmma<FP16X2>(sums, a, b, pair + k > 0);
                }
            wgmma_commit_group();
            const float scales[] = {stages.row_scale(state.stage, part, 0), stages.row_scale(state.stage, part, 1)};
            wgmma_wait_group<0>();
            wgmma_fence_operand(sums);
            if (part == TILE_K / SCALE_K - 1) arrive_per_warp(pipeline.empty[state.stage]); // lanes have read scales
            #pragma unroll
            for (int j = 0; j < SUMS; j++) main[j] = fma(sums[j], scales[j / 2 % 2], main[j]);
        }
    }
}

// Returns x. The compiler does not know that the result is x, so it does not compute addresses from it before a loop, which it
// would hold in registers.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// The maxima of two numbers over this thread's consumer warpgroup.
__device__ __forceinline__ Vector<float, 2> largest_of_warpgroup(const Stages &stages, float first, float second) {
    const int warpgroup = threadIdx.x / WARPGROUP - 1;
    float *const maxima = stages.maxima(warpgroup);
    const Vector<float, 2> of_warp = {over_lanes<Max, WARP>(first), over_lanes<Max, WARP>(second)};
    if (threadIdx.x % WARP == 0) store<float, 2>(maxima, threadIdx.x % WARPGROUP / WARP * 2, of_warp);
    named_barrier_sync(WARPGROUP, 2 + warpgroup);
    Vector<float, 2> found = of_warp;
    #pragma unroll
    for (int i = 0; i < WARPGROUP / WARP; i++)
        for (int e = 0; e < 2; e++) found.lane[e] = Max::of(found.lane[e], maxima[2 * i + e]);
    return found;
}

// By all consumer threads: brings the inverse scales of the product's columns to shared memory.
__device__ __forceinline__ void load_column_scales(const Stages &stages, const float *from) {
    const int thread = threadIdx.x - WARPGROUP;
    if (thread < TILE_N) stages.column_scales()[thread] = from[thread];
    named_barrier_sync(CONSUMER_THREADS);
}

// By all consumer threads: makes what they have written to scratch visible to the blocks that wait at this counter.
__device__ __forceinline__ void publish(int *counter) {
    fence_proxy_async_global();
    named_barrier_sync(CONSUMER_THREADS);
    if (threadIdx.x == WARPGROUP) arrive_at(counter);
}

