// The gradient of attention in bfloat16 by WGMMA: the cotangents of keys and values, and those of queries in the layout of
// accumulators (wgmma_scratch.cuh). Persistent and warp-specialised: a block computes a tile of BLOCK_K keys of a head and
// loops over tiles of BLOCK_Q queries. One thread issues copies; each of two warpgroups computes 64 keys. Its accumulators are
// the transposed scores (keys x queries), which are operands of the next products without leaving registers.
//
// The cotangents of a tile of queries are a sum over the tiles of keys, and so over blocks. Two threads of each block add its
// terms to global memory by bulk copies. The blocks of a head take turns in a fixed order, so each run gives the same bits: see
// KeyTile.
//
// Macros: also QUERY_STAGES: tiles of queries and of cotangents in shared memory; ROTATED.
#include "attention/wgmma_scratch.cuh"
#include "sm90/stmatrix.cuh"
#include "sm90/turn.cuh"

constexpr int CONSUMER_THREADS = 2 * WARPGROUP, CONSUMER_WARPS = CONSUMER_THREADS / WARP, THREADS = 3 * WARPGROUP;
constexpr int Q_BYTES = TILE_BYTES<BLOCK_Q>, K_BYTES = TILE_BYTES<BLOCK_K>, STATS_BYTES = 2 * BLOCK_Q * 4;
constexpr int SCORE_BYTES = BLOCK_Q * BLOCK_K * 2, BY_Q_BYTES = BY_Q_TILE * 4;
constexpr int SCORES = BLOCK_Q / 2, SUMS = PACKED_WIDTH / 2, BY_Q_SUMS = 32; // accumulators of a thread
static_assert(BLOCK_K == 128 && BLOCK_Q * PACKED_WIDTH == 64 * 128, "two warpgroups share the products");
// Whether the product for the cotangents of the values overlaps the arithmetic for those of the scores, which takes registers.
constexpr bool EARLY = BLOCK_Q == 64;
#ifdef SHARED_BYTES // and the alignment of the tiles to 1024
static_assert(2 * K_BYTES + QUERY_STAGES * (2 * Q_BYTES + STATS_BYTES) + 2 * SCORE_BYTES + BY_Q_BYTES + 1024 == SHARED_BYTES,
    "as wgmma.py says");
#endif

struct SharedTiles {
    char *k, *v, *q, *ct, *by_scores, *by_q, *stats;

    __device__ __forceinline__ SharedTiles() {
        k = (char *)(((uintptr_t)shared_bytes + 1023) / 1024 * 1024), v = k + K_BYTES, q = v + K_BYTES;
        ct = q + QUERY_STAGES * Q_BYTES, by_scores = ct + QUERY_STAGES * Q_BYTES, by_q = by_scores + 2 * SCORE_BYTES;
        stats = by_q + BY_Q_BYTES;
    }
};

// `keys`: k and v. `by_q_full`: consumers have stored their sums; one for each adding thread. `by_q_empty`: they are read.
struct Barriers {
    Pipeline<1> keys;
    Pipeline<QUERY_STAGES> q, ct;
    Mbarrier by_q_full[2], by_q_empty;
};

// A tile of keys of a head, and the tiles of queries that attend to it.
//
// The key tiles of a head start at different tiles of queries. A causal one starts at its diagonal. If ROTATED, key tile n of N
// starts at n / N of the tiles of queries and wraps around after the last one. The turns at a tile of queries are the order in
// which key tiles reach it if all start at once: first those that start at it or before, by descending number; then the others,
// by descending number. So blocks hardly wait.
//
// No deadlock: without ROTATED a key tile waits only for larger numbers, which blocks take first. With ROTATED the key tiles of
// a head must be resident at the same time; wgmma.py sets it only where there are no more of them than multiprocessors. Causal
// key tiles are taken by number, over all heads, because those of one number have the same length.
struct KeyTile {
    int64_t head;
    int tiles, number, first, query_tiles, first_tile, steps;

    __device__ __forceinline__ KeyTile(int i, int batch, int queries, int keys) {
        tiles = (keys + BLOCK_K - 1) / BLOCK_K, query_tiles = (queries + BLOCK_Q - 1) / BLOCK_Q;
        head = CAUSAL ? i % batch : i / tiles, number = tiles - 1 - (CAUSAL ? i / batch : i % tiles), first = number * BLOCK_K;
        first_tile = CAUSAL ? first / BLOCK_Q : ROTATED ? number * query_tiles / tiles : 0;
        steps = CAUSAL ? query_tiles - first_tile : query_tiles;
    }
    __device__ __forceinline__ int query_tile(int step) const {
        const int at = first_tile + step;
        return at < query_tiles ? at : at - query_tiles;
    }
    // The number of key tiles that come before this one at a tile of queries.
    __device__ __forceinline__ int turn(int query_tile) const {
        const int begun = CAUSAL ? min(tiles, query_tile * BLOCK_Q / BLOCK_K + 1)
                        : ROTATED ? ((query_tile + 1) * tiles + query_tiles - 1) / query_tiles
                                  : tiles;
        return begun - 1 - number + (number < begun ? 0 : tiles);
    }
};

// The producer thread: issues the copies for all tiles of this block.
static __device__ __forceinline__ void produce(
    const GradientScratch &packed, Barriers &barriers, const SharedTiles &shared, int tiles, int batch, int queries, int keys) {
    PipelineState<1> at_keys;
    PipelineState<QUERY_STAGES> at;
    for (int i = blockIdx.x; i < tiles; i += gridDim.x, at_keys.advance()) {
        const KeyTile tile(i, batch, queries, keys);
        barriers.keys.wait_empty(at_keys);
        barriers.keys.full[0].arrive_expect_tx(2 * K_BYTES);
        packed.k.load<BLOCK_K>(shared.k, tile.head, tile.first, barriers.keys.full[0]);
        packed.v.load<BLOCK_K>(shared.v, tile.head, tile.first, barriers.keys.full[0]);
        #pragma unroll 1
        for (int step = 0; step < tile.steps; step++, at.advance()) {
            const int first = tile.query_tile(step) * BLOCK_Q;
            Mbarrier &q_full = barriers.q.full[at.stage], &ct_full = barriers.ct.full[at.stage];
            barriers.q.wait_empty(at);
            q_full.arrive_expect_tx(Q_BYTES + STATS_BYTES);
            packed.q.load<BLOCK_Q>(shared.q + at.stage * Q_BYTES, tile.head, first, q_full);
            bulk_copy<STATS_BYTES>(shared.stats + at.stage * STATS_BYTES,
                (const char *)(packed.stats + packed.tile(tile.head, first) * 2 * BLOCK_Q), q_full);
            barriers.ct.wait_empty(at);
            ct_full.arrive_expect_tx(Q_BYTES);
            packed.ct.load<BLOCK_Q>(shared.ct + at.stage * Q_BYTES, tile.head, first, ct_full);
        }
    }
}

// One of two threads that add the cotangents of queries. `own`: 0 takes even steps, 1 odd ones, counted over all tiles.
static __device__ __forceinline__ void add_by_q(
    const GradientScratch &packed, Barriers &barriers, const SharedTiles &shared, int tiles, int batch, int queries, int keys, int own) {
    PipelineState<2> at; // the thread of a step, and the parity of its phase
    for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
        const KeyTile tile(i, batch, queries, keys);
        #pragma unroll 1
        for (int step = 0; step < tile.steps; step++, at.advance()) {
            if (at.stage != own) continue;
            const int query_tile = tile.query_tile(step), turn = tile.turn(query_tile);
            const int64_t number = tile.head * tile.query_tiles + query_tile;
            float *const to = packed.by_q + number * BY_Q_TILE;
            barriers.by_q_full[own].wait(at.phase);
            wait_for_turn(packed.turns + number, turn);
            if (turn == 0)
                bulk_store<BY_Q_BYTES>(to, shared.by_q);
            else
                bulk_add<BY_Q_BYTES>(to, shared.by_q);
            bulk_wait_read();
            barriers.by_q_empty.arrive();
            bulk_wait();
            pass_turn(packed.turns + number);
        }
    }
}

// The statistics for the columns of this thread's accumulators 4 i and 4 i + 1.
__device__ __forceinline__ Vector<float, 2> pair_of(const char *stats, int i) {
    return load<float, 2>((const float *)stats + accumulator_column(4 * i));
}

// A consumer warpgroup.
static __device__ __forceinline__ void consume(Barriers &barriers, const SharedTiles &shared, T *by_k, T *by_v, int tiles, int batch,
    int heads, int queries, int keys, int64_t row, float scale) {
    const int own = threadIdx.x / WARPGROUP - 1, warp = threadIdx.x % WARPGROUP / WARP, lane = threadIdx.x % WARP;
    const auto release = [](Mbarrier &empty) {
        if (threadIdx.x % WARP == 0) empty.arrive();
    };
    PipelineState<1> at_keys;
    PipelineState<2> at_by_q;
    PipelineState<QUERY_STAGES> at;
    int buffer = 0;
    for (int i = blockIdx.x; i < tiles; i += gridDim.x, at_keys.advance()) {
        const KeyTile tile(i, batch, queries, keys);
        const int first = tile.first + own * 64; // of this warpgroup's keys
        float k_sums[SUMS], v_sums[SUMS];
        barriers.keys.wait_full(at_keys);
        #pragma unroll 1
        for (int step = 0; step < tile.steps; step++, at.advance(), at_by_q.advance(), buffer ^= 1) {
            const int query = tile.query_tile(step) * BLOCK_Q; // the first one of the tile
            const char *const q = shared.q + at.stage * Q_BYTES, *const ct = shared.ct + at.stage * Q_BYTES;
            const char *const logsumexp = shared.stats + at.stage * STATS_BYTES, *const delta = logsumexp + BLOCK_Q * 4;
            float scores[SCORES], by_scores[SCORES], by_q[BY_Q_SUMS];
            uint32_t weights[SCORES / 2], by_words[SCORES / 2];

            barriers.q.wait_full(at);
            wgmma_fence();
            #pragma unroll
            for (int n = 0; n < PACKED_WIDTH / 16; n++)
                wgmma<BFLOAT16>(
                    scores, along_width<BLOCK_K>(shared.k, n, own * 64), along_width<BLOCK_Q>(q, n), n > 0);
            wgmma_commit_group();
            barriers.ct.wait_full(at);
            wgmma_fence();
            #pragma unroll
            for (int n = 0; n < PACKED_WIDTH / 16; n++)
                wgmma<BFLOAT16>(
                    by_scores, along_width<BLOCK_K>(shared.v, n, own * 64), along_width<BLOCK_Q>(ct, n), n > 0);
            wgmma_commit_group();

            wgmma_wait_group<1>();
            wgmma_fence_operand(scores);
            #pragma unroll
            for (int n = 0; n < SCORES / 4; n++) {
                const Vector<float, 2> shift = pair_of(logsumexp, n);
                #pragma unroll
                for (int h = 0; h < 4; h++)
                    scores[4 * n + h] = exp2_fast(scores[4 * n + h] * scale - shift.lane[h % 2]);
            }
            // Keys that do not exist or come after a query.
            if (first + 64 > keys || (CAUSAL && first + 63 > query)) {
                #pragma unroll
                for (int n = 0; n < SCORES; n++) {
                    const int key = first + accumulator_row(n);
                    if (key >= keys || (CAUSAL && key > query + accumulator_column(n))) scores[n] = 0;
                }
            }
            to_bfloat16(scores, weights);
            const auto add_by_v = [&] {
                wgmma_fence();
                #pragma unroll
                for (int n = 0; n < BLOCK_Q / 16; n++)
                    wgmma_registers<true>(v_sums, weights + 4 * n, along_rows<BLOCK_Q>(ct, n), step > 0 || n > 0);
                wgmma_commit_group();
            };
            if constexpr (EARLY) add_by_v();
            wgmma_wait_group<EARLY ? 1 : 0>();
            wgmma_fence_operand(by_scores);
            #pragma unroll
            for (int n = 0; n < SCORES / 4; n++) {
                const Vector<float, 2> correction = pair_of(delta, n);
                #pragma unroll
                for (int h = 0; h < 4; h++)
                    by_scores[4 * n + h] = scores[4 * n + h] * (by_scores[4 * n + h] - correction.lane[h % 2]);
            }
            to_bfloat16(by_scores, by_words);
            if constexpr (!EARLY) add_by_v();

            // The cotangents of the scores, with the queries of a key contiguous.
            char *const tile_of_scores = shared.by_scores + buffer * SCORE_BYTES;
            const int at_row = own * 64 + warp * 16 + lane % 16;
            #pragma unroll
            for (int n = 0; n < BLOCK_Q / 16; n++)
                store_matrices(tile_of_scores + n / 4 * (BLOCK_K * ROW_BYTES) + swizzle_128b(at_row, n % 4 * 2 + lane / 16),
                    by_words + 4 * n);
            fence_proxy_async();
            named_barrier_sync(CONSUMER_THREADS);

            // The cotangents of the queries: a warpgroup computes half of the columns, or half of the rows.
            const char *const rows = tile_of_scores + (BLOCK_Q == 64 ? 0 : own * (BLOCK_K * ROW_BYTES));
            const char *const columns = shared.k + (BLOCK_Q == 64 ? own * (BLOCK_K * ROW_BYTES) : 0);
            wgmma_fence();
            #pragma unroll
            for (int n = 0; n < BLOCK_K / 16; n++)
                wgmma<BFLOAT16, true, true>(by_q, along_rows<BLOCK_K>(rows, n), along_rows<BLOCK_K>(columns, n), n > 0);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            release(barriers.ct.empty[at.stage]);
            wgmma_fence();
            #pragma unroll
            for (int n = 0; n < BLOCK_Q / 16; n++)
                wgmma_registers<true>(k_sums, by_words + 4 * n, along_rows<BLOCK_Q>(q, n), step > 0 || n > 0);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            wgmma_fence_operand(by_q);
            barriers.by_q_empty.wait(at_by_q.stage ^ 1);
            #pragma unroll
            for (int n = 0; n < BY_Q_SUMS; n += 4)
                store((float *)shared.by_q,
                    ((own * (BY_Q_SUMS / 4) + n / 4) * WARPGROUP + threadIdx.x % WARPGROUP) * 4,
                    Vector<float, 4>{{by_q[n], by_q[n + 1], by_q[n + 2], by_q[n + 3]}});
            fence_proxy_async();
            arrive_per_warp(barriers.by_q_full[at_by_q.stage]);
            wgmma_wait_group<0>();
            release(barriers.q.empty[at.stage]);
        }
        wgmma_fence_operand(k_sums);
        wgmma_fence_operand(v_sums);
        release(barriers.keys.empty[0]);
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const int key = first + accumulator_row(2 * r);
            if (key >= keys) continue;
            const int64_t to = (tile.head / heads * keys + key) * row + tile.head % heads * HEAD_WIDTH;
            #pragma unroll
            for (int n = 2 * r; n < SUMS; n += 4) {
                const int column = accumulator_column(n);
                store_pair(by_k + to, column, k_sums[n] * (scale / LOG2_E), k_sums[n + 1] * (scale / LOG2_E));
                store_pair(by_v + to, column, v_sums[n], v_sums[n + 1]);
            }
        }
    }
}

// by_k and by_v begin `step` and 2 step elements after their pointers.
KERNEL __launch_bounds__(THREADS, 1) attention_wgmma_grad(T *by_k, T *by_v, int64_t batch, int64_t heads, int64_t queries,
    int64_t keys, int64_t row, int64_t step, double scale, char *scratch) {
    wait_for_inputs();
    __shared__ Barriers barriers;
    if (threadIdx.x == 0) {
        barriers.keys.init(1, CONSUMER_WARPS);
        barriers.q.init(1, CONSUMER_WARPS);
        barriers.ct.init(1, CONSUMER_WARPS);
        for (Mbarrier &full : barriers.by_q_full) full.init(CONSUMER_WARPS);
        barriers.by_q_empty.init(1);
        fence_mbarrier_init();
    }
    __syncthreads();
    const int tiles = batch * ((keys + BLOCK_K - 1) / BLOCK_K);
    const SharedTiles shared;
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<24>();
        const GradientScratch packed(scratch, batch, queries, keys);
        if (threadIdx.x == 0)
            produce(packed, barriers, shared, tiles, batch, queries, keys);
        else if (threadIdx.x == WARP || threadIdx.x == 2 * WARP)
            add_by_q(packed, barriers, shared, tiles, batch, queries, keys, threadIdx.x / WARP - 1);
    } else {
        warpgroup_reg_alloc<240>();
        consume(barriers, shared, by_k + step, by_v + 2 * step, tiles, batch, heads, queries, keys, row, (float)scale * LOG2_E);
    }
}
