// Attention on tensor cores: a block computes BLOCK queries of a head and loops over tiles of OTHERS keys. See mma.cuh;
// mma_pack.cu runs before.
#include "attention/mma.cuh"

constexpr int TILES_N = OTHERS / 16;
typedef Tile<BLOCK> Queries;
typedef Tile<OTHERS> Keys;

// A step of the online softmax: turns scores into 2^(score factor - maximum). `sum`: of this lane's columns. `keep`: rescales
// what was summed before.
static __device__ __forceinline__ void softmax_step(float (&scores)[TILES_N][M][2][4], float factor, float (&top)[LANE_ROWS],
    float (&sum)[LANE_ROWS], float (&keep)[LANE_ROWS]) {
    #pragma unroll
    for (int row = 0; row < LANE_ROWS; row++) {
        const int m = row / 2, h = row % 2 * 2;
        float highest = -INFINITY, total = 0;
        #pragma unroll
        for (int n = 0; n < 2 * TILES_N; n++) {
            const float(&pair)[4] = scores[n / 2][m][n % 2];
            highest = fmaxf(highest, fmaxf(pair[h], pair[h + 1]));
        }
        highest = fmaxf(highest, shuffle_xor(highest, 1));
        highest = fmaxf(highest, shuffle_xor(highest, 2));
        highest = fmaxf(ceilf(highest * factor), top[row]); // an integer, so differences have no error
        const float shift = highest == -INFINITY ? 0.0f : highest; // no key yet
        #pragma unroll
        for (int n = 0; n < 2 * TILES_N; n++) {
            float(&pair)[4] = scores[n / 2][m][n % 2];
            pair[h] = exp2_approximate(fma(pair[h], factor, -shift));
            pair[h + 1] = exp2_approximate(fma(pair[h + 1], factor, -shift));
            total += pair[h] + pair[h + 1];
        }
        keep[row] = exp2_approximate(top[row] - shift);
        sum[row] = sum[row] * keep[row] + total;
        top[row] = highest;
    }
}

KERNEL __launch_bounds__(THREADS) attention_mma(const T *q, const T *k, const T *v,
    IF(MASKED, const bool *mask,) IF(STARTS, const int32_t *starts,) IF(DROPOUT, const uint32_t *rng,) T *out, T *logsumexp, int64_t batch, int64_t heads,
    int64_t queries, int64_t keys, int64_t row, int64_t out_row, int64_t step, double scale, double dropout, int64_t stream,
    char *scratch) {
    wait_for_inputs();
    const Head head = head_of(mask, starts, rng, blockIdx.x % batch, heads, queries, keys, row, out_row, scale, dropout, stream);
    const Rows of_q = {q + head.before(queries, row), row, (int)queries};
    Scratch packed(scratch, batch, queries, keys);
    const Operand of_k = operand_of({k + step + head.before(keys, row), row, (int)keys}, packed, batch, head.number);
    const Operand of_v = operand_of({v + 2 * step + head.before(keys, row), row, (int)keys}, packed, batch, head.number);
    const int64_t tiles = gridDim.x / batch, tile = blockIdx.x / batch;
    const int first = (int)(CAUSAL ? tiles - 1 - tile : tile) * BLOCK; // the longest rows start first
    typedef unsigned char Stage[2 * (Keys::BYTES + NUMBERS)];
    unsigned char *const q_tile = *SHARED_OWN(unsigned char[Queries::BYTES], shared_bytes);
    Stage *const ring = SHARED_RING(Stage, shared_bytes);

    const int end = (int)(CAUSAL && first + BLOCK < keys ? first + BLOCK : keys), count = (end + OTHERS - 1) / OTHERS;
    Copy<OTHERS, ColumnOrder> k_copy, v_copy;
    const auto fetch = [&](int i) {
        unsigned char *const stage = ring[i % STAGES];
        k_copy.start(of_k, i * OTHERS, stage);
        v_copy.start(of_v, i * OTHERS, stage + Keys::BYTES);
        cp_async_commit_group();
    };
    const int begin = (int)head.first_key(first) / OTHERS;
    fetch(begin);
    const float inverse = split_own(of_q, first, scale < 0 ? -1.0f : 1.0f, q_tile);

    float sums[PADDED / 16][M][2][4] = {}, top[LANE_ROWS], sum[LANE_ROWS] = {};
    #pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) top[i] = -INFINITY;
    const int own = first + warp() * ROWS; // this warp's first query
    const float of_scores = fabsf((float)scale) * LOG2_E * inverse;
    for (int i = begin; i < count; i++) {
        const int start = i * OTHERS;
        unsigned char *const k_tile = ring[i % STAGES], *const v_tile = k_tile + Keys::BYTES;
        cp_async_wait_group<0>();
        k_copy.finish(k_tile);
        v_copy.finish(v_tile);
        __syncthreads();
        if (STAGES == 2 && i + 1 < count) fetch(i + 1);
        if (!CAUSAL || start < own + ROWS) {
            float scores[TILES_N][M][2][4], keep[LANE_ROWS], factor[LANE_ROWS];
            row_products(q_tile, k_tile, scores);
            if (MASKED || STARTS || start + OTHERS > keys || (CAUSAL && start + OTHERS > own + 1)) {
                #pragma unroll
                for (int x = 0; x < TILES_N * M * 8; x++) {
                    const int n = x / (M * 8), m = x / 8 % M, t = x / 4 % 2, h = x % 4;
                    if (!head.attends(first + lane_row(m, h / 2), start + lane_column(2 * n + t, h % 2)))
                        scores[n][m][t][h] = -INFINITY;
                }
            }
            softmax_step(scores, fmaxf(of_scores * of_k.inverse(start), SMALLEST), top, sum, keep);
            if constexpr (DROPOUT) {
                #pragma unroll
                for (int n = 0; n < TILES_N; n++)
                    #pragma unroll
                    for (int r = 0; r < LANE_ROWS; r++) {
                        bool kept[4];
                        keeps_four(head, first + lane_row(r / 2, r % 2), start + lane_column(2 * n, 0), kept);
                        #pragma unroll
                        for (int x = 0; x < 4; x++)
                            if (!kept[x]) scores[n][r / 2][x / 2][r % 2 * 2 + x % 2] = 0;
                    }
            }
            const float of_values = of_v.inverse(start);
            #pragma unroll
            for (int r = 0; r < LANE_ROWS; r++) factor[r] = of_values;
            add_products<PADDED>(Weights(scores, PROBABILITY), v_tile, 0, sums, keep, factor);
        }
        if (STAGES == 1) {
            __syncthreads();
            if (i + 1 < count) fetch(i + 1);
        }
    }
    #pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
        const float total = over_lanes<Sum, 4>(sum[r]);
        const bool none = total == 0; // a query without a key
        const int query = first + lane_row(r / 2, r % 2);
        if (lane_c() == 0 && query < queries)
            logsumexp[head.number * queries + query] = none ? INFINITY : top[r] * LN_2 + logf(total);
        sum[r] = none ? 0.0f : head.keep_scale / (total * PROBABILITY);
    }
    store_rows<PADDED>(out + head.before(queries, out_row), out_row, first, queries, 0, sums, sum);
}
