// Attention in bfloat16 by WGMMA: see wgmma_attention.cuh. Persistent and warp-specialised: one block for
// each multiprocessor goes from tile to tile of BLOCK_Q queries. One thread issues copies; each of CONSUMERS warpgroups
// computes 64 queries. The product for the scores of the next keys overlaps the softmax of the current ones. The warpgroups
// also take turns, so that one multiplies while another one computes exponentials.
//
// Macros: also QUERY_STAGES of q, KEY_STAGES of k and of v, CONSUMERS = BLOCK_Q / 64, HEAD_GROUP: heads whose tiles are computed at
// the same time.
#include "attention/wgmma_scratch.cuh"
#include "attention/wgmma_attention.cuh"

constexpr int CONSUMERS = BLOCK_Q / 64, CONSUMER_WARPS = 4 * CONSUMERS, THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int Q_BYTES = TILE_BYTES<BLOCK_Q>, K_BYTES = TILE_BYTES<BLOCK_K>;
constexpr int SCORES = BLOCK_K / 2; // accumulators of a thread

struct SharedTiles {
    char *q, *k, *v;

    __device__ __forceinline__ SharedTiles() {
        q = SHARED_Q(char[Q_BYTES], shared_bytes)[0], k = SHARED_K(char[K_BYTES], shared_bytes)[0], v = SHARED_V(char[K_BYTES], shared_bytes)[0];
    }
};

struct Barriers {
    Pipeline<QUERY_STAGES> q;
    Pipeline<KEY_STAGES> k, v;
};

// A tile of queries of a head, and the keys that it attends to.
struct QueryTile {
    int64_t head;
    int first, key_tiles;

    __device__ __forceinline__ QueryTile(int number, int batch, int queries, int keys) {
        const int tiles = (queries + BLOCK_Q - 1) / BLOCK_Q, group = number / (tiles * HEAD_GROUP) * HEAD_GROUP;
        const int in_group = number % (tiles * HEAD_GROUP), heads = min(HEAD_GROUP, batch - group);
        const int tile = in_group / heads;
        head = group + in_group % heads;
        first = (CAUSAL ? tiles - 1 - tile : tile) * BLOCK_Q; // the longest rows start first
        const int end = CAUSAL ? min(keys, first + BLOCK_Q) : keys;
        key_tiles = (end + BLOCK_K - 1) / BLOCK_K;
    }
};

// The producer thread: issues the copies for all tiles of this block. Key tiles go from the last to the first one.
static __device__ __forceinline__ void produce(
    const Inputs &inputs, Barriers &barriers, const SharedTiles &shared, int tiles, int batch, int queries, int keys) {
    PipelineState<QUERY_STAGES> at_q;
    PipelineState<KEY_STAGES> at;
    for (int round = 0, number; (number = tile_of_round(round)) < tiles; round++, at_q.advance()) {
        const QueryTile tile(number, batch, queries, keys);
        load_stage<BLOCK_Q>(inputs.q, barriers.q, at_q, shared.q, tile.head, tile.first);
        #pragma unroll 1
        for (int i = tile.key_tiles - 1; i >= 0; i--, at.advance()) {
            load_stage<BLOCK_K>(inputs.k, barriers.k, at, shared.k, tile.head, (int64_t)i * BLOCK_K);
            load_stage<BLOCK_K>(inputs.v, barriers.v, at, shared.v, tile.head, (int64_t)i * BLOCK_K);
        }
    }
}

// The turns of the consumer warpgroups: a named barrier for each, at which its predecessor arrives.
struct Turns {
    int own;

    __device__ __forceinline__ void start() const {
        if (own == CONSUMERS - 1) pass();
    }
    __device__ __forceinline__ void wait() const { named_barrier_sync(2 * WARPGROUP, 1 + own); }
    __device__ __forceinline__ void pass() const { named_barrier_arrive(2 * WARPGROUP, 1 + (own + 1) % CONSUMERS); }
    __device__ __forceinline__ void finish() const { // takes the last arrival
        if (own == 0) wait();
    }
};

// A consumer warpgroup.
static __device__ __forceinline__ void consume(Barriers &barriers, const SharedTiles &shared, S *out, T *logsumexp,
    int tiles, int batch, int heads, int queries, int keys, int64_t out_row, float scale) {
    const Turns turns = {uniform_warpgroup() - 1};
    PipelineState<QUERY_STAGES> at_q;
    PipelineState<KEY_STAGES> at_k, at_v;
    turns.start();
    for (int round = 0, number; (number = tile_of_round(round)) < tiles; round++, at_q.advance()) {
        const QueryTile tile(number, batch, queries, keys);
        const int first = tile.first + turns.own * 64;
        float scores[SCORES], outputs[OUTPUTS] = {};
        uint32_t weights[SCORES / 2];
        RunningSoftmax<SCORES> softmax;

        const auto start_products = [&] {
            const char *q = shared.q + at_q.stage * Q_BYTES, *k = shared.k + at_k.stage * K_BYTES;
            start_scores<BLOCK_Q, BLOCK_K>(scores, q, turns.own * 64, k);
        };
        const auto start_outputs = [&] { start_sums<BLOCK_K>(outputs, weights, shared.v + at_v.stage * K_BYTES, true); };
        barriers.q.wait_full(at_q);
        barriers.k.wait_full(at_k);
        turns.wait();
        start_products();
        turns.pass();
        wgmma_wait_group<0>();
        wgmma_fence_operand(scores);
        barriers.k.release(at_k.stage);
        at_k.advance();
        mask(scores, first, (tile.key_tiles - 1) * BLOCK_K, keys);
        softmax.update(scores, scale);
        to_bfloat16(scores, weights);

        for (int i = tile.key_tiles - 2; i >= 0; i--) {
            barriers.k.wait_full(at_k);
            turns.wait();
            start_products();
            barriers.v.wait_full(at_v);
            start_outputs();
            turns.pass();
            wgmma_wait_group<1>();
            wgmma_fence_operand(scores);
            barriers.k.release(at_k.stage);
            at_k.advance();
            mask(scores, first, i * BLOCK_K, keys);
            softmax.update(scores, scale);
            wgmma_wait_group<0>();
            wgmma_fence_operand(outputs);
            barriers.v.release(at_v.stage);
            at_v.advance();
            to_bfloat16(scores, weights);
            softmax.rescale(outputs);
        }
        barriers.q.release(at_q.stage);
        barriers.v.wait_full(at_v);
        start_outputs();
        wgmma_wait_group<0>();
        wgmma_fence_operand(outputs);
        barriers.v.release(at_v.stage);
        at_v.advance();

        const int64_t start = tile.head / heads * queries * out_row + tile.head % heads * HEAD_WIDTH;
        softmax.store_results(
            outputs, scale, first, queries, out + start, out_row, logsumexp + tile.head * queries);
    }
    turns.finish();
}

KERNEL __launch_bounds__(THREADS, 1) attention_wgmma(
    IF(DIRECT, const S *q, const S *k, const S *v, ) S *out, T *logsumexp, int64_t batch, int64_t heads, int64_t queries,
    int64_t keys, IF(DIRECT, int64_t row, int64_t step, ) int64_t out_row, double scale, char *scratch) {
    __shared__ Barriers barriers;
#if DIRECT // nothing before the wait reads memory
    __shared__ HeadMaps in_shared;
    const int warp = threadIdx.x / WARP;
    if (warp == 0) make_map<BLOCK_Q>(in_shared.q, q, batch, heads, queries, row);
    if (warp == 1) make_map<BLOCK_K>(in_shared.k, k + step, batch, heads, keys, row);
    if (warp == 2) make_map<BLOCK_K>(in_shared.v, v + 2 * step, batch, heads, keys, row);
#endif
    wait_for_inputs();
    if (threadIdx.x == 0) {
        barriers.q.init(1, CONSUMER_WARPS);
        barriers.k.init(1, CONSUMER_WARPS);
        barriers.v.init(1, CONSUMER_WARPS);
        fence_mbarrier_init();
    }
    __syncthreads();
    const int tiles = batch * ((queries + BLOCK_Q - 1) / BLOCK_Q);
    const SharedTiles shared;
    if (uniform_warpgroup() == 0) {
        warpgroup_reg_dealloc<CONSUMERS == 2 ? 24 : 32>();
#if DIRECT
        if (threadIdx.x >= WARP) return;
        const Inputs inputs(SCRATCH_MAPS(HeadMaps, scratch)[blockIdx.x], in_shared, heads);
        if (threadIdx.x == 0) produce(inputs, barriers, shared, tiles, batch, queries, keys);
#else
        if (threadIdx.x == 0)
            produce(Inputs(scratch, batch, queries, keys), barriers, shared, tiles, batch, queries, keys);
#endif
    } else {
        warpgroup_reg_alloc<CONSUMERS == 2 ? 240 : 160>();
        consume(barriers, shared, out, logsumexp, tiles, batch, heads, queries, keys, out_row, (float)scale * LOG2_E);
    }
}
