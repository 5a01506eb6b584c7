// The warpgroups of the gradient of attention in bfloat16: see wgmma_backward.cu.
#pragma once

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
