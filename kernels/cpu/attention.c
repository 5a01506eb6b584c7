/* Scaled dot-product attention and its gradient: T. Dao, "FlashAttention-2", 2023, on a core's caches.

   A unit of work is a block of queries or of keys of one head. It goes through the blocks of the other kind. A block of
   scores, QUERIES x KEYS, stays in L1 or L2; nothing of the size of queries x keys is stored. All products are those of
   tile.h. Sums have a fixed order, which does not depend on the number of threads. */

#include "elementary.h"
#include "philox.h"
#include "tile.h"

enum { QUERIES = 64, KEYS = 64 }; /* rows and columns of a block of scores */

/* Arrays, lengths and options. Head z is head z % heads of example z / heads. `mask` ([z][keys], false for keys to
   ignore) and `rng` (for dropout) may be NULL. */
typedef struct {
    const T *q, *k, *v; /* [example][query or key][head][width], `row` elements between queries or keys */
    const bool *mask;
    const uint32_t *rng;
    int64_t batch, heads, queries, keys, width, row, out_row, causal; /* batch: of heads. out_row: of the output */
    T scale, keep_scale; /* keep_scale: the factor of probabilities that dropout keeps */
    float dropout;
    uint32_t stream;
} Attention;

/* The memory of a thread; lowering/cpu/attention.py states its size. PACKED(width) elements hold a packed block. */
#define PACKED(width) (64 * ((width) + TILE_COLUMNS))
typedef struct {
    T *scores, *by_scores;         /* QUERIES x KEYS */
    T *k_columns, *v_columns;      /* packed transposes of blocks of k and v */
    T *k_rows, *v_rows;            /* packed blocks of k and v */
    T *q_rows, *ct_rows;           /* packed blocks of q and of the cotangent */
    T top[QUERIES]; /* running maximum of the scores */
    double sum[QUERIES];
} Scratch;

/* `columns`, rounded up to whole vectors. */
static int64_t whole_vectors(int64_t columns) { return ceil_div(columns, LANES) * LANES; }

static Scratch *carve(const Team *team, int64_t width) {
    Scratch *s = (Scratch *)team->scratch;
    T *next = (T *)(team->scratch + (sizeof(Scratch) + 63) / 64 * 64);
    s->scores = next, s->by_scores = next += QUERIES * KEYS, next += QUERIES * KEYS;
    T **packed[] = {&s->k_columns, &s->v_columns, &s->k_rows, &s->v_rows, &s->q_rows, &s->ct_rows};
    for (int i = 0; i < 6; i++, next += PACKED(width)) *packed[i] = next;
    return s;
}

/* The elements before row i of head z in an array of `length` rows of `row` elements for each example. */
static int64_t before(const Attention *a, int64_t z, int64_t i, int64_t length, int64_t row) {
    return (z / a->heads * length + i) * row + z % a->heads * a->width;
}

/* C (rows x columns, `ld`) = or += A B. Element (i, p) of A is a[i * row_step + p * step]; B is packed. */
static void product(int64_t rows, int64_t columns, int64_t depth, const T *a, int64_t row_step, int64_t step, const T *b,
                    T *c, int64_t ld, bool add) {
    const int64_t strips = ceil_div(rows, TILE_ROWS);
    for (int64_t t = 0; t < strips; t++) {
        const int64_t i = part_begin(rows, strips, t), height = part_begin(rows, strips, t + 1) - i;
        for (int64_t j = 0; j < columns; j += TILE_COLUMNS)
            any_tile(height, min_i64(TILE_COLUMNS, columns - j), depth, a + i * row_step, row_step, step, b + j * depth,
                     c + i * ld + j, ld, add);
    }
}

/* Multiplies the row of probabilities from `element` on by keep_scale, or by 0 where dropout drops them. */
static void drop(const Attention *a, uint64_t element, int64_t count, T *row) {
    for (int64_t at = 0; at < count;) {
        const int64_t offset = (element + at) % 4, n = min_i64(4 * BATCH - offset, count - at);
        uint32_t words[4 * BATCH];
        philox((uint32_t)((element + at) / 4), a->rng, a->stream, words);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            const float number = (float)(int32_t)(words[offset + i] >> 8) * 0x1p-24f;
            row[at + i] *= number < a->dropout ? 0 : a->keep_scale;
        }
        at += n;
    }
}

/* Scales a row of scores. The scores of keys that query i does not attend to become -infinity, and so does the padding
   to whole vectors. */
static void scale_and_mask(const Attention *a, int64_t z, int64_t i, int64_t j, int64_t columns, T *row) {
    const int64_t seen = a->causal ? max_i64(min_i64(columns, i + 1 - j), 0) : columns, end = whole_vectors(columns);
#pragma omp simd
    for (int64_t c = 0; c < end; c++) row[c] *= a->scale;
    for (int64_t c = seen; c < end; c++) row[c] = -INFINITY;
    if (a->mask) {
        const bool *mask = a->mask + z * a->keys + j;
#pragma omp simd
        for (int64_t c = 0; c < columns; c++) row[c] = mask[c] ? row[c] : -(T)INFINITY;
    }
}

/* LANES numbers of each of LANES rows. Once it is transposed, each vector has one number of every row. */
typedef struct {
    T of[LANES][LANES];
} Square;

static inline void transpose_square(Square *s) {
    Vector rows[LANES];
    UNROLL for (int i = 0; i < LANES; i++) rows[i] = load(s->of[i]);
    shuffle(rows, LANES);
    UNROLL for (int i = 0; i < LANES; i++) store(s->of[i], rows[i]);
}

/* The probabilities of a block of scores up to a factor for each row, and the new running maxima and sums. factor[r] is
   the factor of what was summed before. */
static void softmax_block(Scratch *s, int64_t rows, int64_t columns, T *factor) {
    for (int64_t first = 0; first < rows; first += LANES) {
        const int64_t count = min_i64(LANES, rows - first), end = whole_vectors(columns);
        T *scores = s->scores + first * KEYS, *top = s->top + first, highest[LANES], shift[LANES], total[LANES] = {0};
        Square maxima = {0}, sums = {0};
        for (int64_t r = 0; r < count; r++) {
            T *row = scores + r * KEYS, *max = maxima.of[r];
            memcpy(max, row, sizeof maxima.of[r]);
            for (int64_t c = LANES; c < end; c += LANES)
                for (int l = 0; l < LANES; l++) max[l] = row[c + l] > max[l] ? row[c + l] : max[l];
        }
        transpose_square(&maxima);
        memcpy(highest, top, sizeof highest);
        for (int c = 0; c < LANES; c++)
            for (int l = 0; l < LANES; l++) highest[l] = maxima.of[c][l] > highest[l] ? maxima.of[c][l] : highest[l];
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            shift[l] = highest[l] == -(T)INFINITY ? 0 : highest[l]; /* of a query without a key yet */
            factor[first + l] = exp(top[l] - shift[l]);
            top[l] = highest[l];
        }
        for (int64_t r = 0; r < count; r++)
            for (int64_t c = 0; c < end; c += LANES) {
                T *row = scores + r * KEYS + c, *sum = sums.of[r];
                const T less = shift[r];
#pragma omp simd
                for (int l = 0; l < LANES; l++) sum[l] += row[l] = exp(row[l] - less);
            }
        transpose_square(&sums);
        for (int c = 0; c < LANES; c++)
            for (int l = 0; l < LANES; l++) total[l] += sums.of[c][l];
        for (int l = 0; l < LANES; l++) s->sum[first + l] = s->sum[first + l] * factor[first + l] + total[l];
    }
}

/* The keys that any of the queries up to row `end` attends to. */
static int64_t last_key(const Attention *a, int64_t end) { return a->causal ? min_i64(a->keys, end) : a->keys; }

static void forward(const Attention *a, Scratch *s, int64_t unit, T *out, T *logsumexp) {
    const int64_t blocks = ceil_div(a->queries, QUERIES), z = unit / blocks, i = unit % blocks * QUERIES;
    const int64_t rows = min_i64(QUERIES, a->queries - i), width = a->width, end = last_key(a, i + rows);
    const T *q = a->q + before(a, z, i, a->queries, a->row);
    out += before(a, z, i, a->queries, a->out_row);
    logsumexp += z * a->queries + i;
    T factor[QUERIES]; /* of the rows of the output; in the end the inverses of the sums */
    for (int64_t r = 0; r < QUERIES; r++) s->top[r] = -INFINITY, s->sum[r] = 0;
    for (int64_t j = 0; j < end; j += KEYS) {
        const int64_t columns = min_i64(KEYS, end - j), start = before(a, z, j, a->keys, a->row);
        pack_b(a->k + start, a->row, true, columns, width, s->k_columns);
        pack_b(a->v + start, a->row, false, width, columns, s->v_rows);
        product(rows, columns, width, q, a->row, 1, s->k_columns, s->scores, KEYS, false);
        for (int64_t r = 0; r < rows; r++) scale_and_mask(a, z, i + r, j, columns, s->scores + r * KEYS);
        softmax_block(s, rows, columns, factor);
        for (int64_t r = 0; r < rows; r++) {
            if (a->rng) drop(a, ((uint64_t)z * a->queries + i + r) * a->keys + j, columns, s->scores + r * KEYS);
            if (j > 0)
                for (int64_t c = 0; c < width; c++) out[r * a->out_row + c] *= factor[r];
        }
        product(rows, width, columns, s->scores, KEYS, 1, s->v_rows, out, a->out_row, j > 0);
    }
#pragma omp simd
    for (int64_t r = 0; r < rows; r++) {
        const T sum = (T)s->sum[r], value = log(sum) + s->top[r];
        factor[r] = sum == 0 ? 0 : (T)(1 / s->sum[r]); /* 0: a query without a key */
        logsumexp[r] = sum == 0 ? (T)INFINITY : value;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c++) out[r * a->out_row + c] *= factor[r];
}

/* The arrays of the gradient. by_* are the cotangents of q, k and v. */
typedef struct {
    const T *out, *logsumexp, *ct;
    T *by_q, *by_k, *by_v;
} Gradient;

static void pack_keys(const Attention *a, Scratch *s, int64_t z, int64_t j, int64_t columns) {
    const int64_t start = before(a, z, j, a->keys, a->row);
    pack_b(a->k + start, a->row, true, columns, a->width, s->k_columns);
    pack_b(a->v + start, a->row, true, columns, a->width, s->v_columns);
}

/* scores: the probabilities after dropout; by_scores: the cotangents of q kT. Of a block at query i and key j. */
static void block_of_gradient(const Attention *a, const Gradient *g, Scratch *s, int64_t z, int64_t i, int64_t rows,
                              int64_t j, int64_t columns) {
    const int64_t width = a->width, start = z * a->queries + i, to = before(a, z, i, a->queries, a->out_row);
    const T *q = a->q + before(a, z, i, a->queries, a->row);
    product(rows, columns, width, q, a->row, 1, s->k_columns, s->scores, KEYS, false);
    product(rows, columns, width, g->ct + to, a->out_row, 1, s->v_columns, s->by_scores, KEYS, false);
    for (int64_t r = 0; r < rows; r++) {
        T *row = s->scores + r * KEYS, *by = s->by_scores + r * KEYS, kept[KEYS];
        const T *ct = g->ct + to + r * a->out_row, *out = g->out + to + r * a->out_row;
        const T logsumexp = g->logsumexp[start + r];
        T delta = 0;
#pragma omp simd reduction(+ : delta)
        for (int64_t c = 0; c < width; c++) delta += ct[c] * out[c];
        scale_and_mask(a, z, i + r, j, columns, row);
#pragma omp simd
        for (int64_t c = 0; c < columns; c++) row[c] = exp(row[c] - logsumexp);
        if (a->rng) {
            for (int64_t c = 0; c < columns; c++) kept[c] = 1;
            drop(a, ((uint64_t)start + r) * a->keys + j, columns, kept);
            for (int64_t c = 0; c < columns; c++) by[c] *= kept[c];
        }
#pragma omp simd
        for (int64_t c = 0; c < columns; c++) by[c] = row[c] * (by[c] - delta) * a->scale;
        if (a->rng)
            for (int64_t c = 0; c < columns; c++) row[c] *= kept[c];
    }
}

/* Cotangents of a block of keys and values. With `all` they are those of a head's first or next block, in order, and the
   cotangents of its queries are added up as well. */
static void backward_keys(const Attention *a, const Gradient *g, Scratch *s, int64_t z, int64_t j, bool all) {
    const int64_t width = a->width, row = a->row, columns = min_i64(KEYS, a->keys - j);
    const int64_t start = before(a, z, j, a->keys, row), first = a->causal ? j / QUERIES * QUERIES : 0;
    for (int64_t c = 0; c < columns && first >= a->queries; c++) {
        memset(g->by_k + start + c * row, 0, width * sizeof(T));
        memset(g->by_v + start + c * row, 0, width * sizeof(T));
    }
    pack_keys(a, s, z, j, columns);
    if (all) pack_b(a->k + start, row, false, width, columns, s->k_rows);
    for (int64_t i = first; i < a->queries; i += QUERIES) {
        const int64_t rows = min_i64(QUERIES, a->queries - i), from = before(a, z, i, a->queries, row);
        block_of_gradient(a, g, s, z, i, rows, j, columns);
        pack_b(a->q + from, row, false, width, rows, s->q_rows);
        pack_b(g->ct + before(a, z, i, a->queries, a->out_row), a->out_row, false, width, rows, s->ct_rows);
        product(columns, width, rows, s->scores, 1, KEYS, s->ct_rows, g->by_v + start, row, i > first);
        product(columns, width, rows, s->by_scores, 1, KEYS, s->q_rows, g->by_k + start, row, i > first);
        if (all) product(rows, width, columns, s->by_scores, KEYS, 1, s->k_rows, g->by_q + from, row, j > 0);
    }
}

static void backward_queries(const Attention *a, const Gradient *g, Scratch *s, int64_t z, int64_t i) {
    const int64_t width = a->width, rows = min_i64(QUERIES, a->queries - i), end = last_key(a, i + rows);
    for (int64_t j = 0; j < end; j += KEYS) {
        const int64_t columns = min_i64(KEYS, end - j);
        pack_keys(a, s, z, j, columns);
        pack_b(a->k + before(a, z, j, a->keys, a->row), a->row, false, width, columns, s->k_rows);
        block_of_gradient(a, g, s, z, i, rows, j, columns);
        product(rows, width, columns, s->by_scores, KEYS, 1, s->k_rows, g->by_q + before(a, z, i, a->queries, a->row),
                a->row, j > 0);
    }
}

static void run_forward(const Team *team, const Attention *a, T *out, T *logsumexp) {
    Scratch *s = carve(team, a->width);
    const int64_t units = a->batch * ceil_div(a->queries, QUERIES);
#pragma omp for schedule(dynamic) nowait
    for (int64_t unit = 0; unit < units; unit++) forward(a, s, unit, out, logsumexp);
}

/* Units are heads, so that each block is computed once; or, if there are fewer heads than threads, blocks of keys and
   blocks of queries. */
static void run_backward(const Team *team, const Attention *a, const Gradient *g) {
    Scratch *s = carve(team, a->width);
    const int64_t of_keys = ceil_div(a->keys, KEYS), blocks = of_keys + ceil_div(a->queries, QUERIES);
    if (a->batch >= team->threads) {
#pragma omp for schedule(dynamic) nowait
        for (int64_t z = 0; z < a->batch; z++)
            for (int64_t j = 0; j < a->keys; j += KEYS) backward_keys(a, g, s, z, j, true);
        return;
    }
#pragma omp for schedule(dynamic) nowait
    for (int64_t unit = 0; unit < a->batch * blocks; unit++) {
        const int64_t z = unit / blocks, block = unit % blocks;
        if (block < of_keys)
            backward_keys(a, g, s, z, block * KEYS, false);
        else
            backward_queries(a, g, s, z, (block - of_keys) * QUERIES);
    }
}

#define NUMBERS                                                                                                \
    int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t width, int64_t row, int64_t out_row,  \
        int64_t causal, double scale, double dropout, int64_t stream

#define ATTENTION(q, k, v, mask, rng)                                                                          \
    {q, k, v, mask, rng, batch, heads, queries, keys, width, row, out_row, causal, (T)scale,                   \
     (T)(1 / (1 - dropout)), (float)dropout, (uint32_t)stream}

/* A function for each combination of the optional arguments: PARAMETERS are those that it has, MASK and RNG their
   values. */
#define FUNCTIONS(OPTIONAL, PARAMETERS, MASK, RNG)                                                                     \
    void FN(attention##OPTIONAL)(const Team *team, const T *q, const T *k, const T *v, PARAMETERS T *out,              \
                                 T *logsumexp, NUMBERS) {                                                              \
        const Attention a = ATTENTION(q, k, v, MASK, RNG);                                                             \
        run_forward(team, &a, out, logsumexp);                                                                         \
    }                                                                                                                  \
    void FN(attention_grad##OPTIONAL)(const Team *team, const T *q, const T *k, const T *v, const T *out,              \
                                      const T *logsumexp, const T *ct, PARAMETERS T *by_q, T *by_k, T *by_v, NUMBERS) { \
        const Attention a = ATTENTION(q, k, v, MASK, RNG);                                                             \
        const Gradient g = {out, logsumexp, ct, by_q, by_k, by_v};                                                     \
        run_backward(team, &a, &g);                                                                                    \
    }

/* The same of one array with the rows of q, k and v side by side: [example][row][q, k or v][head][width]. */
#define SELF_FUNCTIONS(OPTIONAL, PARAMETERS, RNG)                                                             \
    void FN(self_attention##OPTIONAL)(const Team *team, const T *x, PARAMETERS T *out, T *logsumexp, NUMBERS) { \
        const Attention a = ATTENTION(x, x + out_row, x + 2 * out_row, NULL, RNG);                            \
        run_forward(team, &a, out, logsumexp);                                                                \
    }                                                                                                         \
    void FN(self_attention_grad##OPTIONAL)(const Team *team, const T *x, const T *out, const T *logsumexp,    \
                                           const T *ct, PARAMETERS T *by_x, NUMBERS) {                        \
        const Attention a = ATTENTION(x, x + out_row, x + 2 * out_row, NULL, RNG);                            \
        const Gradient g = {out, logsumexp, ct, by_x, by_x + out_row, by_x + 2 * out_row};                    \
        run_backward(team, &a, &g);                                                                           \
    }

#define COMMA ,
FUNCTIONS(, , NULL, NULL)
FUNCTIONS(_mask, const bool *mask COMMA, mask, NULL)
FUNCTIONS(_rng, const uint32_t *rng COMMA, NULL, rng)
FUNCTIONS(_mask_rng, const bool *mask COMMA const uint32_t *rng COMMA, mask, rng)
SELF_FUNCTIONS(, , NULL)
SELF_FUNCTIONS(_rng, const uint32_t *rng COMMA, rng)
