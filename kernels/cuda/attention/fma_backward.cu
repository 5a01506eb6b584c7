// The gradient of attention in three launches: the sum of ct * out of each query; the cotangents of keys and values, by tiles
// of keys; those of queries, by tiles of queries. The last two recompute the probabilities. See fma.cuh.
#include "attention/fma.cuh"

KERNEL attention_delta(
    const T *out, const T *ct, int64_t batch, int64_t heads, int64_t queries, int64_t out_row, char *scratch) {
    wait_for_inputs();
    for (int64_t i = grid_index() / WARP; i < batch * queries; i += grid_size() / WARP) {
        const int64_t head = i / queries, at = (head / heads * queries + i % queries) * out_row + head % heads * WIDTH;
        T sum = 0;
        for (int c = threadIdx.x % WARP; c < WIDTH; c += WARP) sum = fma(out[at + c], ct[at + c], sum);
        sum = over_lanes<Sum, WARP>(sum);
        if (threadIdx.x % WARP == 0) SCRATCH_DELTAS(T, scratch)[i] = sum;
    }
}

// The cotangents of the scores (q times the transpose of k) of queries from `query` on and keys from `key` on, to `by_scores`.
// The probabilities after dropout, to `weights` unless it is null.
static __device__ __forceinline__ void gradient_of_scores(const Head &head, int64_t query, int64_t key, const T *q_tile,
    const T *k_tile, const T *v_tile, const T *ct_tile, const T *logsumexp, const T *delta, T *weights, T *by_scores) {
    T scores[MICRO][MICRO], by_weights[MICRO][MICRO];
    row_products(q_tile, k_tile, scores);
    row_products(ct_tile, v_tile, by_weights);
    #pragma unroll
    for (int i = 0; i < MICRO; i++) {
        const int64_t of_row = query + row_of(i), at = head.number * head.queries + of_row;
        const T shift = of_row < head.queries ? logsumexp[at] : (T)INFINITY;
        const T correction = of_row < head.queries ? delta[at] : (T)0;
        #pragma unroll
        for (int j = 0; j < MICRO; j++) {
            const int64_t column = key + column_of(j);
            const T score = head.attends(of_row, column) ? scores[i][j] * head.scale : -(T)INFINITY;
            const T probability = exp(score - shift), kept = head.kept(of_row, column);
            const int to = row_of(i) * SCORES + column_of(j);
            if (weights) weights[to] = operand(probability * kept);
            by_scores[to] = operand(probability * (by_weights[i][j] * kept - correction) * head.scale);
        }
    }
}

KERNEL __launch_bounds__(THREADS) attention_grad_keys(const T *q, const T *k, const T *v, const T *logsumexp, const T *ct,
    IF(MASKED, const bool *mask,) IF(STARTS, const int32_t *starts,) IF(DROPOUT, const uint32_t *rng,) T *by_k, T *by_v, int64_t batch, int64_t heads,
    int64_t queries, int64_t keys, int64_t row, int64_t out_row, int64_t step, double scale, double dropout, int64_t stream,
    char *scratch) {
    wait_for_inputs();
    const Head head = head_of(mask, starts, rng, blockIdx.x % batch, heads, queries, keys, row, out_row, scale, dropout, stream);
    const int64_t key = blockIdx.x / batch * TILE;
    const int64_t of_keys = head.before(keys, row), of_queries = head.before(queries, row);
    ct += head.before(queries, out_row);
    RowTile *const row_tiles = SHARED_TILES(RowTile, shared_bytes);
    T *const k_tile = row_tiles[0], *const v_tile = row_tiles[1], *const q_tile = row_tiles[2], *const ct_tile = row_tiles[3];
    T *const weights = SHARED_SCORES(ScoreTile, shared_bytes)[0], *const by_scores = weights + TILE * SCORES;
    T k_sums[MICRO][COLUMNS] = {}, v_sums[MICRO][COLUMNS] = {};
    load_tile(k + step + of_keys, row, key, keys, k_tile);
    load_tile(v + 2 * step + of_keys, row, key, keys, v_tile);
    for (int64_t query = CAUSAL ? key : 0; query < queries; query += TILE) {
        if (head.first_key(query) >= key + TILE) break; // later queries attend to later keys only
        load_tile(q + of_queries, row, query, queries, q_tile);
        load_tile(ct, out_row, query, queries, ct_tile);
        __syncthreads();
        gradient_of_scores(
            head, query, key, q_tile, k_tile, v_tile, ct_tile, logsumexp, SCRATCH_DELTAS(T, scratch), weights, by_scores);
        __syncthreads();
        add_products<true>(weights, ct_tile, v_sums);
        add_products<true>(by_scores, q_tile, k_sums);
        __syncthreads();
    }
    store_rows(by_k + step + of_keys, row, key, keys, k_sums);
    store_rows(by_v + 2 * step + of_keys, row, key, keys, v_sums);
}

KERNEL __launch_bounds__(THREADS) attention_grad_queries(const T *q, const T *k, const T *v, const T *logsumexp, const T *ct,
    IF(MASKED, const bool *mask,) IF(STARTS, const int32_t *starts,) IF(DROPOUT, const uint32_t *rng,) T *by_q, int64_t batch, int64_t heads, int64_t queries,
    int64_t keys, int64_t row, int64_t out_row, int64_t step, double scale, double dropout, int64_t stream, char *scratch) {
    wait_for_inputs();
    const Head head = head_of(mask, starts, rng, blockIdx.x % batch, heads, queries, keys, row, out_row, scale, dropout, stream);
    const int64_t tiles = gridDim.x / batch, tile = blockIdx.x / batch;
    const int64_t query = (CAUSAL ? tiles - 1 - tile : tile) * TILE; // the longest rows start first
    const int64_t of_keys = head.before(keys, row), of_queries = head.before(queries, row);
    ct += head.before(queries, out_row);
    RowTile *const row_tiles = SHARED_TILES(RowTile, shared_bytes);
    T *const q_tile = row_tiles[0], *const ct_tile = row_tiles[1], *const k_tile = row_tiles[2], *const v_tile = row_tiles[3];
    T *const by_scores = SHARED_SCORES(ScoreTile, shared_bytes)[0];
    T sums[MICRO][COLUMNS] = {};
    load_tile(q + of_queries, row, query, queries, q_tile);
    load_tile(ct, out_row, query, queries, ct_tile);
    const int64_t end = CAUSAL && query + TILE < keys ? query + TILE : keys;
    for (int64_t key = head.first_key(query) / TILE * TILE; key < end; key += TILE) {
        load_tile(k + step + of_keys, row, key, keys, k_tile);
        load_tile(v + 2 * step + of_keys, row, key, keys, v_tile);
        __syncthreads();
        gradient_of_scores(
            head, query, key, q_tile, k_tile, v_tile, ct_tile, logsumexp, SCRATCH_DELTAS(T, scratch), nullptr, by_scores);
        __syncthreads();
        add_products<false>(by_scores, k_tile, sums);
        __syncthreads();
    }
    store_rows(by_q + of_queries, row, query, queries, sums);
}
