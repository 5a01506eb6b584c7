// Attention of a few queries, such as that of the token that a language model writes next: a block computes QUERIES queries of a
// head. LANES neighbouring threads are a team; each team takes every TEAMS-th key, and keeps what online softmax needs of the
// keys that it has seen (T. Dao et al., "Flash-Decoding", 2023). At the end the block adds up the sums of its teams. Keys and
// values are read once, those that the mask excludes are not read.
//
// Macros: QUERIES, LANES, TEAMS, and those of attention.cuh. There is no causal order and no dropout.
#include "attention/attention.cuh"

constexpr int THREADS = LANES * TEAMS, VECTOR = 16 / sizeof(T), STEP = LANES * VECTOR, PARTS = (WIDTH + STEP - 1) / STEP;
constexpr int MINE = PARTS * VECTOR; // the columns of a thread: VECTOR of each STEP
constexpr int KEYS = 4;              // that a team takes at once, so that their loads overlap
static_assert(WARP % LANES == 0 && THREADS % WARP == 0, "a team is in one warp");

__device__ __forceinline__ int column_of(int i) { return i / VECTOR * STEP + threadIdx.x % LANES * VECTOR + i % VECTOR; }

// The columns of this thread of a row; zeros past its end, and where `row` is null.
static __device__ __forceinline__ void load_columns(const T *row, T (&x)[MINE]) {
    #pragma unroll
    for (int i = 0; i < MINE; i += VECTOR) {
        const int column = column_of(i);
        if constexpr (WIDTH % VECTOR == 0) {
            const Vector<T, VECTOR> found = row && column < WIDTH ? load<T, VECTOR>(row + column) : Vector<T, VECTOR>{};
            #pragma unroll
            for (int j = 0; j < VECTOR; j++) x[i + j] = found.lane[j];
        } else {
            #pragma unroll
            for (int j = 0; j < VECTOR; j++) x[i + j] = row && column + j < WIDTH ? row[column + j] : (T)0;
        }
    }
}

KERNEL __launch_bounds__(THREADS) attention_few_queries(const T *q, const T *k, const T *v, IF(MASKED, const bool *mask,) T *out,
    T *logsumexp, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t row, int64_t out_row, int64_t step,
    double scale, double dropout, int64_t stream) {
    wait_for_inputs();
    const Head head = head_of(mask, starts, rng, blockIdx.x, heads, queries, keys, row, out_row, scale, dropout, stream);
    q += head.before(queries, row), k += step + head.before(keys, row), v += 2 * step + head.before(keys, row);
    out += head.before(queries, out_row);

    T of_query[QUERIES][MINE], sums[QUERIES][MINE] = {}, top[QUERIES], sum[QUERIES] = {};
    #pragma unroll
    for (int i = 0; i < QUERIES; i++) {
        load_columns(q + i * row, of_query[i]);
        top[i] = -(T)INFINITY;
    }
    const int team = threadIdx.x / LANES;
    for (int64_t first = team; first - team < keys; first += KEYS * TEAMS) {
        T scores[QUERIES][KEYS], x[KEYS][MINE];
        bool attends[KEYS];
        #pragma unroll
        for (int n = 0; n < KEYS; n++) {
            attends[n] = head.attends(0, first + n * TEAMS);
            load_columns(attends[n] ? k + (first + n * TEAMS) * row : nullptr, x[n]);
        }
        #pragma unroll
        for (int n = 0; n < KEYS; n++)
            #pragma unroll
            for (int i = 0; i < QUERIES; i++) {
                T score = 0;
                #pragma unroll
                for (int j = 0; j < MINE; j++) score = fma(of_query[i][j], x[n][j], score);
                score = over_lanes<Sum, LANES>(score);
                scores[i][n] = attends[n] ? score * head.scale : -(T)INFINITY;
            }
        #pragma unroll
        for (int n = 0; n < KEYS; n++) load_columns(attends[n] ? v + (first + n * TEAMS) * row : nullptr, x[n]);
        #pragma unroll
        for (int i = 0; i < QUERIES; i++) {
            T highest = top[i];
            #pragma unroll
            for (int n = 0; n < KEYS; n++) highest = Max::of(highest, scores[i][n]);
            const T shift = highest == -(T)INFINITY ? (T)0 : highest; // no key yet
            const T factor = exp(top[i] - shift);
            top[i] = highest, sum[i] *= factor;
            #pragma unroll
            for (int j = 0; j < MINE; j++) sums[i][j] *= factor;
            #pragma unroll
            for (int n = 0; n < KEYS; n++) {
                const T weight = exp(scores[i][n] - shift);
                sum[i] += weight;
                #pragma unroll
                for (int j = 0; j < MINE; j++) sums[i][j] = fma(weight, x[n][j], sums[i][j]);
            }
        }
    }

    typedef T Rows[QUERIES * STEP * PARTS];
    T *const tops = SHARED_TOPS(T, shared_bytes), *const totals = SHARED_TOTALS(T, shared_bytes);
    Rows *const parts = SHARED_SUMS(Rows, shared_bytes);
    #pragma unroll
    for (int i = 0; i < QUERIES; i++) {
        if (threadIdx.x % LANES == 0) tops[team * QUERIES + i] = top[i], totals[team * QUERIES + i] = sum[i];
        #pragma unroll
        for (int j = 0; j < MINE; j++) parts[team][i * STEP * PARTS + column_of(j)] = sums[i][j];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < QUERIES * WIDTH; at += THREADS) {
        const int i = at / WIDTH, column = at % WIDTH;
        T highest = -(T)INFINITY, total = 0, found = 0;
        for (int t = 0; t < TEAMS; t++) highest = Max::of(highest, tops[t * QUERIES + i]);
        const bool none = highest == -(T)INFINITY; // a query without a key
        for (int t = 0; t < TEAMS; t++) {
            const T factor = none ? (T)0 : (T)exp(tops[t * QUERIES + i] - highest);
            total = fma(factor, totals[t * QUERIES + i], total);
            found = fma(factor, parts[t][i * STEP * PARTS + column], found);
        }
        out[i * out_row + column] = none ? (T)0 : found / total;
        if (column == 0) logsumexp[head.number * queries + i] = none ? (T)INFINITY : (T)log(total) + highest;
    }
}
