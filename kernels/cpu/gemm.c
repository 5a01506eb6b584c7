/* Matrix product C = op(A) op(B), batched, by blocks that fit the caches: the method of Goto & van de Geijn, "Anatomy
   of High-Performance Matrix Multiplication" (ACM TOMS 34, 2008), in the small-kernel form of BLIS (Van Zee & van de
   Geijn, ACM TOMS 41, 2015).

   A core can do two vector multiply-adds per cycle but load only two vectors, so each load must be reused, at each
   level of the memory hierarchy:

     registers  A tile, TILE_ROWS x 2 vectors of C, is summed in registers. A step along k loads 2 vectors of B and
                TILE_ROWS numbers of A for 2 * TILE_ROWS multiply-adds, enough of them to hide their latency.
     L1         A strip, TILE_ROWS rows of op(A), is used for tile after tile, along the columns of the block.
     L2         The part of op(B) that a block needs, DEPTH x columns of it, is used for strip after strip.
     memory     A longer k is split into slices of at most DEPTH, whose products are accumulated in the block.

         for each block of C (rows x columns), divided among the threads
           for each slice of k
             pack op(B)[slice, columns] into panels              -> L2
             for each strip of rows
               for each panel: tile += strip * panel             strip -> L1, tile in registers

   Packing copies a panel into the order in which the tile reads it: for each k, the TILE_COLUMNS numbers of B side by
   side. That makes all four transpositions the same to the tile, reads one page instead of hundreds, and keeps columns
   that lie a power of two apart from evicting each other. A is read in place if a row of op(A) is contiguous (a strip
   is only TILE_ROWS streams), and packed the same way if it is transposed.

   Each element is a sum over k in the same order, whatever the block, the tile and the thread that computes it: results
   do not depend on the number of threads. */

#include "gemm.h"

#if VECTOR_REGISTERS >= 32
#define TILE_ROWS 12
#else
#define TILE_ROWS 6
#endif

enum {
    LANES = VECTOR_BYTES / sizeof(T),
    TILE_COLUMNS = 2 * LANES,
    DEPTH = 2048 / sizeof(T),
    PANELS = 192 * 1024 / sizeof(T), /* elements of B in L2 */
    BLOCK_ROWS = 192,
    BLOCK_COLUMNS = 1024 / sizeof(T),
    BLOCK_LD = BLOCK_COLUMNS + 64 / sizeof(T), /* not a power of two */
    MIN_WORK = 1 << 16, /* multiply-adds from which on a second thread is worth it */
};

typedef T vec __attribute__((vector_size(VECTOR_BYTES)));
typedef T four __attribute__((vector_size(4 * sizeof(T))));
/* The same, aligned to a T only. */
typedef T unaligned_vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));
typedef T unaligned_four __attribute__((vector_size(4 * sizeof(T)), aligned(sizeof(T)), may_alias));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef __typeof__(__builtin_choose_expr(sizeof(T) == 4, (int32_t)0, (int64_t)0)) index_of_four
    __attribute__((vector_size(4 * sizeof(T))));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (index_of_four){__VA_ARGS__})
#endif

/* Scratch memory of a thread; lowering/cpu/gemm.py states its size. */
typedef struct {
    T a[BLOCK_ROWS * DEPTH];
    T b[PANELS];
    T c[BLOCK_ROWS * BLOCK_LD];
    const T *packed_a, *packed_b; /* sources of a and b, which the next block often needs again */
} __attribute__((aligned(64))) Scratch;

_Static_assert(sizeof(Scratch) <= (1 << 20), "lowering/cpu/gemm.py gives 1 MiB");

/* The begin of part t of `lines` rows or columns in `parts` parts whose lengths differ by at most one. So 128 rows make
   strips of 6 and 5, and not one of 2, in which too few additions would overlap. */
static inline int64_t part_begin(int64_t lines, int64_t parts, int64_t t) {
    return t * (lines / parts) + min_i64(t, lines % parts);
}

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* C[rows][columns] = (or, with `add`, +=) the product of `rows` rows of A and a panel of B, over `depth` steps.

   Element (i, p) of A is a[i * row_step + p * step]. Rows and vectors are constants where this is inlined: with all
   loops over them unrolled the sums stay in registers. */
static inline __attribute__((always_inline)) void tile(const int rows, const int vectors, int64_t depth, const T *a,
                                                       int64_t row_step, int64_t step, const T *b, T *c, int64_t ld,
                                                       int64_t columns, bool add) {
    vec sum[TILE_ROWS][2];
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) sum[i][j] = (vec){};
        __builtin_prefetch(c + i * ld, 1); /* C is needed when the sums are done */
        __builtin_prefetch(c + i * ld + columns - 1, 1);
    }
    for (int64_t p = 0; p < depth; p++, a += step, b += TILE_COLUMNS) {
        vec row[2];
        UNROLL
        for (int j = 0; j < vectors; j++) row[j] = *(const vec *)(b + j * LANES);
        UNROLL
        for (int i = 0; i < rows; i++)
            UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] += row[j] * a[i * row_step];
    }
    UNROLL
    for (int i = 0; i < rows; i++, c += ld)
        if (columns == vectors * LANES) {
            UNROLL
            for (int j = 0; j < vectors; j++) {
                unaligned_vec *to = (unaligned_vec *)(c + j * LANES);
                *to = add ? (vec)*to + sum[i][j] : sum[i][j];
            }
        } else {
            T edge[TILE_COLUMNS];
            memcpy(edge, sum[i], vectors * sizeof(vec));
            for (int64_t j = 0; j < columns; j++) c[j] = add ? c[j] + edge[j] : edge[j];
        }
}

/* tile() for any 1 <= rows <= TILE_ROWS and 1 <= columns <= TILE_COLUMNS. */
static void any_tile(int64_t rows, int64_t columns, int64_t depth, const T *a, int64_t row_step, int64_t step,
                     const T *b, T *c, int64_t ld, bool add) {
#define ROWS(r)                                                           \
    case r:                                                               \
        if (columns > LANES)                                              \
            tile(r, 2, depth, a, row_step, step, b, c, ld, columns, add); \
        else                                                              \
            tile(r, 1, depth, a, row_step, step, b, c, ld, columns, add); \
        break;
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if TILE_ROWS > 6
        ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
    }
}

/* to[p * to_ld + j] = from[p * ld + j] for j < width, p < depth. */
static inline void copy_rows(const T *from, int64_t ld, int64_t width, int64_t depth, T *to, int64_t to_ld) {
    for (int64_t p = 0; p < depth; p++, from += ld, to += to_ld)
        if (width == TILE_COLUMNS) {
            *(unaligned_vec *)to = *(const unaligned_vec *)from;
            *(unaligned_vec *)(to + LANES) = *(const unaligned_vec *)(from + LANES);
        } else if (width >= 4) { /* the last four overlap those before */
            for (int64_t j = 0; j < width - 4; j += 4)
                *(unaligned_four *)(to + j) = *(const unaligned_four *)(from + j);
            *(unaligned_four *)(to + width - 4) = *(const unaligned_four *)(from + width - 4);
        } else {
            for (int64_t j = 0; j < width; j++) to[j] = from[j];
        }
}

/* to[p * to_ld + j] = from[j * ld + p] for j < width, p < depth: a transpose, in squares of 4 x 4. */
static inline void transpose_rows(const T *from, int64_t ld, int64_t width, int64_t depth, T *to, int64_t to_ld) {
    int64_t fours = width < 4 ? 0 : depth / 4 * 4;
    for (int64_t line = 0; line < width && fours > 0; line += 4) {
        int64_t j = min_i64(line, width - 4); /* the last four overlap those before */
        for (int64_t p = 0; p < fours; p += 4) {
            const T *x = from + j * ld + p;
            T *y = to + p * to_ld + j;
            four a = *(const unaligned_four *)x, b = *(const unaligned_four *)(x + ld);
            four c = *(const unaligned_four *)(x + 2 * ld), d = *(const unaligned_four *)(x + 3 * ld);
            four ab01 = SHUFFLE(a, b, 0, 4, 1, 5), ab23 = SHUFFLE(a, b, 2, 6, 3, 7); /* a0 b0 a1 b1, a2 b2 a3 b3 */
            four cd01 = SHUFFLE(c, d, 0, 4, 1, 5), cd23 = SHUFFLE(c, d, 2, 6, 3, 7);
            *(unaligned_four *)y = SHUFFLE(ab01, cd01, 0, 1, 4, 5);
            *(unaligned_four *)(y + to_ld) = SHUFFLE(ab01, cd01, 2, 3, 6, 7);
            *(unaligned_four *)(y + 2 * to_ld) = SHUFFLE(ab23, cd23, 0, 1, 4, 5);
            *(unaligned_four *)(y + 3 * to_ld) = SHUFFLE(ab23, cd23, 2, 3, 6, 7);
        }
    }
    for (int64_t p = fours; p < depth; p++)
        for (int64_t j = 0; j < width; j++) to[p * to_ld + j] = from[j * ld + p];
}

/* The panels of a slice of op(B), contiguous, each (depth, TILE_COLUMNS); the last one is padded with zeros. */
static void pack_b(const T *b, int64_t ld, bool transposed, int64_t columns, int64_t depth, T *to) {
    int64_t whole = columns - columns % TILE_COLUMNS;
    if (whole < columns) memset(to + whole * depth, 0, depth * TILE_COLUMNS * sizeof(T));
    /* Eight whole rows of B at a time, so that each page is touched once. */
    int64_t chunk = transposed ? depth : 8;
    for (int64_t p = 0; p < depth; p += chunk)
        for (int64_t j = 0; j < columns; j += TILE_COLUMNS) {
            int64_t width = min_i64(TILE_COLUMNS, columns - j);
            T *panel = to + j * depth + p * TILE_COLUMNS;
            if (transposed)
                transpose_rows(b + j * ld, ld, width, depth, panel, TILE_COLUMNS);
            else
                copy_rows(b + p * ld + j, ld, width, min_i64(chunk, depth - p), panel, TILE_COLUMNS);
        }
}

/* The strips of a slice of the transpose of a: strip t is (depth, rows of the strip), at to + depth * its first row. */
static void pack_transposed_a(const T *a, int64_t ld, int64_t rows, int64_t strips, int64_t depth, T *to) {
    for (int64_t p = 0; p < depth; p += 8)
        for (int64_t t = 0; t < strips; t++) {
            int64_t i = part_begin(rows, strips, t), height = part_begin(rows, strips, t + 1) - i;
            copy_rows(a + p * ld + i, ld, height, min_i64(8, depth - p), to + i * depth + p * height, height);
        }
}

/* A product, and how C is split into blocks: `down` rows of `across` blocks, for each matrix of the batch. */
typedef struct {
    const T *a, *b;
    T *c;
    int64_t m, n, k;
    bool transpose_a, transpose_b;
    const FN(Epilogue) * epilogue;
    int64_t down, across;
} Product;

static void choose_blocks(Product *q, int64_t batch, int64_t threads) {
    int64_t panels = ceil_div(q->n, TILE_COLUMNS), depth = min_i64(max_i64(q->k, 1), DEPTH);
    q->down = ceil_div(q->m, BLOCK_ROWS);
    q->across = ceil_div(panels, min_i64(BLOCK_COLUMNS, PANELS / depth) / TILE_COLUMNS);
    int64_t work = batch * q->m * q->n * q->k;
    if (threads == 1 || work < MIN_WORK) return;
    /* Up to four blocks per thread, to balance the load. Columns are split first: each block of rows packs B again. */
    int64_t wanted = threads * min_i64(max_i64(work / (16 * MIN_WORK * threads), 1), 4);
    while (batch * q->down * q->across < wanted && panels >= 2 * (q->across + 1)) q->across++;
    while (batch * q->down * q->across < wanted && batch * q->down * q->across % threads != 0 &&
           q->m >= 2 * TILE_ROWS * (q->down + 1))
        q->down++;
}

/* Prefetches what the epilogue reads, a tile at a time: a core has few outstanding cache misses. */
static inline void prefetch_ahead(const Product *q, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    for (int64_t x = 0; x < q->epilogue->ahead_count; x++)
        for (int64_t i = 0; i < rows; i++) {
            const T *start = q->epilogue->ahead[x] + (row + i) * q->n + column;
            __builtin_prefetch(start, 1);
            __builtin_prefetch(start + columns - 1, 1);
        }
}

/* Block `index` of C, and the epilogue on each strip of it after the last slice of k. */
static void block(const Product *q, int64_t index, Scratch *scratch) {
    int64_t x = index % q->across, y = index / q->across % q->down, z = index / q->across / q->down;
    int64_t row = part_begin(q->m, q->down, y), rows = part_begin(q->m, q->down, y + 1) - row;
    int64_t panels = ceil_div(q->n, TILE_COLUMNS), column = part_begin(panels, q->across, x) * TILE_COLUMNS;
    int64_t columns = min_i64(q->n, part_begin(panels, q->across, x + 1) * TILE_COLUMNS) - column;
    int64_t lda = q->transpose_a ? q->m : q->k, ldb = q->transpose_b ? q->k : q->n, ldc = q->c ? q->n : BLOCK_LD;
    int64_t slices = max_i64(1, ceil_div(q->k, DEPTH)), strips = ceil_div(rows, TILE_ROWS);
    for (int64_t s = 0; s < slices; s++) {
        int64_t p = part_begin(q->k, slices, s), depth = part_begin(q->k, slices, s + 1) - p;
        const T *a = q->a + z * q->m * q->k + (q->transpose_a ? p * lda + row : row * lda + p);
        const T *b = q->b + z * q->k * q->n + (q->transpose_b ? column * ldb + p : p * ldb + column);
        if (scratch->packed_b != b) pack_b(scratch->packed_b = b, ldb, q->transpose_b, columns, depth, scratch->b);
        if (q->transpose_a && scratch->packed_a != a)
            pack_transposed_a(scratch->packed_a = a, lda, rows, strips, depth, scratch->a);
        for (int64_t t = 0; t < strips; t++) {
            int64_t i = part_begin(rows, strips, t), height = part_begin(rows, strips, t + 1) - i;
            const T *strip = q->transpose_a ? scratch->a + i * depth : a + i * lda;
            int64_t row_step = q->transpose_a ? 1 : lda, step = q->transpose_a ? height : 1;
            /* Without C, scratch memory holds the block, or only a strip where there are no slices to add up. */
            T *c = q->c ? q->c + z * q->m * q->n + (row + i) * ldc + column : scratch->c + (slices > 1 ? i * ldc : 0);
            bool last = q->epilogue && s == slices - 1;
            for (int64_t j = 0; j < columns; j += TILE_COLUMNS) {
                int64_t width = min_i64(TILE_COLUMNS, columns - j);
                if (last) prefetch_ahead(q, row + i, height, column + j, width);
                any_tile(height, width, depth, strip, row_step, step, scratch->b + j * depth, c + j, ldc, s > 0);
            }
            if (last) q->epilogue->function(q->epilogue->context, c, ldc, row + i, column, height, columns);
        }
    }
}

/* C[batch][m][n] = op(A) op(B): A is [batch][m][k], or with transpose_a [batch][k][m]; B is [batch][k][n], or with
   transpose_b [batch][n][k]. With an epilogue batch is 1, and c may be NULL if the product itself is not needed. */
void FN(gemm)(const Team *team, const T *a, const T *b, T *c, int64_t batch, int64_t m, int64_t n, int64_t k,
              int64_t transpose_a, int64_t transpose_b, const FN(Epilogue) * epilogue) {
    if (batch == 0 || m == 0 || n == 0) return;
    Product q = {a, b, c, m, n, k, transpose_a, transpose_b, epilogue, 0, 0};
    choose_blocks(&q, batch, team->threads);
    Scratch *scratch = (Scratch *)team->scratch;
    scratch->packed_a = scratch->packed_b = NULL;
    int64_t blocks = batch * q.down * q.across;
    if (blocks <= team->threads) { /* the same as below, without dynamic scheduling */
        if (team->thread < blocks) block(&q, team->thread, scratch);
        return;
    }
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < blocks; i++) block(&q, i, scratch);
}
