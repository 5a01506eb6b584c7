// The warpgroups of the gradient of attention in fp16x2: see wgmma_backward.cu. An operand is the sum of two float16 terms,
// high and low; of their four products, low times low is omitted.
//
// Tensor cores truncate when they add. So they sum over 64 numbers, low-order products first, and float32 additions add up the
// results. Probabilities are scaled by 2^PROBABILITY_EXPONENT. The cotangents of the scores of a warpgroup and a tile of
// queries have a scale of their own.
#pragma once
#include "common/terms.cuh"

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
