// Recurrent networks whose weight does not fit into a cluster: a step is a matrix product by WGMMA in bf16x3 (sm90/bf16x3.cuh).
//
// TILE_ROWS rows of the batch are a group. PARTS blocks compute a group, from the first to the last step in one launch, and
// wait for each other between steps by counters in global memory (sm90/grid_sync.cuh). The operands of a product are weight_hh
// and what the blocks exchange, states or cotangents. They are in scratch, split into bfloat16 terms and packed: a packed tile
// has the three terms of TILE_K elements of each row, in the 128-byte swizzle of WGMMA. It is contiguous, so a bulk copy loads
// it. One thread of a block copies; two warpgroups multiply, each half of the rows, and compute the formulas from their
// accumulators.
//
// Macros (GridDivision in grid_recurrent.py): HIDDEN, TILE_N (columns of a product in a block), SPLITS (blocks that divide K of
// one tile), GRADIENT, LSTM, GRU, RELU, GATED.
#pragma once
#include "rnn/cells.cuh"
#include "sm90/bf16x3.cuh"
#include "sm90/grid_sync.cuh"
#include "sm90/tma.cuh"

constexpr int SUMS_OF_STEP = GATES * HIDDEN;
constexpr int TILE_ROWS = 128, TILE_K = 64, STAGES = 2;
constexpr int CONSUMER_THREADS = 2 * WARPGROUP, THREADS = WARPGROUP + CONSUMER_THREADS;
constexpr int SUMS = TILE_N / 2; // accumulators of a thread
constexpr int TERM_A = TILE_ROWS * 128, TERM_B = TILE_N * 128; // bytes of a term of a packed tile
constexpr int TILE_A = BF16X3_TERMS * TERM_A, TILE_B = BF16X3_TERMS * TERM_B, STAGE = TILE_A + TILE_B;
typedef Pipeline<STAGES> TilePipeline;
// What a block keeps between steps: the cell states of an LSTM, in the gradient their cotangents; in the gradient of a GRU the
// part of the cotangents of hidden states that does not go through s. KEPT: its bytes.
constexpr int KEPT_UNITS = GRADIENT ? TILE_N / SPLITS : TILE_N / GATES;
constexpr int KEPT = LSTM || (GRU && GRADIENT) ? TILE_ROWS * KEPT_UNITS * sizeof(T) : 0;
constexpr int PIPELINE_BYTES = 64;
constexpr int SHARED = 1024 + STAGES * STAGE + KEPT + PIPELINE_BYTES; // 1024: alignment of the swizzle
static_assert(sizeof(TilePipeline) <= PIPELINE_BYTES, "the barriers fit");
#ifdef SHARED_BYTES
static_assert(SHARED == SHARED_BYTES, "as `GridDivision.shared` in grid_recurrent.py says");
#endif

// Scratch: the counters of each group, packed tiles of the weight (TILES times K), for each group two buffers of packed tiles
// of what the blocks exchange (K), and partial sums of tiles where K is divided.
template <int TILES, int K> struct Layout {
    static constexpr int K_TILES = K / TILE_K;
    static constexpr int64_t WEIGHT = (int64_t)TILES * K_TILES * TILE_B, BUFFER = (int64_t)K_TILES * TILE_A;
    static constexpr int64_t PARTIAL = SPLITS > 1 ? TILE_ROWS * TILE_N * sizeof(float) : 0; // bytes of a split's sums of a tile
    static constexpr int COUNTERS = 1 + TILES; // of a group: one for all of its blocks, and one for the blocks of each tile
    int groups;
    char *scratch;

    __device__ Layout(int64_t rows, char *scratch) : groups((rows + TILE_ROWS - 1) / TILE_ROWS), scratch(scratch) {}
    __device__ __forceinline__ int *counters(int group) const { return (int *)scratch + group * COUNTERS; }
    __device__ __forceinline__ char *weight(int tile, int k_tile) const {
        return scratch + (groups * COUNTERS * (int)sizeof(int) + 1023) / 1024 * 1024 + (int64_t)(tile * K_TILES + k_tile) * TILE_B;
    }
    __device__ __forceinline__ char *exchanged(int group, int buffer, int k_tile) const {
        return weight(TILES, 0) + (group * 2 + buffer) * BUFFER + (int64_t)k_tile * TILE_A;
    }
    // The partial sums of split `from` that block `to` of a tile adds: (SUMS / SPLITS / 4) x CONSUMER_THREADS float4.
    __device__ __forceinline__ float4 *partial(int group, int tile, int to, int from) const {
        const int64_t at = ((int64_t)(group * TILES + tile) * SPLITS + to) * SPLITS + from;
        return (float4 *)(exchanged(groups, 0, 0) + at * (PARTIAL / SPLITS));
    }
};

// The index along K of element j of a packed chunk. Packed tiles permute each 32 of K, so that a chunk holds the units whose
// accumulators, in a row of the product, one thread has.
__device__ __forceinline__ int unit_of_chunk(int chunk, int j) { return chunk / 4 * 32 + j / 2 * 8 + chunk % 4 * 2 + j % 2; }

// Splits a chunk of a row into its terms and stores them in a packed tile.
__device__ __forceinline__ void store_chunk(char *tile, int term_bytes, int row, int chunk, const float (&x)[CHUNK_ELEMENTS]) {
    Chunk terms[BF16X3_TERMS];
    split_bf16x3(terms, x);
    #pragma unroll
    for (int p = 0; p < BF16X3_TERMS; p++) *(Chunk *)(tile + p * term_bytes + swizzle_128b(row, chunk)) = terms[p];
}

// The block's shared memory: stages, numbers that are kept, then the barriers of the stages.
struct Stages {
    char *at;

    __device__ Stages() : at((char *)(((uintptr_t)shared_bytes + 1023) / 1024 * 1024)) {}
    __device__ __forceinline__ TilePipeline &pipeline() const { return *(TilePipeline *)(at + STAGES * STAGE + KEPT); }
    // Kept numbers 4 i to 4 i + 3 of this thread. Eight of a row follow each other.
    __device__ __forceinline__ Vector<T, 4> &kept(int i) const {
        return ((Vector<T, 4> *)(at + STAGES * STAGE))[i * CONSUMER_THREADS + threadIdx.x - WARPGROUP];
    }
    __device__ __forceinline__ uint64_t a(int stage, int term) const {
        return smem_descriptor(at + stage * STAGE + term * TERM_A + (threadIdx.x / WARPGROUP - 1) * (TERM_A / 2));
    }
    __device__ __forceinline__ uint64_t b(int stage, int term) const {
        return smem_descriptor(at + stage * STAGE + TILE_A + term * TERM_B);
    }
};

// By one thread: copies packed tiles a(i) (states or cotangents) and b(i) (weight) of a step. ready() waits until other blocks
// have written the former; the first tile of the weight is copied before it.
template <class A, class B, class Ready> __device__ __forceinline__ void produce(
    const Stages &stages, PipelineState<STAGES> &state, int k_tiles, A a, B b, Ready ready) {
    TilePipeline &pipeline = stages.pipeline();
    for (int i = 0; i < k_tiles; i++, state.advance()) {
        pipeline.wait_empty(state);
        Mbarrier &full = pipeline.full[state.stage];
        full.arrive_expect_tx(STAGE);
        bulk_copy<TILE_B>(stages.at + state.stage * STAGE + TILE_A, b(i), full);
        if (i == 0) ready();
        bulk_copy<TILE_A>(stages.at + state.stage * STAGE, a(i), full);
    }
}

// main += the product of a step, by a consumer warpgroup. Tensor cores truncate when they add, so they sum the products of
// leading terms over TILE_K only; float32 additions sum the results.
__device__ __forceinline__ void multiply(
    const Stages &stages, PipelineState<STAGES> &state, int k_tiles, float (&main)[SUMS]) {
    TilePipeline &pipeline = stages.pipeline();
    float leading[SUMS], low_order[SUMS];
    int last = 0;
    for (int i = 0; i < k_tiles; i++) {
        pipeline.wait_full(state);
        wgmma_fence();
        #pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma<BFLOAT16>(leading, stages.a(state.stage, 0) + k * DESCRIPTOR_K_STEP,
                stages.b(state.stage, 0) + k * DESCRIPTOR_K_STEP, k > 0);
        wgmma_commit_group();
        wgmma_wait_group<1>();
        if (i > 0 && threadIdx.x % WARP == 0) pipeline.empty[last].arrive();
        #pragma unroll
        for (int k = 0; k < 4; k++)
            #pragma unroll
            for (int p = 0; p < LOW_ORDER_PAIRS; p++)
                wgmma<BFLOAT16>(low_order, stages.a(state.stage, low_order_pair(p).a) + k * DESCRIPTOR_K_STEP,
                    stages.b(state.stage, low_order_pair(p).b) + k * DESCRIPTOR_K_STEP, i + k + p > 0);
        wgmma_commit_group();
        wgmma_wait_group<1>();
        wgmma_fence_operand(leading);
        #pragma unroll
        for (int j = 0; j < SUMS; j++) main[j] += leading[j];
        last = state.stage;
        state.advance();
    }
    wgmma_wait_group<0>();
    wgmma_fence_operand(low_order);
    if (threadIdx.x % WARP == 0) pipeline.empty[last].arrive();
    #pragma unroll
    for (int j = 0; j < SUMS; j++) main[j] += low_order[j];
}

// Returns x, and hides its value from the compiler, which would compute addresses from it before a loop and hold them in
// registers.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ void init_pipeline(const Stages &stages) {
    if (threadIdx.x == 0) {
        stages.pipeline().init(1, CONSUMER_THREADS / WARP);
        fence_mbarrier_init();
    }
    __syncthreads();
}

// By all consumer threads: makes what they have written to scratch visible to the blocks that wait at this counter.
__device__ __forceinline__ void publish(int *counter) {
    fence_proxy_async_global();
    named_barrier_sync(CONSUMER_THREADS);
    if (threadIdx.x == WARPGROUP) arrive_at(counter);
}

