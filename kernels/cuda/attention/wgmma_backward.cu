// The gradient of attention by WGMMA: the cotangents of keys and values, and those of queries in the layout of accumulators
// (wgmma_scratch.cuh). Persistent and warp-specialised: a block computes a tile of BLOCK_K keys of a head and loops over tiles
// of BLOCK_Q queries. One thread issues copies; each of two warpgroups computes 64 keys. Its accumulators are the transposed
// scores (keys x queries), which are operands of the next products without leaving registers. `consume` is
// the code of a warpgroup: one for fp16x2, another one for bfloat16.
//
// The cotangents of a tile of queries are a sum over the tiles of keys, and so over blocks. Two threads of each block add its
// terms to global memory by bulk copies. The last block adds all earlier terms to its own in registers, and writes the results.
// The blocks of a head take turns in a fixed order, so each run gives the same bits: see KeyTile.
//
// Macros: also QUERY_STAGES: tiles of queries and of cotangents in shared memory; ROTATED.
#include "attention/wgmma_scratch.cuh"
#include "common/mma_sync.cuh"
#include "common/rounding.cuh"
#include "sm90/grid_sync.cuh"

constexpr int CONSUMER_THREADS = 2 * WARPGROUP, CONSUMER_WARPS = CONSUMER_THREADS / WARP, THREADS = 3 * WARPGROUP;
constexpr int Q_BYTES = TILE_BYTES<BLOCK_Q>, K_BYTES = TILE_BYTES<BLOCK_K>, STATS_BYTES = STATS * 4;
constexpr int SCORE_BYTES = BLOCK_Q * BLOCK_K * 2, BY_Q_BYTES = BY_Q_TILE * 4;
constexpr int SCORES = BLOCK_Q / 2, SUMS = PACKED_WIDTH / 2, BY_Q_SUMS = 32; // accumulators of a thread
static_assert(BLOCK_K == 128 && OPERAND_TERMS * BLOCK_Q * PACKED_WIDTH == 64 * 128, "two warpgroups share the products");
// In fp16x2 each warpgroup has a buffer for the cotangents of queries, summed over its own 64 keys. In bfloat16 both share the
// sums over BLOCK_K keys.
constexpr int BY_Q_BUFFERS = OPERAND_TERMS;

// By the macros of the layout, here and in `GradientScratch`, attention and its gradient in fp16x2 take 4% longer together.
static_assert(3 * K_BYTES + QUERY_STAGES * (2 * Q_BYTES + STATS_BYTES) + 2 * SCORE_BYTES + BY_Q_BUFFERS * BY_Q_BYTES + 1024 ==
                  SHARED_BYTES, "the layout of wgmma.py");

// k: two tiles, so that the next one is loaded early. The values are read for the last time before the keys.
// by_scores: in bfloat16 two buffers of both warpgroups, in fp16x2 a buffer of both terms for each warpgroup.
struct SharedTiles {
    char *k, *v, *q, *ct, *by_scores, *by_q, *stats;

    __device__ __forceinline__ SharedTiles() {
        k = (char *)(((uintptr_t)shared_bytes + 1023) / 1024 * 1024), v = k + 2 * K_BYTES, q = v + K_BYTES;
        ct = q + QUERY_STAGES * Q_BYTES, by_scores = ct + QUERY_STAGES * Q_BYTES, by_q = by_scores + 2 * SCORE_BYTES;
        stats = by_q + BY_Q_BUFFERS * BY_Q_BYTES;
    }
};

// `by_q_full`: consumers have stored their sums; one for each adding thread. `by_q_empty`: a buffer is read.
struct Barriers {
    Pipeline<2> k;
    Pipeline<1> v;
    Pipeline<QUERY_STAGES> q, ct;
    Mbarrier by_q_full[2], by_q_empty[BY_Q_BUFFERS];
};

// A tile of keys of a head, and the tiles of queries that attend to it.
//
// Causal key tiles go from the last tile of queries to their diagonal, and add to a tile of queries by ascending number. Blocks
// take the key tiles of one number of all heads before the next number: first the longest ones.
//
// Other key tiles of a head start at different tiles of queries: if ROTATED, key tile n of N starts at n / N of them and wraps
// around after the last one. They add to a tile of queries in the order in which they reach it if all start at once. First come
// those that start at it or before, then the others, both by descending number. So blocks hardly wait.
//
// No deadlock: the launch is cooperative, so all blocks run at the same time. Without ROTATED a key tile waits only for key tiles
// that blocks take first. With ROTATED the key tiles of a head wait for each other, so each needs a block of its own; wgmma.py
// sets it only where there are no more of them than multiprocessors.
struct KeyTile {
    int64_t head;
    int tiles, number, first, query_tiles, first_tile, steps;

    __device__ __forceinline__ KeyTile(int i, int batch, int queries, int keys) {
        tiles = (keys + BLOCK_K - 1) / BLOCK_K, query_tiles = (queries + BLOCK_Q - 1) / BLOCK_Q;
        head = CAUSAL ? i % batch : i / tiles, number = CAUSAL ? i / batch : tiles - 1 - i % tiles, first = number * BLOCK_K;
        first_tile = CAUSAL ? first / BLOCK_Q : ROTATED ? number * query_tiles / tiles : 0;
        steps = CAUSAL ? query_tiles - first_tile : query_tiles;
    }
    __device__ __forceinline__ int query_tile(int step) const {
        if (CAUSAL) return query_tiles - 1 - step;
        const int at = first_tile + step;
        return at < query_tiles ? at : at - query_tiles;
    }
    // The number of key tiles that come before this one at a tile of queries.
    __device__ __forceinline__ int turn(int query_tile) const {
        if (CAUSAL) return number;
        const int begun = ROTATED ? ((query_tile + 1) * tiles + query_tiles - 1) / query_tiles : tiles;
        return begun - 1 - number + (number < begun ? 0 : tiles);
    }
    // Whether this key tile is the last one that adds to a tile of queries.
    __device__ __forceinline__ bool is_last(int query_tile) const {
        return turn(query_tile) == (CAUSAL ? min(tiles - 1, query_tile * BLOCK_Q / BLOCK_K) : tiles - 1);
    }
};

// Writes the cotangents of a thread's keys and values. first: the first key of its warpgroup.
static __device__ __forceinline__ void store_sums(S *by_k, S *by_v, const float (&k_sums)[SUMS], const float (&v_sums)[SUMS],
    float k_factor, float v_factor, const KeyTile &tile, int first, int heads, int keys, int64_t row) {
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        const int key = first + accumulator_row(2 * r);
        if (key >= keys) continue;
        const int64_t to = (tile.head / heads * keys + key) * row + tile.head % heads * HEAD_WIDTH;
        #pragma unroll
        for (int n = 2 * r; n < SUMS; n += 4) {
            const int column = accumulator_column(n);
            store_pair(by_k + to, column, k_sums[n] * k_factor, k_sums[n + 1] * k_factor);
            store_pair(by_v + to, column, v_sums[n] * v_factor, v_sums[n + 1] * v_factor);
        }
    }
}

// The last turn at a tile of queries: adds the sums of earlier turns to those of a warpgroup, and writes the results.
// part: of the tile, BY_Q_SUMS accumulators of a warpgroup.
static __device__ __forceinline__ void finish_queries(const GradientScratch &packed, S *to, float (&by_q)[BY_Q_SUMS],
    float factor, const KeyTile &tile, int query_tile, int turn, int part, int heads, int queries, int64_t row) {
    const int64_t number = tile.head * tile.query_tiles + query_tile;
    if (turn > 0) {
        const float4 *const sums = (const float4 *)(packed.by_q + number * BY_Q_TILE) +
                                   part * (BY_Q_SUMS / 4) * WARPGROUP + threadIdx.x % WARPGROUP;
        wait_for_count(packed.turns + number, turn);
        #pragma unroll
        for (int n = 0; n < BY_Q_SUMS / 4; n++) {
            const float4 earlier = load_shared_by_blocks(sums + n * WARPGROUP);
            by_q[4 * n] += earlier.x, by_q[4 * n + 1] += earlier.y;
            by_q[4 * n + 2] += earlier.z, by_q[4 * n + 3] += earlier.w;
        }
    }
    const int first = query_tile * BLOCK_Q + (BLOCK_Q == 64 ? 0 : part * 64), column = BLOCK_Q == 64 ? part * 64 : 0;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        const int query = first + accumulator_row(2 * r);
        if (query >= queries) continue;
        S *const row_of_query = to + (tile.head / heads * queries + query) * row + tile.head % heads * HEAD_WIDTH;
        #pragma unroll
        for (int n = 2 * r; n < BY_Q_SUMS; n += 4)
            store_pair(row_of_query, column + accumulator_column(n), by_q[n] * factor, by_q[n + 1] * factor);
    }
}

#if DIRECT
// The arrays in memory. Warp 0 copies their tensor maps from shared memory to scratch.
struct Arrays {
    ArrayOfHeads q, k, v, ct;

    __device__ __forceinline__ Arrays(HeadMaps &maps, const HeadMaps &in_shared, int heads)
        : q{maps.q, heads}, k{maps.k, heads}, v{maps.v, heads}, ct{maps.ct, heads} {
        maps.q.copy_from(in_shared.q), maps.k.copy_from(in_shared.k);
        maps.v.copy_from(in_shared.v), maps.ct.copy_from(in_shared.ct);
    }
};
#else
typedef GradientScratch Arrays;
#endif

// The producer thread: issues the copies for all tiles of this block, of arrays that are packed or in memory.
static __device__ __forceinline__ void produce(const Arrays &arrays, const GradientScratch &packed,
    Barriers &barriers, const SharedTiles &shared, int tiles, int batch, int queries, int keys) {
    PipelineState<2> at_k; // its stage is also the parity of the phase of v
    PipelineState<QUERY_STAGES> at;
    for (int round = 0, i; (i = tile_of_round(round)) < tiles; round++, at_k.advance()) {
        const KeyTile tile(i, batch, queries, keys);
        load_stage<BLOCK_K>(arrays.k, barriers.k, at_k, shared.k, tile.head, tile.first);
        barriers.v.empty[0].wait(at_k.stage ^ 1);
        barriers.v.full[0].arrive_expect_tx(K_BYTES);
        arrays.v.load<BLOCK_K>(shared.v, tile.head, tile.first, barriers.v.full[0]);
        #pragma unroll 1
        for (int step = 0; step < tile.steps; step++, at.advance()) {
            const int first = tile.query_tile(step) * BLOCK_Q;
            Mbarrier &q_full = barriers.q.expect(at, Q_BYTES + STATS_BYTES);
            arrays.q.load<BLOCK_Q>(shared.q + at.stage * Q_BYTES, tile.head, first, q_full);
            bulk_copy<STATS_BYTES>(shared.stats + at.stage * STATS_BYTES,
                (const char *)(packed.stats + packed.tile(tile.head, first) * STATS), q_full);
            Mbarrier &ct_full = barriers.ct.expect(at, Q_BYTES);
            arrays.ct.load<BLOCK_Q>(shared.ct + at.stage * Q_BYTES, tile.head, first, ct_full);
        }
    }
}

// One of two threads that add the cotangents of queries, in all steps but those that end with finish_queries(). If the warpgroups
// share a buffer, thread 0 takes even steps and thread 1 odd ones, counted over all tiles. Else thread `own` adds the sums of that
// warpgroup in every step.
static __device__ __forceinline__ void add_by_q(
    const GradientScratch &packed, Barriers &barriers, const SharedTiles &shared,
    int tiles, int batch, int queries, int keys, int own) {
    constexpr bool SHARED_SUMS = BY_Q_BUFFERS == 1;
    const int buffer = SHARED_SUMS ? 0 : own;
    PipelineState<SHARED_SUMS ? 2 : 1> at; // the thread of a step, and the parity of its phase
    for (int round = 0, i; (i = tile_of_round(round)) < tiles; round++) {
        const KeyTile tile(i, batch, queries, keys);
        #pragma unroll 1
        for (int step = 0; step < tile.steps; step++) {
            const int query_tile = tile.query_tile(step), turn = tile.turn(query_tile) * BY_Q_BUFFERS + buffer;
            if (buffer == BY_Q_BUFFERS - 1 && tile.is_last(query_tile)) continue;
            const PipelineState<SHARED_SUMS ? 2 : 1> now = at;
            at.advance();
            if (SHARED_SUMS && now.stage != own) continue;
            const int64_t number = tile.head * tile.query_tiles + query_tile;
            float *const to = packed.by_q + number * BY_Q_TILE;
            barriers.by_q_full[own].wait(now.phase);
            wait_for_turn(packed.turns + number, turn);
            if (turn == 0)
                bulk_store<BY_Q_BYTES>(to, shared.by_q + buffer * BY_Q_BYTES);
            else
                bulk_add<BY_Q_BYTES>(to, shared.by_q + buffer * BY_Q_BYTES);
            bulk_wait_read();
            barriers.by_q_empty[buffer].arrive();
            bulk_wait();
            pass_turn(packed.turns + number);
        }
    }
}

// The statistics for the columns of this thread's accumulators 4 i and 4 i + 1.
__device__ __forceinline__ Vector<float, 2> pair_of(const char *stats, int i) {
    return load<float, 2>((const float *)stats + accumulator_column(4 * i));
}

// Sets the probabilities of keys that do not exist or come after their query to 0. Rows are 64 keys from `first` on, columns
// queries from `query` on.
__device__ __forceinline__ void exclude_keys(float (&scores)[SCORES], int first, int query, int keys) {
    if (first + 64 <= keys && (!CAUSAL || first + 63 <= query)) return;
    #pragma unroll
    for (int n = 0; n < SCORES; n++) {
        const int key = first + accumulator_row(n);
        if (key >= keys || (CAUSAL && key > query + accumulator_column(n))) scores[n] = 0;
    }
}

#if OPERAND_TERMS == 2
// The warpgroups in fp16x2. An operand is the sum of two float16 terms, high and low; of their four products, low times low
// is omitted.
//
// Tensor cores truncate when they add. So they sum over 64 numbers, low-order products first, and float32 additions add up the
// results. Probabilities are scaled by 2^PROBABILITY_EXPONENT. The cotangents of the scores of a warpgroup and a tile of
// queries have a scale of their own.

constexpr int STEPS = 4;                    // of 16 along the K of a product: the width, 64 queries or 64 keys
constexpr int TERM_BYTES = SCORE_BYTES / 2; // of a warpgroup's cotangents of scores
constexpr float SMALLEST = 1.17549435e-38f, PROBABILITY_INVERSE = 1.0f / (1 << PROBABILITY_EXPONENT);
static_assert(PACKED_WIDTH == 64 && BLOCK_Q == 64, "products over 64 numbers");

typedef float Accumulators[32];
typedef uint32_t Words[2][16]; // the terms of accumulators, as operand A

__device__ __forceinline__ void split(const Accumulators &x, float factor, Words &words) {
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        uint32_t terms[2];
        split_terms<FLOAT16>(x[2 * i] * factor, x[2 * i + 1] * factor, terms);
        words[0][i] = terms[0], words[1][i] = terms[1];
    }
}

// Starts the products of two operands: multiply(term of A, term of B, step, whether it adds).
template <class Multiply> __device__ __forceinline__ void start_products(const Multiply &multiply) {
    wgmma_fence();
    #pragma unroll
    for (int product = 0; product < 3; product++)
        #pragma unroll
        for (int n = 0; n < STEPS; n++) multiply(product == 0, product == 1, n, product + n > 0);
    wgmma_commit_group();
}

// The maximum over a warpgroup; `of_warps`: for each of its warps a number in shared memory.
__device__ __forceinline__ float over_warpgroup(float x, Vector<float, 4> &of_warps, int barrier) {
    x = over_lanes<Max, WARP>(x);
    if (threadIdx.x % WARP == 0) of_warps.lane[threadIdx.x % WARPGROUP / WARP] = x;
    named_barrier_sync(WARPGROUP, barrier);
    const Vector<float, 4> all = of_warps;
    return fmaxf(fmaxf(all.lane[0], all.lane[1]), fmaxf(all.lane[2], all.lane[3]));
}

// A consumer warpgroup. of_k, of_v, of_q, of_ct: the inverses of the scales of its keys and values, and of a tile's queries and
// cotangents.
static __device__ __forceinline__ void consume(const GradientScratch &packed, Barriers &barriers, const SharedTiles &shared,
    S *q_to, S *k_to, S *v_to, int tiles, int batch, int heads, int queries, int keys, int64_t row, float scale) {
    __shared__ Vector<float, 4> of_warps[2];
    const int own = threadIdx.x / WARPGROUP - 1, warp = threadIdx.x % WARPGROUP / WARP, lane = threadIdx.x % WARP;
    const int barrier = 1 + own;
    char *const tile_of_scores = shared.by_scores + own * SCORE_BYTES;
    float *const by_q_tile = (float *)(shared.by_q + own * BY_Q_BYTES);
    PipelineState<2> at_k; // its stage is also the parity of the phase of v
    PipelineState<QUERY_STAGES> at;
    int parity = 0; // of the step, counted without those that end with finish_queries()
    for (int round = 0, i; (i = tile_of_round(round)) < tiles; round++, at_k.advance()) {
        const KeyTile tile(i, batch, queries, keys);
        const int first = tile.first + own * 64; // of this warpgroup's keys
        const Vector<float, 2> inverses = load<float, 2>(packed.inverses + (tile.head * packed.k.rows + first) / GROUP * 2);
        const float of_k = inverses.lane[0], of_v = inverses.lane[1];
        Accumulators k_sums = {}, v_sums = {};
        const char *const k = shared.k + at_k.stage * K_BYTES;
        barriers.k.wait_full(at_k);
        barriers.v.full[0].wait(at_k.stage);
        #pragma unroll 1
        for (int step = 0; step < tile.steps; step++, at.advance()) {
            const int query_tile = tile.query_tile(step), query = query_tile * BLOCK_Q; // the first one of the tile
            const char *const q = shared.q + at.stage * Q_BYTES, *const ct = shared.ct + at.stage * Q_BYTES;
            const char *const shifts = shared.stats + at.stage * STATS_BYTES, *const deltas = shifts + BLOCK_Q * 4;
            Accumulators scores, by_scores;
            Words words, by_words;

            barriers.q.wait_full(at);
            const Vector<float, 2> of_queries = load<float, 2>((const float *)shifts + 2 * BLOCK_Q);
            const float of_q = of_queries.lane[0], of_ct = of_queries.lane[1];
            start_products([&](int a, int b, int n, bool add) {
                wgmma<FP16X2>(scores, along_width<BLOCK_K>(k, a * STEPS + n, own * 64),
                    along_width<BLOCK_Q>(q, b * STEPS + n), add);
            });
            barriers.ct.wait_full(at);
            start_products([&](int a, int b, int n, bool add) {
                wgmma<FP16X2>(by_scores, along_width<BLOCK_K>(shared.v, a * STEPS + n, own * 64),
                    along_width<BLOCK_Q>(ct, b * STEPS + n), add);
            });

            wgmma_wait_group<1>();
            wgmma_fence_operand(scores);
            const float of_scores = fmaxf(scale * of_k * of_q, SMALLEST);
            #pragma unroll
            for (int n = 0; n < SCORES / 4; n++) {
                const Vector<float, 2> shift = pair_of(shifts, n);
                #pragma unroll
                for (int h = 0; h < 4; h++)
                    scores[4 * n + h] = exp2_approximate(fma(scores[4 * n + h], of_scores, -shift.lane[h % 2]));
            }
            exclude_keys(scores, first, query, keys);
            split(scores, 1, words);
            Accumulators v_part;
            start_products([&](int a, int b, int n, bool add) {
                wgmma_registers<FP16X2, true>(
                    v_part, words[a] + 4 * n, along_rows<BLOCK_Q>(ct + b * (BLOCK_Q * ROW_BYTES), n), add);
            });

            wgmma_wait_group<1>();
            wgmma_fence_operand(by_scores);
            if (step + 1 == tile.steps) barriers.v.release(0);
            const float of_products = of_v * of_ct;
            float largest = 0;
            #pragma unroll
            for (int n = 0; n < SCORES / 4; n++) {
                const Vector<float, 2> delta = pair_of(deltas, n);
                #pragma unroll
                for (int h = 0; h < 4; h++) {
                    float &x = by_scores[4 * n + h];
                    x = scores[4 * n + h] * fma(x, of_products, -delta.lane[h % 2]);
                    largest = fmaxf(largest, fabsf(x));
                }
            }
            const Scale of_tile(over_warpgroup(largest, of_warps[own], barrier));
            const float inverse = of_tile.inverse * PROBABILITY_INVERSE;
            split(by_scores, of_tile.factor, by_words);

            // The cotangents of the scores, with the queries of a key contiguous.
            #pragma unroll
            for (int n = 0; n < 2 * STEPS; n++) {
                const int term = n / STEPS, k_step = n % STEPS;
                store_matrices(tile_of_scores + term * TERM_BYTES + swizzle_128b(warp * 16 + lane % 16, k_step * 2 + lane / 16),
                    by_words[term] + 4 * k_step);
            }
            fence_proxy_async();
            wgmma_wait_group<0>();
            wgmma_fence_operand(v_part);
            barriers.ct.release(at.stage);
            named_barrier_sync(WARPGROUP, barrier);

            Accumulators by_q, k_part;
            start_products([&](int a, int b, int n, bool add) {
                wgmma<FP16X2, true, true>(by_q, along_rows<64>(tile_of_scores + a * TERM_BYTES, n),
                    along_rows<BLOCK_K>(k + b * (BLOCK_K * ROW_BYTES), own * STEPS + n), add);
            });
            start_products([&](int a, int b, int n, bool add) {
                wgmma_registers<FP16X2, true>(
                    k_part, by_words[a] + 4 * n, along_rows<BLOCK_Q>(q + b * (BLOCK_Q * ROW_BYTES), n), add);
            });
            #pragma unroll
            for (int n = 0; n < SUMS; n++) v_sums[n] = fma(v_part[n], of_ct, v_sums[n]);
            wgmma_wait_group<1>();
            wgmma_fence_operand(by_q);
            #pragma unroll
            for (int n = 0; n < BY_Q_SUMS; n++) by_q[n] *= inverse * of_k;
            if (own == BY_Q_BUFFERS - 1 && tile.is_last(query_tile)) {
                const int turn = tile.turn(query_tile) * BY_Q_BUFFERS + own;
                finish_queries(packed, q_to, by_q, scale / LOG2_E, tile, query_tile, turn, 0, heads, queries, row);
            } else {
                barriers.by_q_empty[own].wait(parity ^ 1);
                #pragma unroll
                for (int n = 0; n < BY_Q_SUMS; n += 4)
                    store(by_q_tile, (n / 4 * WARPGROUP + threadIdx.x % WARPGROUP) * 4,
                        Vector<float, 4>{{by_q[n], by_q[n + 1], by_q[n + 2], by_q[n + 3]}});
                fence_proxy_async();
                arrive_per_warp(barriers.by_q_full[own]);
                parity ^= 1;
            }
            wgmma_wait_group<0>();
            wgmma_fence_operand(k_part);
            barriers.q.release(at.stage);
            #pragma unroll
            for (int n = 0; n < SUMS; n++) k_sums[n] = fma(k_part[n], inverse * of_q, k_sums[n]);
        }
        barriers.k.release(at_k.stage);
        store_sums(k_to, v_to, k_sums, v_sums, scale / LOG2_E, PROBABILITY_INVERSE, tile, first, heads, keys, row);
    }
}
#else
// The warpgroups in bfloat16.

// Whether the product for the cotangents of the values overlaps the arithmetic for those of the scores, which takes registers.
constexpr bool EARLY = BLOCK_Q == 64;

// A consumer warpgroup.
static __device__ __forceinline__ void consume(const GradientScratch &packed, Barriers &barriers, const SharedTiles &shared,
    S *q_to, S *k_to, S *v_to, int tiles, int batch, int heads, int queries, int keys, int64_t row, float scale) {
    const int own = uniform_warpgroup() - 1, warp = threadIdx.x % WARPGROUP / WARP, lane = threadIdx.x % WARP;
    PipelineState<2> at_k; // its stage is also the parity of the phase of v
    PipelineState<2> at_by_q;
    PipelineState<QUERY_STAGES> at;
    int buffer = 0;
    for (int round = 0, i; (i = tile_of_round(round)) < tiles; round++, at_k.advance()) {
        const KeyTile tile(i, batch, queries, keys);
        const int first = tile.first + own * 64; // of this warpgroup's keys
        float k_sums[SUMS], v_sums[SUMS];
        const char *const k = shared.k + at_k.stage * K_BYTES;
        barriers.k.wait_full(at_k);
        barriers.v.full[0].wait(at_k.stage);
        #pragma unroll 1
        for (int step = 0; step < tile.steps; step++, at.advance(), buffer ^= 1) {
            const int query_tile = tile.query_tile(step), query = query_tile * BLOCK_Q; // the first one of the tile
            const char *const q = shared.q + at.stage * Q_BYTES, *const ct = shared.ct + at.stage * Q_BYTES;
            const char *const logsumexp = shared.stats + at.stage * STATS_BYTES, *const delta = logsumexp + BLOCK_Q * 4;
            float scores[SCORES], by_scores[SCORES], by_q[BY_Q_SUMS];
            uint32_t weights[SCORES / 2], by_words[SCORES / 2];

            barriers.q.wait_full(at);
            start_scores<BLOCK_K, BLOCK_Q>(scores, k, own * 64, q);
            barriers.ct.wait_full(at);
            start_scores<BLOCK_K, BLOCK_Q>(by_scores, shared.v, own * 64, ct);

            wgmma_wait_group<1>();
            wgmma_fence_operand(scores);
            #pragma unroll
            for (int n = 0; n < SCORES / 4; n++) {
                const Vector<float, 2> shift = pair_of(logsumexp, n);
                #pragma unroll
                for (int h = 0; h < 4; h++)
                    scores[4 * n + h] = exp2_approximate(scores[4 * n + h] * scale - shift.lane[h % 2]);
            }
            exclude_keys(scores, first, query, keys);
            to_bfloat16(scores, weights);
            if constexpr (EARLY) start_sums<BLOCK_Q>(v_sums, weights, ct, step > 0);
            wgmma_wait_group<EARLY ? 1 : 0>();
            wgmma_fence_operand(by_scores);
            if (step + 1 == tile.steps) barriers.v.release(0);
            #pragma unroll
            for (int n = 0; n < SCORES / 4; n++) {
                const Vector<float, 2> correction = pair_of(delta, n);
                #pragma unroll
                for (int h = 0; h < 4; h++)
                    by_scores[4 * n + h] = scores[4 * n + h] * (by_scores[4 * n + h] - correction.lane[h % 2]);
            }
            to_bfloat16(by_scores, by_words);
            if constexpr (!EARLY) start_sums<BLOCK_Q>(v_sums, weights, ct, step > 0);

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
            const char *const columns = k + (BLOCK_Q == 64 ? own * (BLOCK_K * ROW_BYTES) : 0);
            wgmma_fence();
            #pragma unroll
            for (int n = 0; n < BLOCK_K / 16; n++)
                wgmma<BFLOAT16, true, true>(by_q, along_rows<BLOCK_K>(rows, n), along_rows<BLOCK_K>(columns, n), n > 0);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            barriers.ct.release(at.stage);
            start_sums<BLOCK_Q>(k_sums, by_words, q, step > 0);
            wgmma_wait_group<1>();
            wgmma_fence_operand(by_q);
            if (tile.is_last(query_tile)) {
                finish_queries(packed, q_to, by_q, scale / LOG2_E, tile, query_tile, tile.turn(query_tile), own, heads, queries, row);
            } else {
                barriers.by_q_empty[0].wait(at_by_q.stage ^ 1);
                #pragma unroll
                for (int n = 0; n < BY_Q_SUMS; n += 4)
                    store((float *)shared.by_q,
                        ((own * (BY_Q_SUMS / 4) + n / 4) * WARPGROUP + threadIdx.x % WARPGROUP) * 4,
                        Vector<float, 4>{{by_q[n], by_q[n + 1], by_q[n + 2], by_q[n + 3]}});
                fence_proxy_async();
                arrive_per_warp(barriers.by_q_full[at_by_q.stage]);
                at_by_q.advance();
            }
            wgmma_wait_group<0>();
            barriers.q.release(at.stage);
        }
        wgmma_fence_operand(k_sums);
        wgmma_fence_operand(v_sums);
        barriers.k.release(at_k.stage);
        store_sums(k_to, v_to, k_sums, v_sums, scale / LOG2_E, 1, tile, first, heads, keys, row);
    }
}
#endif

KERNEL __launch_bounds__(THREADS, 1) attention_wgmma_grad(
    IF(DIRECT, const S *q, const S *k, const S *v, const S *ct, ) S *by_q, S *by_k, S *by_v, int64_t batch, int64_t heads,
    int64_t queries, int64_t keys, int64_t row, IF(DIRECT, int64_t out_row, ) int64_t step, double scale, char *scratch) {
    __shared__ Barriers barriers;
#if DIRECT // nothing before the wait reads memory
    __shared__ HeadMaps in_shared;
    const int warp = threadIdx.x / WARP;
    if (warp == 0) make_map<BLOCK_Q>(in_shared.q, q, batch, heads, queries, row);
    if (warp == 1) make_map<BLOCK_K>(in_shared.k, k + step, batch, heads, keys, row);
    if (warp == 2) make_map<BLOCK_K>(in_shared.v, v + 2 * step, batch, heads, keys, row);
    if (warp == 3) make_map<BLOCK_Q>(in_shared.ct, ct, batch, heads, queries, out_row);
#endif
    wait_for_inputs();
    if (threadIdx.x == 0) {
        barriers.k.init(1, CONSUMER_WARPS);
        barriers.v.init(1, CONSUMER_WARPS);
        barriers.q.init(1, CONSUMER_WARPS);
        barriers.ct.init(1, CONSUMER_WARPS);
        for (Mbarrier &full : barriers.by_q_full) full.init(CONSUMER_WARPS / BY_Q_BUFFERS);
        for (Mbarrier &empty : barriers.by_q_empty) empty.init(1);
        fence_mbarrier_init();
    }
    __syncthreads();
    const int tiles = batch * ((keys + BLOCK_K - 1) / BLOCK_K);
    const SharedTiles shared;
    if (uniform_warpgroup() == 0) {
        warpgroup_reg_dealloc<24>();
        const GradientScratch packed(scratch, batch, queries, keys);
#if DIRECT
        if (threadIdx.x < WARP) {
            const Arrays arrays(packed.maps(), in_shared, heads);
            if (threadIdx.x == 0) produce(arrays, packed, barriers, shared, tiles, batch, queries, keys);
        }
#else
        if (threadIdx.x == 0) produce(packed, packed, barriers, shared, tiles, batch, queries, keys);
#endif
        else if (threadIdx.x == WARP || threadIdx.x == 2 * WARP)
            add_by_q(packed, barriers, shared, tiles, batch, queries, keys, threadIdx.x / WARP - 1);
    } else {
        warpgroup_reg_alloc<240>();
        const GradientScratch packed(scratch, batch, queries, keys);
        consume(packed, barriers, shared, by_q, by_k + step, by_v + 2 * step, tiles, batch, heads, queries, keys, row,
            (float)scale * LOG2_E);
    }
}
