// Attention: a block computes TILE queries of a head. See fma.cuh.
#include "attention/fma.cuh"

// A step of the online softmax: turns scores into exp(score - maximum), and updates the running maximum and sum of each row.
// `factor` rescales what was summed before.
static __device__ __forceinline__ void softmax_step(
    T (&scores)[MICRO][MICRO], T (&top)[MICRO], T (&sum)[MICRO], T (&factor)[MICRO]) {
    #pragma unroll
    for (int i = 0; i < MICRO; i++) {
        T highest = scores[i][0], total = 0;
        #pragma unroll
        for (int j = 1; j < MICRO; j++) highest = scores[i][j] > highest ? scores[i][j] : highest;
        highest = over_lanes<Max, LANES>(highest);
        highest = Max::of(highest, top[i]);
        const T shift = highest == -(T)INFINITY ? (T)0 : highest; // no key yet
        #pragma unroll
        for (int j = 0; j < MICRO; j++) total += scores[i][j] = exp(scores[i][j] - shift);
        factor[i] = exp(top[i] - shift);
        sum[i] = sum[i] * factor[i] + over_lanes<Sum, LANES>(total);
        top[i] = highest;
    }
}

KERNEL __launch_bounds__(THREADS) attention(const T *q, const T *k, const T *v,
    IF(MASKED, const bool *mask,) IF(STARTS, const int32_t *starts,) IF(DROPOUT, const uint32_t *rng,) T *out, T *logsumexp, int64_t batch, int64_t heads,
    int64_t queries, int64_t keys, int64_t row, int64_t out_row, int64_t step, double scale, double dropout, int64_t stream) {
    wait_for_inputs();
    const Head head = head_of(mask, starts, rng, blockIdx.x % batch, heads, queries, keys, row, out_row, scale, dropout, stream);
    const int64_t tiles = gridDim.x / batch, tile = blockIdx.x / batch;
    const int64_t first = (CAUSAL ? tiles - 1 - tile : tile) * TILE; // the longest rows start first
    T *const q_tile = SHARED_TILES(RowTile, shared_bytes)[0], *const other = q_tile + TILE * STRIDE;
    T *const weights = SHARED_SCORES(ScoreTile, shared_bytes)[0];
    q += head.before(queries, row), k += step + head.before(keys, row), v += 2 * step + head.before(keys, row);

    T sums[MICRO][COLUMNS] = {}, top[MICRO], sum[MICRO] = {};
    #pragma unroll
    for (int i = 0; i < MICRO; i++) top[i] = -(T)INFINITY;
    load_tile(q, row, first, queries, q_tile);
    const int64_t end = CAUSAL && first + TILE < keys ? first + TILE : keys;
    for (int64_t start = head.first_key(first) / TILE * TILE; start < end; start += TILE) {
        T scores[MICRO][MICRO], factor[MICRO];
        load_tile(k, row, start, keys, other);
        __syncthreads();
        row_products(q_tile, other, scores);
        #pragma unroll
        for (int i = 0; i < MICRO; i++)
            #pragma unroll
            for (int j = 0; j < MICRO; j++) {
                const bool attends = head.attends(first + row_of(i), start + column_of(j));
                scores[i][j] = attends ? scores[i][j] * head.scale : -(T)INFINITY;
            }
        softmax_step(scores, top, sum, factor);
        __syncthreads();
        load_tile(v, row, start, keys, other);
        #pragma unroll
        for (int i = 0; i < MICRO; i++) {
            #pragma unroll
            for (int j = 0; j < MICRO; j++) {
                const T kept = head.kept(first + row_of(i), start + column_of(j));
                weights[row_of(i) * SCORES + column_of(j)] = operand(scores[i][j] * kept);
            }
            #pragma unroll
            for (int n = 0; n < COLUMNS; n++) sums[i][n] *= factor[i];
        }
        __syncthreads();
        add_products<false>(weights, other, sums);
        __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < MICRO; i++) {
        const bool none = sum[i] == 0; // a query without a key
        #pragma unroll
        for (int n = 0; n < COLUMNS; n++) sums[i][n] = none ? (T)0 : sums[i][n] / sum[i];
        const int64_t query = first + row_of(i);
        if (thread_x() == 0 && query < queries)
            logsumexp[head.number * queries + query] = none ? (T)INFINITY : (T)log(sum[i]) + top[i];
    }
    store_rows(out + head.before(queries, out_row), out_row, first, queries, sums);
}
