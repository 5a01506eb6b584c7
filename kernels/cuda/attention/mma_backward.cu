// The gradient of attention on tensor cores, after mma_pack.cu: the cotangents of keys and values, by blocks of keys; those of
// queries, by blocks of queries. Both recompute the probabilities. See mma.cuh.
//
// SLICE: columns of the cotangents that a block computes.
#include "attention/mma.cuh"

constexpr int TILES_N = OTHERS / 16, SLICES = (PADDED + SLICE - 1) / SLICE;
typedef float Scores[TILES_N][M][2][4];
typedef Tile<BLOCK> Own;
typedef Tile<OTHERS> Other;
typedef unsigned char OwnTile[Own::BYTES], Stage[2 * (Other::BYTES + NUMBERS)];

// The operands, and numbers of the queries of a head.
struct Inputs {
    Operand q, k, v, ct;
    const float *shifts, *deltas;
    __device__ __forceinline__ Inputs(
        const Head &x, const T *q, const T *k, const T *v, const T *ct, int64_t step, int64_t batch, Scratch scratch)
        : q(operand_of({q + x.before(x.queries, x.row), x.row, (int)x.queries}, scratch, batch, x.number)),
          k(operand_of({k + step + x.before(x.keys, x.row), x.row, (int)x.keys}, scratch, batch, x.number)),
          v(operand_of({v + 2 * step + x.before(x.keys, x.row), x.row, (int)x.keys}, scratch, batch, x.number)),
          ct(operand_of({ct + x.before(x.queries, x.out_row), x.out_row, (int)x.queries}, scratch, batch, x.number)) {
        shifts = scratch.shifts + x.number * padded_length(x.queries), deltas = scratch.deltas + (shifts - scratch.shifts);
    }
};

// The factor of scores whose operands have the inverse scales a and b, for exponentials to base 2.
__device__ __forceinline__ float score_factor(double scale, float a, float b) {
    return fmaxf(fabsf((float)scale) * LOG2_E * a * b, SMALLEST);
}

// Scales the rows of gradients of scores. factor[row] is the inverse of a row's scale, times `inverse`.
static __device__ __forceinline__ void scale_rows(Scores &x, float inverse, float (&factor)[LANE_ROWS]) {
    #pragma unroll
    for (int row = 0; row < LANE_ROWS; row++) {
        if (FORMAT != FLOAT16) {
            factor[row] = inverse;
            continue;
        }
        const int m = row / 2, h = row % 2 * 2;
        float largest = 0;
        #pragma unroll
        for (int n = 0; n < 2 * TILES_N; n++) {
            const float(&pair)[4] = x[n / 2][m][n % 2];
            largest = fmaxf(largest, fmaxf(fabsf(pair[h]), fabsf(pair[h + 1])));
        }
        largest = fmaxf(largest, shuffle_xor(largest, 1));
        largest = fmaxf(largest, shuffle_xor(largest, 2));
        const Scale scale(largest);
        #pragma unroll
        for (int n = 0; n < 2 * TILES_N; n++) {
            float(&pair)[4] = x[n / 2][m][n % 2];
            pair[h] *= scale.factor;
            pair[h + 1] *= scale.factor;
        }
        factor[row] = scale.inverse * inverse;
    }
}

KERNEL __launch_bounds__(THREADS) attention_mma_grad_keys(const T *q, const T *k, const T *v, const T *ct,
    IF(MASKED, const bool *mask,) IF(STARTS, const int32_t *starts,) IF(DROPOUT, const uint32_t *rng,) T *by_k, T *by_v, int64_t batch, int64_t heads,
    int64_t queries, int64_t keys, int64_t row, int64_t out_row, int64_t step, double scale, double dropout, int64_t stream,
    char *scratch) {
    wait_for_inputs();
    const int column = blockIdx.x % SLICES * SLICE;
    const int64_t block = blockIdx.x / SLICES;
    const int first = (int)(block / batch) * BLOCK;
    const Head head = head_of(mask, starts, rng, block % batch, heads, queries, keys, row, out_row, scale, dropout, stream);
    const Inputs in(head, q, k, v, ct, step, batch, {scratch, batch, queries, keys});
    OwnTile *const own_tiles = SHARED_OWN(OwnTile, shared_bytes);
    unsigned char *const k_tile = own_tiles[0], *const v_tile = own_tiles[1];
    Stage *const ring = SHARED_RING(Stage, shared_bytes);

    const int begin = CAUSAL ? first / OTHERS : 0;
    int count = (int)((queries + OTHERS - 1) / OTHERS);
    while (count > begin + 1 && head.first_key((count - 1) * OTHERS) >= first + BLOCK) count--; // they attend to later keys only
    Copy<OTHERS, ColumnOrder> q_copy, ct_copy;
    const auto fetch = [&](int i) {
        unsigned char *const stage = ring[i % STAGES];
        const int start = i * OTHERS;
        q_copy.start(in.q, start, stage);
        ct_copy.start(in.ct, start, stage + Other::BYTES);
        if (threadIdx.x < OTHERS / 2) {
            const int at = threadIdx.x % (OTHERS / 4) * 4;
            const bool second = threadIdx.x >= OTHERS / 4;
            float *const to = (float *)(stage + 2 * Other::BYTES + second * NUMBERS) + at;
            cp_async<16>(to, (second ? in.deltas : in.shifts) + start + at, true);
        }
        cp_async_commit_group();
    };
    copy_own(in.k, first, k_tile);
    copy_own(in.v, first, v_tile);
    fetch(begin);

    float k_sums[SLICE / 16][M][2][4] = {}, v_sums[SLICE / 16][M][2][4] = {}, ones[LANE_ROWS];
    #pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) ones[r] = 1;
    const int own = first + warp() * ROWS, group = own < (int)keys ? own : first;
    for (int i = begin; i < count; i++) {
        const int start = i * OTHERS;
        unsigned char *const q_tile = ring[i % STAGES], *const ct_tile = q_tile + Other::BYTES;
        cp_async_wait_group<0>();
        q_copy.finish(q_tile);
        ct_copy.finish(ct_tile);
        __syncthreads();
        if (STAGES == 2 && i + 1 < count) fetch(i + 1);
        const float *const shifts = (const float *)(ct_tile + Other::BYTES), *const deltas = shifts + OTHERS;
        if (!CAUSAL || start + OTHERS > own) {
            Scores scores, gradients;
            float factor[LANE_ROWS];
            uint64_t kept = 0; // a bit for each score
            row_products(k_tile, q_tile, scores);
            const float of_scores = score_factor(scale, in.k.inverse(group), in.q.inverse(start));
            #pragma unroll
            for (int n = 0; n < TILES_N; n++) {
                const Vector<float, 4> shift = load<float, 4>(shifts + lane_column(2 * n, 0));
                int first_keys[4];
                #pragma unroll
                for (int at = 0; at < 4; at++) first_keys[at] = (int)head.first_key(start + lane_column(2 * n, at));
                #pragma unroll
                for (int m = 0; m < M; m++)
                    #pragma unroll
                    for (int x = 0; x < 8; x++) {
                        const int at = x / 4 * 2 + x % 2; // of the lane's four queries
                        float &score = scores[n][m][x / 4][x % 4];
                        score = exp2_approximate(fma(score, of_scores, shift.lane[at]));
                        const int key = first + lane_row(m, x % 4 / 2);
                        if ((CAUSAL && start + lane_column(2 * n, at) < key) || key < first_keys[at]) score = 0;
                    }
            }
            if constexpr (DROPOUT) {
                #pragma unroll
                for (int n = 0; n < TILES_N; n++)
                    #pragma unroll
                    for (int x = 0; x < 4; x++)
                        #pragma unroll
                        for (int r = 0; r < LANE_ROWS; r += 4) {
                            bool keep[4];
                            keeps_four(head, start + lane_column(2 * n, x), first + lane_row(0, 0) + r, keep);
                            #pragma unroll
                            for (int j = 0; j < 4 && r + j < LANE_ROWS; j++) {
                                const int m = (r + j) / 2, h = (r + j) % 2 * 2 + x % 2;
                                if (keep[j]) kept |= (uint64_t)1 << ((n * M + m) * 8 + x / 2 * 4 + h);
                            }
                        }
            }
            const auto keeps = [&](int n, int m, int x) { return !DROPOUT || (kept >> ((n * M + m) * 8 + x) & 1); };
            #pragma unroll
            for (int n = 0; n < TILES_N; n++)
                #pragma unroll
                for (int m = 0; m < M; m++)
                    #pragma unroll
                    for (int x = 0; x < 8; x++)
                        gradients[n][m][x / 4][x % 4] = keeps(n, m, x) ? scores[n][m][x / 4][x % 4] : 0.0f;
            #pragma unroll
            for (int r = 0; r < LANE_ROWS; r++) factor[r] = in.ct.inverse(start);
            add_products<SLICE>(Weights(gradients, PROBABILITY), ct_tile, column, v_sums, ones, factor);

            row_products(v_tile, ct_tile, gradients);
            const float of_products = in.v.inverse(group) * in.ct.inverse(start) * head.keep_scale;
            #pragma unroll
            for (int n = 0; n < TILES_N; n++) {
                const Vector<float, 4> delta = load<float, 4>(deltas + lane_column(2 * n, 0));
                #pragma unroll
                for (int m = 0; m < M; m++)
                    #pragma unroll
                    for (int x = 0; x < 8; x++) {
                        float &of = gradients[n][m][x / 4][x % 4];
                        const float product = keeps(n, m, x) ? of : 0.0f;
                        of = scores[n][m][x / 4][x % 4] * fma(product, of_products, -delta.lane[x / 4 * 2 + x % 2]);
                    }
            }
            scale_rows(gradients, in.q.inverse(start), factor);
            add_products<SLICE>(Weights(gradients, 1), q_tile, column, k_sums, ones, factor);
        }
        if (STAGES == 1) {
            __syncthreads();
            if (i + 1 < count) fetch(i + 1);
        }
    }
    float of_k[LANE_ROWS], of_v[LANE_ROWS];
    #pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
        const int key = first + lane_row(r / 2, r % 2);
        of_k[r] = fabsf((float)scale), of_v[r] = head.keep_scale / PROBABILITY;
        if (MASKED && key < keys && !head.mask[head.number * keys + key]) {
            #pragma unroll
            for (int x = 0; x < SLICE / 4; x++)
                k_sums[x / 4][r / 2][x / 2 % 2][r % 2 * 2 + x % 2] = v_sums[x / 4][r / 2][x / 2 % 2][r % 2 * 2 + x % 2] = 0;
        }
    }
    const int64_t before = head.before(keys, row);
    store_rows<SLICE>(by_k + step + before, row, first, keys, column, k_sums, of_k);
    store_rows<SLICE>(by_v + 2 * step + before, row, first, keys, column, v_sums, of_v);
}

KERNEL __launch_bounds__(THREADS) attention_mma_grad_queries(const T *q, const T *k, const T *v, const T *ct,
    IF(MASKED, const bool *mask,) IF(STARTS, const int32_t *starts,) IF(DROPOUT, const uint32_t *rng,) T *by_q, int64_t batch, int64_t heads, int64_t queries,
    int64_t keys, int64_t row, int64_t out_row, int64_t step, double scale, double dropout, int64_t stream, char *scratch) {
    wait_for_inputs();
    const int column = blockIdx.x % SLICES * SLICE;
    const int64_t block = blockIdx.x / SLICES, tiles = gridDim.x / SLICES / batch, tile = block / batch;
    const int first = (int)(CAUSAL ? tiles - 1 - tile : tile) * BLOCK; // the longest rows start first
    const Head head = head_of(mask, starts, rng, block % batch, heads, queries, keys, row, out_row, scale, dropout, stream);
    const Inputs in(head, q, k, v, ct, step, batch, {scratch, batch, queries, keys});
    OwnTile *const own_tiles = SHARED_OWN(OwnTile, shared_bytes);
    unsigned char *const q_tile = own_tiles[0], *const ct_tile = own_tiles[1];
    Stage *const ring = SHARED_RING(Stage, shared_bytes);

    const int end = (int)(CAUSAL && first + BLOCK < keys ? first + BLOCK : keys), count = (end + OTHERS - 1) / OTHERS;
    Copy<OTHERS, ColumnOrder> k_copy, v_copy;
    const auto fetch = [&](int i) {
        unsigned char *const stage = ring[i % STAGES];
        k_copy.start(in.k, i * OTHERS, stage);
        v_copy.start(in.v, i * OTHERS, stage + Other::BYTES);
        cp_async_commit_group();
    };
    copy_own(in.q, first, q_tile);
    copy_own(in.ct, first, ct_tile);
    const int begin = (int)head.first_key(first) / OTHERS;
    fetch(begin);

    float sums[SLICE / 16][M][2][4] = {}, ones[LANE_ROWS], shift[LANE_ROWS], delta[LANE_ROWS];
    #pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
        const int query = first + lane_row(r / 2, r % 2);
        ones[r] = 1;
        shift[r] = query < queries ? in.shifts[query] : -INFINITY;
        delta[r] = query < queries ? in.deltas[query] : 0.0f;
    }
    const int own = first + warp() * ROWS, group = own < (int)queries ? own : first;
    for (int i = begin; i < count; i++) {
        const int start = i * OTHERS;
        unsigned char *const k_tile = ring[i % STAGES], *const v_tile = k_tile + Other::BYTES;
        cp_async_wait_group<0>();
        k_copy.finish(k_tile);
        v_copy.finish(v_tile);
        __syncthreads();
        if (STAGES == 2 && i + 1 < count) fetch(i + 1);
        if (!CAUSAL || start < own + ROWS) {
            Scores scores, gradients;
            float factor[LANE_ROWS];
            row_products(q_tile, k_tile, scores);
            const float of_scores = score_factor(scale, in.q.inverse(group), in.k.inverse(start));
            const bool all = !MASKED && !STARTS && start + OTHERS <= keys && (!CAUSAL || start + OTHERS <= own + 1);
            #pragma unroll
            for (int n = 0; n < TILES_N; n++)
                #pragma unroll
                for (int m = 0; m < M; m++)
                    #pragma unroll
                    for (int x = 0; x < 8; x++) {
                        float &score = scores[n][m][x / 4][x % 4];
                        score = exp2_approximate(fma(score, of_scores, shift[2 * m + x % 4 / 2]));
                        if (!all && !head.attends(first + lane_row(m, x % 4 / 2), start + lane_column(2 * n + x / 4, x % 2)))
                            score = 0;
                    }
            row_products(ct_tile, v_tile, gradients);
            const float of_products = in.ct.inverse(group) * in.v.inverse(start) * head.keep_scale;
            #pragma unroll
            for (int n = 0; n < TILES_N; n++)
                #pragma unroll
                for (int r = 0; r < LANE_ROWS; r++) {
                    bool keep[4] = {true, true, true, true};
                    if (DROPOUT) keeps_four(head, first + lane_row(r / 2, r % 2), start + lane_column(2 * n, 0), keep);
                    #pragma unroll
                    for (int x = 0; x < 4; x++) {
                        float &of = gradients[n][r / 2][x / 2][r % 2 * 2 + x % 2];
                        of = scores[n][r / 2][x / 2][r % 2 * 2 + x % 2] * fma(keep[x] ? of : 0.0f, of_products, -delta[r]);
                    }
                }
            scale_rows(gradients, in.k.inverse(start), factor);
            add_products<SLICE>(Weights(gradients, 1), k_tile, column, sums, ones, factor);
        }
        if (STAGES == 1) {
            __syncthreads();
            if (i + 1 < count) fetch(i + 1);
        }
    }
    #pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) ones[r] = (float)scale;
    store_rows<SLICE>(by_q + head.before(queries, row), row, first, queries, column, sums, ones);
}
