/* Scaled dot-product attention and its gradient: T. Dao, "FlashAttention-2", 2023, on a core's caches.

   A unit of work is a block of queries or of keys of one head. It goes through the blocks of the other kind. A block of
   scores is transposed, [key][query], so that queries are the lanes of a vector: maxima and sums over the keys need no
   shuffles, and products read k and v in place. It stays in L1; nothing of the size of queries x keys is stored. tile.h
   computes all products. Sums have a fixed order, which does not depend on the number of threads. */

#include "elementary.h"
#include "philox.h"
#include "tile.h"

enum { QUERIES = TILE_COLUMNS }; /* columns of a block of scores; it has KEYS rows, a macro (lowering/cpu/products.py) */

/* Arrays, lengths and options. Head z is head z % heads of example z / heads. `mask` ([z][keys], false for keys to
   ignore), `starts` ([example][queries], the first key of each query, with `causal`) and `rng` (for dropout) may be
   NULL. */
typedef struct {
    const T *q, *k, *v; /* [example][query or key][head][width], `row` elements between queries or keys */
    const bool *mask;
    const int32_t *starts;
    const uint32_t *rng;
    int64_t batch, heads, queries, keys, width, row, out_row, causal; /* batch: of heads. out_row: of the output */
    T scale, keep_scale; /* keep_scale: the factor of probabilities that dropout keeps */
    float dropout;
    uint32_t stream;
} Attention;

/* The memory of a thread; lowering/cpu/products.py states its size. PACKED(width) elements hold a packed block. */
#define PACKED(width) (KEYS * ((width) + TILE_COLUMNS))
typedef struct {
    T *scores, *by_scores, *kept;                /* KEYS x QUERIES */
    T *kept_rows;                                /* QUERIES x KEYS */
    T *q_columns, *ct_columns, *out_columns;     /* packed transposes of blocks of q, of the cotangent and the output */
    T *q_rows, *ct_rows, *k_rows;                /* packed blocks of q, of the cotangent and k */
} Scratch;
_Static_assert(sizeof(Scratch) + 64 <= STRUCT_BYTES && 2 * QUERIES <= KEYS &&
                   TILE_COLUMNS * sizeof(T) <= 2 * LARGEST_VECTOR,
               "_scratch of adtrain/lowering/cpu/products.py");

static Scratch *carve(const Team *team, int64_t width) {
    Scratch *s = (Scratch *)team->scratch;
    T *next = (T *)(team->scratch + (sizeof(Scratch) + 63) / 64 * 64);
    T **blocks[] = {&s->scores, &s->by_scores, &s->kept, &s->kept_rows};
    for (int i = 0; i < 4; i++, next += KEYS * QUERIES) *blocks[i] = next;
    T **packed[] = {&s->q_columns, &s->ct_columns, &s->out_columns, &s->q_rows, &s->ct_rows, &s->k_rows};
    for (int i = 0; i < 6; i++, next += PACKED(width)) *packed[i] = next;
    return s;
}

/* The elements before row i of head z in an array of `length` rows of `row` elements for each example. */
static int64_t before(const Attention *a, int64_t z, int64_t i, int64_t length, int64_t row) {
    return (z / a->heads * length + i) * row + z % a->heads * a->width;
}

/* `queries`, rounded up to whole vectors. */
static int64_t whole_vectors(int64_t queries) { return ceil_div(queries, LANES) * LANES; }

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

/* A block of `rows` rows of x, transposed: to[w * QUERIES + r] = x[r * row + w]. Lanes from `rows` on have any values:
   their results are not used. */
static void pack_columns(const T *x, int64_t row, int64_t rows, int64_t width, T *to) {
    transpose(x, rows, width, row, to, QUERIES, QUERIES);
}

/* The same, packed for products, not transposed. */
static void pack_rows(const T *x, int64_t row, int64_t rows, int64_t width, T *to) {
    for (int64_t w = 0; w < width; w += TILE_COLUMNS)
        copy_rows(x + w, row, min_i64(TILE_COLUMNS, width - w), rows, to + w * rows, TILE_COLUMNS);
}

/* Prefetches into L2 the first block of head z of x, if there is such a head: `most` rows, or all `length`. The rows of
   a head are short and far apart, so the processor does not foresee them. Always inlined: gcc deletes calls of a
   function that only prefetches. */
SPECIALISED void prefetch_head(const Attention *a, const T *x, int64_t z, int64_t length, int64_t row, int64_t most) {
    const T *first = x + before(a, z, 0, length, row);
    for (int64_t r = 0; z < a->batch && r < min_i64(length, most); r++)
        for (int64_t w = 0; w < a->width; w += CACHE_LINE / sizeof(T)) __builtin_prefetch(first + r * row + w, 0, 2);
}

/* A block: `rows` queries from `i` on and `columns` keys from `j` on, of head z. */
typedef struct {
    int64_t z, i, rows, j, columns;
} Block;

/* s->kept: for each score of the block keep_scale, or 0 where dropout drops the probability. */
static void draw(const Attention *a, Scratch *s, const Block *block) {
    for (int64_t r = 0; r < block->rows; r++) {
        const uint64_t element = ((uint64_t)block->z * a->queries + block->i + r) * a->keys + block->j;
        for (int64_t at = 0; at < block->columns;) {
            const int64_t offset = (element + at) % 4, n = min_i64(4 * BATCH - offset, block->columns - at);
            uint32_t words[4 * BATCH];
            philox((uint32_t)((element + at) / 4), a->rng, a->stream, words);
#pragma omp simd
            for (int64_t i = 0; i < n; i++) {
                const float number = (float)(int32_t)(words[offset + i] >> 8) * 0x1p-24f;
                s->kept_rows[r * KEYS + at + i] = number < a->dropout ? 0 : a->keep_scale;
            }
            at += n;
        }
    }
    transpose(s->kept_rows, block->rows, block->columns, KEYS, s->kept, QUERIES, QUERIES);
}

/* The first keys of the queries of head z from `i` on, or NULL. They do not decrease. */
static const int32_t *starts_of(const Attention *a, int64_t z, int64_t i) {
    return a->starts ? a->starts + z / a->heads * a->queries + i : NULL;
}

/* The first key of the first block of keys that queries from `i` on attend to. */
static int64_t first_block(const Attention *a, int64_t z, int64_t i) {
    return a->starts ? max_i64(0, *starts_of(a, z, i)) / KEYS * KEYS : 0;
}

/* s->scores: the scaled scores of the block. Those of keys that a query does not attend to are -infinity. */
static void score(const Attention *a, Scratch *s, const Block *block) {
    const int64_t lanes = whole_vectors(block->rows);
    const int32_t *starts = starts_of(a, block->z, block->i);
    product(block->columns, lanes, a->width, a->k + before(a, block->z, block->j, a->keys, a->row), a->row, 1,
            s->q_columns, s->scores, QUERIES, false);
    for (int64_t c = 0; c < block->columns; c++) {
        T *row = s->scores + c * QUERIES;
        const bool masked = a->mask && !a->mask[block->z * a->keys + block->j + c];
        const int64_t unseen = masked ? lanes : a->causal ? min_i64(lanes, block->j + c - block->i) : 0;
        for (int64_t l = 0; l < lanes; l += LANES) store(row + l, load(row + l) * a->scale);
        for (int64_t l = 0; l < unseen; l++) row[l] = -INFINITY;
        for (int64_t l = block->rows; starts && l > 0 && starts[l - 1] > block->j + c; l--) row[l - 1] = -INFINITY;
    }
}

/* x where x > y, else y. */
static inline Vector larger(Vector x, Vector y) {
    const Lanes greater = (Lanes)(x > y);
    return (Vector)(((Lanes)x & greater) | ((Lanes)y & ~greater));
}

/* row[l] = exp(row[l] - less[l]) of a vector. */
static inline void exp_of_difference(T *restrict row, const T *restrict less) {
#pragma omp simd
    for (int l = 0; l < LANES; l++) row[l] = exp(row[l] - less[l]);
}

/* The running maximum and sum of a query's scores, and the factor of what was summed before the last block. */
typedef struct {
    T top[QUERIES], factor[QUERIES];
    double sum[QUERIES];
} __attribute__((aligned(64))) Running;

/* The probabilities of a block of scores, up to a factor for each query. */
static void softmax_block(Scratch *s, const Block *block, Running *running) {
    for (int64_t first = 0; first < block->rows; first += LANES) {
        T *scores = s->scores + first, *top = running->top + first, *factor = running->factor + first, shift[LANES];
        Vector highest = load(top), total = {0};
        for (int64_t c = 0; c < block->columns; c++) highest = larger(load(scores + c * QUERIES), highest);
        store(shift, highest);
        memcpy(factor, top, sizeof shift);
        memcpy(top, shift, sizeof shift);
        /* The largest is -infinity for a query without a key yet. */
        for (int l = 0; l < LANES; l++) shift[l] = shift[l] == -(T)INFINITY ? 0 : shift[l];
        exp_of_difference(factor, shift);
        for (int64_t c = 0; c < block->columns; c++) {
            exp_of_difference(scores + c * QUERIES, shift);
            total += load(scores + c * QUERIES);
        }
        for (int l = 0; l < LANES; l++)
            running->sum[first + l] = running->sum[first + l] * factor[l] + total[l];
    }
}

/* rows[c][l] *= by[l], or with a step by[c][l]. */
static void scale_rows(T *rows, int64_t count, int64_t lanes, const T *by, int64_t step) {
    for (int64_t c = 0; c < count; c++)
        for (int64_t l = 0; l < lanes; l += LANES)
            store(rows + c * QUERIES + l, load(rows + c * QUERIES + l) * load(by + c * step + l));
}

/* The keys that any of the queries up to row `end` attends to. */
static int64_t last_key(const Attention *a, int64_t end) { return a->causal ? min_i64(a->keys, end) : a->keys; }

/* Whether the mask excludes all of `count` keys from `j` on. */
static bool are_masked(const Attention *a, int64_t z, int64_t j, int64_t count) {
    return a->mask && !memchr(a->mask + z * a->keys + j, true, count);
}

static void forward(const Attention *a, Scratch *s, int64_t unit, T *out, T *logsumexp) {
    const int64_t blocks = ceil_div(a->queries, QUERIES), z = unit / blocks, i = unit % blocks * QUERIES;
    const int64_t rows = min_i64(QUERIES, a->queries - i), end = last_key(a, i + rows), lanes = whole_vectors(rows);
    Running running;
    if (i == 0) prefetch_head(a, a->q, z + 1, a->queries, a->row, QUERIES);
    for (int64_t l = 0; l < QUERIES; l++) running.top[l] = -INFINITY, running.sum[l] = 0;
    pack_columns(a->q + before(a, z, i, a->queries, a->row), a->row, rows, a->width, s->q_columns);
    bool first = true;
    for (int64_t j = first_block(a, z, i); j < end; j += KEYS) {
        const Block block = {z, i, rows, j, min_i64(KEYS, end - j)};
        if (are_masked(a, z, j, block.columns)) continue;
        if (i + j == 0) prefetch_head(a, a->k, z + 1, a->keys, a->row, KEYS);
        score(a, s, &block);
        if (i + j == 0) prefetch_head(a, a->v, z + 1, a->keys, a->row, KEYS);
        softmax_block(s, &block, &running);
        if (a->rng) {
            draw(a, s, &block);
            scale_rows(s->scores, block.columns, lanes, s->kept, QUERIES);
        }
        if (!first) scale_rows(s->out_columns, a->width, lanes, running.factor, 0);
        product(a->width, lanes, block.columns, a->v + before(a, z, j, a->keys, a->row), 1, a->row, s->scores,
                s->out_columns, QUERIES, !first);
        first = false;
    }
    if (first) memset(s->out_columns, 0, a->width * QUERIES * sizeof(T));
    if (i == 0) prefetch_head(a, out, z + 1, a->queries, a->out_row, QUERIES);
    T sum[QUERIES], inverse[QUERIES];
    for (int64_t l = 0; l < lanes; l++) {
        inverse[l] = running.sum[l] == 0 ? 0 : (T)(1 / running.sum[l]); /* 0: a query without a key */
        sum[l] = (T)running.sum[l];
    }
#pragma omp simd
    for (int64_t l = 0; l < rows; l++) {
        const T value = log(sum[l]) + running.top[l];
        logsumexp[z * a->queries + i + l] = sum[l] == 0 ? (T)INFINITY : value;
    }
    scale_rows(s->out_columns, a->width, lanes, inverse, 0);
    transpose(s->out_columns, a->width, rows, QUERIES, out + before(a, z, i, a->queries, a->out_row), a->out_row,
              a->width);
}

/* The arrays of the gradient. by_* are the cotangents of q, k and v. */
typedef struct {
    const T *out, *logsumexp, *ct;
    T *by_q, *by_k, *by_v;
} Gradient;

/* What blocks of the gradient need of a block of queries, besides packed arrays. */
typedef struct {
    T logsumexp[QUERIES], delta[QUERIES]; /* delta: the product of the output and its cotangent */
} Queries;

static void pack_queries(const Attention *a, const Gradient *g, Scratch *s, int64_t z, int64_t i, int64_t rows,
                         Queries *queries) {
    const T *q = a->q + before(a, z, i, a->queries, a->row);
    const int64_t from = before(a, z, i, a->queries, a->out_row);
    pack_columns(q, a->row, rows, a->width, s->q_columns);
    pack_columns(g->ct + from, a->out_row, rows, a->width, s->ct_columns);
    pack_columns(g->out + from, a->out_row, rows, a->width, s->out_columns);
    pack_rows(q, a->row, rows, a->width, s->q_rows);
    pack_rows(g->ct + from, a->out_row, rows, a->width, s->ct_rows);
    memset(queries->logsumexp, 0, sizeof queries->logsumexp);
    memcpy(queries->logsumexp, g->logsumexp + z * a->queries + i, rows * sizeof(T));
    for (int64_t l = 0; l < rows; l += LANES) {
        Vector sum = {0};
        for (int64_t w = 0; w < a->width; w++)
            sum += load(s->ct_columns + w * QUERIES + l) * load(s->out_columns + w * QUERIES + l);
        store(queries->delta + l, sum);
    }
}

/* s->scores: the probabilities after dropout; s->by_scores: the cotangents of q kT. */
static void block_of_gradient(const Attention *a, Scratch *s, const Block *block, const Queries *queries) {
    const int64_t lanes = whole_vectors(block->rows);
    score(a, s, block);
    product(block->columns, lanes, a->width, a->v + before(a, block->z, block->j, a->keys, a->row), a->row, 1,
            s->ct_columns, s->by_scores, QUERIES, false);
    if (a->rng) {
        draw(a, s, block);
        scale_rows(s->by_scores, block->columns, lanes, s->kept, QUERIES);
    }
    for (int64_t l = 0; l < lanes; l += LANES) {
        const Vector delta = load(queries->delta + l);
        for (int64_t c = 0; c < block->columns; c++) {
            T *row = s->scores + c * QUERIES + l, *by = s->by_scores + c * QUERIES + l;
            exp_of_difference(row, queries->logsumexp + l);
            store(by, load(row) * (load(by) - delta) * a->scale);
        }
    }
    if (a->rng) scale_rows(s->scores, block->columns, lanes, s->kept, QUERIES);
}

/* Adds the block's part of the cotangents of its keys and values, or with `first` begins these sums. */
static void add_to_keys(const Attention *a, const Gradient *g, Scratch *s, const Block *block, bool first) {
    const int64_t start = before(a, block->z, block->j, a->keys, a->row);
    const int64_t rows = block->rows, columns = block->columns;
    product(columns, a->width, rows, s->scores, QUERIES, 1, s->ct_rows, g->by_v + start, a->row, !first);
    product(columns, a->width, rows, s->by_scores, QUERIES, 1, s->q_rows, g->by_k + start, a->row, !first);
}

/* The same of its queries. */
static void add_to_queries(const Attention *a, const Gradient *g, Scratch *s, const Block *block, bool first) {
    pack_rows(a->k + before(a, block->z, block->j, a->keys, a->row), a->row, block->columns, a->width, s->k_rows);
    product(block->rows, a->width, block->columns, s->by_scores, 1, QUERIES, s->k_rows,
            g->by_q + before(a, block->z, block->i, a->queries, a->row), a->row, !first);
}

/* The first query block that attends to keys from `j` on. */
static int64_t first_query(const Attention *a, int64_t j) { return a->causal ? j / QUERIES * QUERIES : 0; }

/* The cotangents of a head: with `of_keys` those of its keys and values, with `of_queries` those of its queries. Only
   queries from `i` to `i_end` and keys from `j` to `j_end` take part. */
static void backward(const Attention *a, const Gradient *g, Scratch *s, int64_t z, int64_t i, int64_t i_end, int64_t j,
                     int64_t j_end, bool of_keys, bool of_queries) {
    for (int64_t at = j; at < j_end && of_keys && a->queries == 0; at++) {
        memset(g->by_k + before(a, z, at, a->keys, a->row), 0, a->width * sizeof(T));
        memset(g->by_v + before(a, z, at, a->keys, a->row), 0, a->width * sizeof(T));
    }
    for (; i < i_end; i += QUERIES) {
        Queries queries;
        const int64_t rows = min_i64(QUERIES, a->queries - i), end = min_i64(j_end, last_key(a, i + rows));
        if (i == 0) {
            prefetch_head(a, a->q, z + 1, a->queries, a->row, QUERIES);
            prefetch_head(a, g->by_q, z + 1, a->queries, a->row, QUERIES);
        }
        pack_queries(a, g, s, z, i, rows, &queries);
        if (i == 0) {
            prefetch_head(a, g->ct, z + 1, a->queries, a->out_row, QUERIES);
            prefetch_head(a, g->out, z + 1, a->queries, a->out_row, QUERIES);
        }
        const int64_t begin = max_i64(j, first_block(a, z, i));
        for (int64_t at = begin; at < end; at += KEYS) {
            const Block block = {z, i, rows, at, min_i64(KEYS, a->keys - at)};
            if (i + at == 0) {
                prefetch_head(a, a->k, z + 1, a->keys, a->row, KEYS);
                prefetch_head(a, a->v, z + 1, a->keys, a->row, KEYS);
            }
            block_of_gradient(a, s, &block, &queries);
            if (i + at == 0) {
                prefetch_head(a, g->by_k, z + 1, a->keys, a->row, KEYS);
                prefetch_head(a, g->by_v, z + 1, a->keys, a->row, KEYS);
            }
            if (of_keys) add_to_keys(a, g, s, &block, i == first_query(a, at));
            if (of_queries) add_to_queries(a, g, s, &block, at == begin);
        }
    }
}

/* How many units that follow one another a thread takes at once: it prefetches the next one. */
static int64_t neighbours(const Team *team, int64_t units) { return max_i64(1, units / (16 * team->threads)); }

static void run_forward(const Team *team, const Attention *a, T *out, T *logsumexp) {
    Scratch *s = carve(team, a->width);
    const int64_t units = a->batch * ceil_div(a->queries, QUERIES), chunk = neighbours(team, units);
#pragma omp for schedule(dynamic, chunk) nowait
    for (int64_t unit = 0; unit < units; unit++) forward(a, s, unit, out, logsumexp);
}

/* Units are heads, so that each block is computed once; or, if there are fewer heads than threads, blocks of keys and
   blocks of queries. */
static void run_backward(const Team *team, const Attention *a, const Gradient *g) {
    Scratch *s = carve(team, a->width);
    const int64_t of_keys = ceil_div(a->keys, KEYS), blocks = of_keys + ceil_div(a->queries, QUERIES);
    if (a->batch >= team->threads) {
        const int64_t chunk = neighbours(team, a->batch);
#pragma omp for schedule(dynamic, chunk) nowait
        for (int64_t z = 0; z < a->batch; z++) backward(a, g, s, z, 0, a->queries, 0, a->keys, true, true);
        return;
    }
#pragma omp for schedule(dynamic) nowait
    for (int64_t unit = 0; unit < a->batch * blocks; unit++) {
        const int64_t z = unit / blocks, block = unit % blocks;
        const int64_t j = block * KEYS, i = (block - of_keys) * QUERIES;
        if (block < of_keys)
            backward(a, g, s, z, first_query(a, j), a->queries, j, min_i64(j + KEYS, a->keys), true, false);
        else
            backward(a, g, s, z, i, min_i64(i + QUERIES, a->queries), 0, a->keys, false, true);
    }
}

#define NUMBERS                                                                                                \
    int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t width, int64_t row, int64_t out_row,  \
        int64_t causal, double scale, double dropout, int64_t stream

#define ATTENTION(q, k, v, mask, starts, rng)                                                                  \
    {q, k, v, mask, starts, rng, batch, heads, queries, keys, width, row, out_row, causal, (T)scale,           \
     (T)(1 / (1 - dropout)), (float)dropout, (uint32_t)stream}

/* A function for each combination of the optional arguments: PARAMETERS are those that it has, OF_MASK,
   OF_STARTS and OF_RNG their values. */
#define FUNCTIONS(OPTIONAL, PARAMETERS, OF_MASK, OF_STARTS, OF_RNG)                                                             \
    void FN(attention##OPTIONAL)(const Team *team, const T *q, const T *k, const T *v, PARAMETERS T *out,              \
                                 T *logsumexp, NUMBERS) {                                                              \
        const Attention a = ATTENTION(q, k, v, OF_MASK, OF_STARTS, OF_RNG);                                                     \
        run_forward(team, &a, out, logsumexp);                                                                         \
    }                                                                                                                  \
    void FN(attention_grad##OPTIONAL)(const Team *team, const T *q, const T *k, const T *v, const T *out,              \
                                      const T *logsumexp, const T *ct, PARAMETERS T *by_q, T *by_k, T *by_v, NUMBERS) { \
        const Attention a = ATTENTION(q, k, v, OF_MASK, OF_STARTS, OF_RNG);                                                     \
        const Gradient g = {out, logsumexp, ct, by_q, by_k, by_v};                                                     \
        run_backward(team, &a, &g);                                                                                    \
    }

/* The same of one array with the rows of q, k and v side by side: [example][row][q, k or v][head][width]. */
#define SELF_FUNCTIONS(OPTIONAL, PARAMETERS, OF_STARTS, OF_RNG)                                                     \
    void FN(self_attention##OPTIONAL)(const Team *team, const T *x, PARAMETERS T *out, T *logsumexp, NUMBERS) { \
        const Attention a = ATTENTION(x, x + out_row, x + 2 * out_row, NULL, OF_STARTS, OF_RNG);                    \
        run_forward(team, &a, out, logsumexp);                                                                \
    }                                                                                                         \
    void FN(self_attention_grad##OPTIONAL)(const Team *team, const T *x, const T *out, const T *logsumexp,    \
                                           const T *ct, PARAMETERS T *by_x, NUMBERS) {                        \
        const Attention a = ATTENTION(x, x + out_row, x + 2 * out_row, NULL, OF_STARTS, OF_RNG);                    \
        const Gradient g = {out, logsumexp, ct, by_x, by_x + out_row, by_x + 2 * out_row};                    \
        run_backward(team, &a, &g);                                                                           \
    }

#define COMMA ,
#define MASK const bool *mask COMMA
#define STARTS const int32_t *starts COMMA
#define RNG const uint32_t *rng COMMA
FUNCTIONS(, , NULL, NULL, NULL)
FUNCTIONS(_mask, MASK, mask, NULL, NULL)
FUNCTIONS(_starts, STARTS, NULL, starts, NULL)
FUNCTIONS(_rng, RNG, NULL, NULL, rng)
FUNCTIONS(_mask_starts, MASK STARTS, mask, starts, NULL)
FUNCTIONS(_mask_rng, MASK RNG, mask, NULL, rng)
FUNCTIONS(_starts_rng, STARTS RNG, NULL, starts, rng)
FUNCTIONS(_mask_starts_rng, MASK STARTS RNG, mask, starts, rng)
SELF_FUNCTIONS(, , NULL, NULL)
SELF_FUNCTIONS(_starts, STARTS, starts, NULL)
SELF_FUNCTIONS(_rng, RNG, NULL, rng)
SELF_FUNCTIONS(_starts_rng, STARTS RNG, starts, rng)
