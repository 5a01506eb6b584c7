// Attention by FMA, and its gradient in three launches: the sum of ct * out of each query; the cotangents of keys and values, by
// tiles of keys; those of queries, by tiles of queries. The last two recompute the probabilities.
//
// A block computes TILE queries, or TILE keys. Tiles of rows, and tiles of TILE x TILE scores, are in shared memory.
//
// Thread (y, x) of LANES x LANES computes the scores of rows MICRO y + i and columns x + LANES j, with i, j < MICRO. Of
// a result it computes the same rows, and columns x + LANES n. The LANES threads of a row are neighbouring lanes of a warp.
//
// Macros: TILE, MICRO, and those of attention.cuh.
#include "attention/attention.cuh"

constexpr int LANES = TILE / MICRO, THREADS = LANES * LANES, VECTOR = 16 / sizeof(T);
constexpr int COLUMNS = (WIDTH + LANES - 1) / LANES, PADDED = COLUMNS * LANES;
// Elements between rows of a tile, and of a tile of scores: 16 bytes of padding avoid bank conflicts.
constexpr int STRIDE = PADDED + VECTOR, SCORES = TILE + VECTOR;
static_assert(LANES <= WARP && THREADS % WARP == 0 && PADDED % VECTOR == 0, "the lanes of a row are in one warp");

// An operand of a product, in the precision of the products.
__device__ __forceinline__ float operand(float x) { return rounded(x); }
__device__ __forceinline__ double operand(double x) { return x; }

typedef T RowTile[TILE * STRIDE], ScoreTile[TILE * SCORES]; // in shared memory

__device__ __forceinline__ int thread_y() { return threadIdx.x / LANES; }
__device__ __forceinline__ int thread_x() { return threadIdx.x % LANES; }
__device__ __forceinline__ int row_of(int i) { return thread_y() * MICRO + i; }
__device__ __forceinline__ int column_of(int j) { return thread_x() + LANES * j; }

// Copies rows `first` to first + TILE of `rows` rows to shared memory; the rest is 0. `stride`: elements between rows.
__device__ __forceinline__ void load_tile(const T *from, int64_t stride, int64_t first, int64_t rows, T *tile) {
    constexpr int VECTORS = PADDED / VECTOR;
    for (int i = threadIdx.x; i < TILE * VECTORS; i += THREADS) {
        const int row = i / VECTORS, column = i % VECTORS * VECTOR;
        const T *source = from + (first + row) * stride + column;
        Vector<T, VECTOR> x = {};
        if (first + row < rows) {
            if constexpr (WIDTH % VECTOR == 0) {
                if (column < WIDTH) x = load<T, VECTOR>(source);
            } else {
                #pragma unroll
                for (int k = 0; k < VECTOR; k++)
                    if (column + k < WIDTH) x.lane[k] = source[k];
            }
        }
        #pragma unroll
        for (int k = 0; k < VECTOR; k++) x.lane[k] = operand(x.lane[k]);
        store(tile, row * STRIDE + column, x);
    }
}

// a times the transpose of b, for two tiles.
__device__ __forceinline__ void row_products(const T *a, const T *b, T (&products)[MICRO][MICRO]) {
    #pragma unroll
    for (int i = 0; i < MICRO; i++)
        #pragma unroll
        for (int j = 0; j < MICRO; j++) products[i][j] = 0;
    a += row_of(0) * STRIDE, b += column_of(0) * STRIDE;
    #pragma unroll 2
    for (int k = 0; k < PADDED; k += VECTOR) {
        Vector<T, VECTOR> left[MICRO], right[MICRO];
        #pragma unroll
        for (int i = 0; i < MICRO; i++) left[i] = load<T, VECTOR>(a + i * STRIDE + k);
        #pragma unroll
        for (int j = 0; j < MICRO; j++) right[j] = load<T, VECTOR>(b + j * LANES * STRIDE + k);
        #pragma unroll
        for (int h = 0; h < VECTOR; h++)
            #pragma unroll
            for (int i = 0; i < MICRO; i++)
                #pragma unroll
                for (int j = 0; j < MICRO; j++)
                    products[i][j] = fma(left[i].lane[h], right[j].lane[h], products[i][j]);
    }
}

// sums += weights tile, or the transpose of weights times the tile. `weights` is a tile of scores.
template <bool TRANSPOSED>
__device__ __forceinline__ void add_products(const T *weights, const T *tile, T (&sums)[MICRO][COLUMNS]) {
    constexpr int DEPTH = TRANSPOSED ? 1 : VECTOR;
    constexpr int WIDE = MICRO < VECTOR ? MICRO : VECTOR;
    #pragma unroll 2
    for (int k = 0; k < TILE; k += DEPTH) {
        T left[DEPTH][MICRO];
        if constexpr (TRANSPOSED) {
            #pragma unroll
            for (int i = 0; i < MICRO; i += WIDE) {
                const Vector<T, WIDE> x = load<T, WIDE>(weights + k * SCORES + row_of(i));
                #pragma unroll
                for (int h = 0; h < WIDE; h++) left[0][i + h] = x.lane[h];
            }
        } else {
            #pragma unroll
            for (int i = 0; i < MICRO; i++) {
                const Vector<T, VECTOR> x = load<T, VECTOR>(weights + row_of(i) * SCORES + k);
                #pragma unroll
                for (int h = 0; h < VECTOR; h++) left[h][i] = x.lane[h];
            }
        }
        #pragma unroll
        for (int h = 0; h < DEPTH; h++)
            #pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                const T right = tile[(k + h) * STRIDE + column_of(n)];
                #pragma unroll
                for (int i = 0; i < MICRO; i++) sums[i][n] = fma(left[h][i], right, sums[i][n]);
            }
    }
}

// Stores rows `first` to first + TILE of `rows` rows.
__device__ __forceinline__ void store_rows(
    T *to, int64_t stride, int64_t first, int64_t rows, const T (&sums)[MICRO][COLUMNS]) {
    #pragma unroll
    for (int i = 0; i < MICRO; i++)
        #pragma unroll
        for (int n = 0; n < COLUMNS; n++)
            if (first + row_of(i) < rows && column_of(n) < WIDTH)
                to[(first + row_of(i)) * stride + column_of(n)] = sums[i][n];
}

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
