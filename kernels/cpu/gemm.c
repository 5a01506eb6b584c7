/* Matrix product C = op(A) op(B), batched, by blocks that fit the caches: the method of Goto & van de Geijn, "Anatomy
   of High-Performance Matrix Multiplication" (ACM TOMS 34, 2008), in the small-kernel form of BLIS (Van Zee & van de
   Geijn, ACM TOMS 41, 2015).

   A core can do two vector multiply-adds per cycle but load only two vectors, so each load must be reused, at each
   level of the memory hierarchy:

     registers  A tile, TILE_ROWS x 2 vectors of C, is summed in registers. A step along k loads 2 vectors of B and
                TILE_ROWS numbers of A for 2 * TILE_ROWS multiply-adds, enough of them to hide their latency.
     L1         A strip, TILE_ROWS rows of op(A), is used for tile after tile, along the columns of the block.
     L2         The part of op(B) that a block needs, DEPTH x columns of it, is used for strip after strip.
     memory     A longer k is split into slices of at most DEPTH, whose products are accumulated in the block, and from
                GROUP slices on in groups of as many.

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

#define AHEAD (2048 / sizeof(T)) /* in tile.h: as many lines as steps */
#include "gemm.h"
#include "tile.h"

/* Matrix-vector products, where C has one row or one column. They are bound by memory. A tile would use one of its
   columns, or pack a matrix that is read once.

   Vector lanes are elements of the result. So each is summed over k one product after another, in the slices of other
   products, and has the same bits as from tiles. A k-major matrix is transposed in squares that stay in the cache. */

enum {
    GEMV_WIDTH = 1024, /* maximum of elements of the result that are summed at once: long pieces of rows are read */
    GEMV_LINES = 32,   /* the same for a k-major matrix, which is transposed */
    GEMV_STEPS = 128,  /* how much of k is transposed at once */
    GEMV_ROWS = 4,     /* rows that are added at once */
    GROUP = 32         /* slices of a group */
};

/* sum[j] += the sum over p of x[p] rows[p][j], for p < count, a constant up to GEMV_ROWS, and j < width. */
SPECIALISED void add_rows(const T *x, const T *rows, const int count, int64_t ld, T *sum, int64_t width) {
#pragma omp simd
    for (int64_t j = 0; j < width; j++) {
        T total = sum[j];
        UNROLL
        for (int p = 0; p < count; p++) total += x[p] * rows[p * ld + j];
        sum[j] = total;
    }
}

static void add_all_rows(const T *x, const T *rows, int64_t count, int64_t ld, T *sum, int64_t width) {
    int64_t p = 0;
    for (; p + GEMV_ROWS <= count; p += GEMV_ROWS) add_rows(x + p, rows + p * ld, GEMV_ROWS, ld, sum, width);
    for (; p < count; p++) add_rows(x + p, rows + p * ld, 1, ld, sum, width);
}

/* sum[j] += the sum over p of x[p] lines[j][p], for p < steps and j < width: the same sums from a k-major matrix. Whole
   squares are transposed in registers, those at the ends in `square`. */
static void add_all_lines(const T *x, const T *lines, int64_t steps, int64_t ld, T *sum, int64_t width, T *square) {
    int64_t p = 0;
#if SIZE
    const int64_t whole = width - width % LANES;
    for (; p + LANES <= steps; p += LANES)
        for (int64_t j = 0; j < whole; j += LANES) {
            Vector rows[LANES], total = load(sum + j);
            UNROLL for (int r = 0; r < LANES; r++) rows[r] = load(lines + (j + r) * ld + p);
            shuffle(rows, LANES);
            UNROLL for (int r = 0; r < LANES; r++) total += x[p + r] * rows[r];
            store(sum + j, total);
        }
    if (p && whole < width) {
        transpose(lines + whole * ld, width - whole, p, ld, square, GEMV_LINES, GEMV_LINES);
        add_all_rows(x, square, p, GEMV_LINES, sum + whole, width - whole);
    }
#endif
    if (p == steps) return;
    transpose(lines + p, width, steps - p, ld, square, GEMV_LINES, GEMV_LINES);
    add_all_rows(x + p, square, steps - p, GEMV_LINES, sum, width);
}

/* Slices of k are added in groups, and the groups in a total, so that the error hardly grows with k. */
static inline bool ends_group(int64_t s, int64_t slices) {
    return slices > GROUP && (s % GROUP == GROUP - 1 || s == slices - 1);
}

/* Adds the group y that slice s ends to the total, which y becomes after the last slice. */
static void add_group(int64_t s, int64_t slices, int64_t width, T *y, T *total) {
    for (int64_t j = 0; j < width; j++) {
        total[j] = s < GROUP ? y[j] : total[j] + y[j];
        if (s == slices - 1) y[j] = total[j];
    }
}

/* y[j] = the sum over p of x[p] a[p][j] for j < width, in `slices` equal slices of k; a k-major a is [j][p]. */
static void gemv_part(const T *a, const T *x, T *y, int64_t ld, bool k_major, int64_t k, int64_t slices,
                      int64_t width) {
    T square[GEMV_STEPS * GEMV_LINES], total[GEMV_WIDTH];
    for (int64_t s = 0; s < slices; s++) {
        T sum[GEMV_WIDTH] = {0};
        const int64_t begin = part_begin(k, slices, s), end = part_begin(k, slices, s + 1);
        if (!k_major) add_all_rows(x + begin, a + begin * ld, end - begin, ld, sum, width);
        for (int64_t p = begin; k_major && p < end; p += GEMV_STEPS) {
            const int64_t steps = min_i64(GEMV_STEPS, end - p);
            add_all_lines(x + p, a + p, steps, ld, sum, width, square);
        }
        for (int64_t j = 0; j < width; j++) y[j] = s % GROUP ? y[j] + sum[j] : sum[j];
        if (ends_group(s, slices)) add_group(s, slices, width, y, total);
    }
}

/* C[batch][1][n] or C[batch][m][1], by threads that divide its elements; n is the number of them in a matrix. `a` is
   the matrix, [n][k] if it is k-major and else [k][n]; x is the vector. `row`: C has one row. */
static void gemv(const Team *team, const T *a, const T *x, T *c, int64_t batch, int64_t n, int64_t k, int64_t slices,
                 bool k_major, bool row, const FN(Epilogue) * epilogue) {
    const int64_t most = k_major ? GEMV_LINES : GEMV_WIDTH, share = ceil_div(n, 64 * team->threads) * 64;
    const int64_t width = batch == 1 ? min_i64(most, share) : most, parts = ceil_div(n, width);
    int64_t first, last;
    my_share(team, batch * parts, &first, &last);
    for (int64_t i = first; i < last; i++) {
        T found[GEMV_WIDTH];
        const int64_t z = i / parts, j = i % parts * width, count = min_i64(width, n - j);
        T *y = c ? c + z * n + j : found;
        gemv_part(a + z * n * k + (k_major ? j * k : j), x + z * k, y, k_major ? k : n, k_major, k, slices, count);
        if (!epilogue) continue;
        if (row)
            epilogue->function(epilogue->context, y, n, z, j, 1, count);
        else
            epilogue->function(epilogue->context, y, 1, z * n + j, 0, count, 1);
    }
}

/* C[m][n] = a b for vectors a and b, by threads that divide its rows. Nothing is packed: most of the traffic is C. */
static void outer_product(const Team *team, const T *a, const T *b, T *c, int64_t m, int64_t n) {
    int64_t first, last;
    my_share(team, m, &first, &last);
    for (int64_t i = first; i < last; i++)
#pragma omp simd
        for (int64_t j = 0; j < n; j++) c[i * n + j] = 0 + a[i] * b[j]; /* 0: -0 becomes 0, as in gemm.c */
}

enum {
    DEPTH = 2048 / sizeof(T),
    PANELS = 192 * 1024 / sizeof(T), /* elements of B in L2 */
    BLOCK_ROWS = VECTOR_BYTES == 64 ? 256 : 192, /* L2 has 1 MiB where there is AVX-512, 512 KiB elsewhere */
    BLOCK_COLUMNS = 1024 / sizeof(T),
    BLOCK_LD = BLOCK_COLUMNS + 64 / sizeof(T), /* not a power of two */
    LINE = CACHE_LINE / sizeof(T),
    MIN_WORK = 1 << 16, /* multiply-adds from which on a second thread is worth it */
};

/* Scratch memory of a thread; lowering/cpu/products.py states its size. */
typedef struct {
    T a[BLOCK_ROWS * DEPTH];
    T b[PANELS];
    T c[BLOCK_ROWS * BLOCK_LD];
    Ahead ahead;
    const T *packed_a, *packed_b; /* sources of a and b, which the next block often needs again */
    T total[]; /* of c, BLOCK_ROWS * BLOCK_LD numbers if there are groups of slices */
} __attribute__((aligned(64))) Scratch;

_Static_assert(sizeof(Scratch) <= SCRATCH_BYTES && BLOCK_ROWS * BLOCK_LD * sizeof(T) <= TOTAL_BYTES &&
                   GROUP * DEPTH >= LONG_SUM,
               "MEMORY of adtrain/lowering/cpu/products.py");

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
    int64_t down, across, slices;
} Product;

static void choose_blocks(Product *q, int64_t batch, int64_t threads) {
    int64_t panels = ceil_div(q->n, TILE_COLUMNS), depth = min_i64(max_i64(q->k, 1), DEPTH);
    /* Each block of columns packs a transposed A again, and each block of rows packs B again. Shallower slices leave
       room for all columns in a block. */
    const bool one_pack = q->transpose_a && q->n <= BLOCK_COLUMNS && (q->n < q->m || q->m <= BLOCK_ROWS);
    if (one_pack) depth = min_i64(depth, PANELS / (panels * TILE_COLUMNS));
    q->slices = max_i64(1, ceil_div(q->k, depth));
    q->down = ceil_div(q->m, BLOCK_ROWS);
    q->across = ceil_div(panels, min_i64(BLOCK_COLUMNS, PANELS / depth) / TILE_COLUMNS);
    int64_t work = batch * q->m * q->n * q->k;
    if (threads == 1 || work < MIN_WORK) return;
    /* Up to four blocks per thread, to balance the load. With `one_pack` a block per thread, along the longer side. */
    int64_t wanted = one_pack ? threads : threads * min_i64(max_i64(work / (16 * MIN_WORK * threads), 1), 4);
    const bool by_rows = one_pack && q->n < q->m;
    while (!by_rows && batch * q->down * q->across < wanted && panels >= 2 * (q->across + 1)) q->across++;
    while (batch * q->down * q->across < wanted && batch * q->down * q->across % threads != 0 &&
           q->m >= 2 * TILE_ROWS * (q->down + 1))
        q->down++;
    /* The same number of blocks for each thread. With many blocks each, one more makes no difference. */
    while (batch * q->down * q->across % threads != 0 && batch * q->down * q->across < 16 * threads &&
           q->m >= 2 * TILE_ROWS * (q->down + 1))
        q->down++;
}

/* Adds the lines of x (rows x columns, `ld`) to a list of `count` lines, and returns how many it has then. */
static inline int64_t add_lines(const T **lines, int64_t count, const T *x, int64_t ld, int64_t rows, int64_t columns) {
    if (count + rows * ceil_div(columns, LINE) > (int64_t)AHEAD) return count;
    for (int64_t j = 0; j < columns; j += LINE)
        for (int64_t i = 0; i < rows; i++) lines[count++] = x + i * ld + j;
    return count;
}

/* Block `index` of C, and the epilogue on each strip of it after the last slice of k. */
static void block(const Product *q, int64_t index, Scratch *scratch) {
    int64_t x = index % q->across, y = index / q->across % q->down, z = index / q->across / q->down;
    int64_t row = part_begin(q->m, q->down, y), rows = part_begin(q->m, q->down, y + 1) - row;
    int64_t panels = ceil_div(q->n, TILE_COLUMNS), column = part_begin(panels, q->across, x) * TILE_COLUMNS;
    int64_t columns = min_i64(q->n, part_begin(panels, q->across, x + 1) * TILE_COLUMNS) - column;
    int64_t lda = q->transpose_a ? q->m : q->k, ldb = q->transpose_b ? q->k : q->n, ldc = q->c ? q->n : BLOCK_LD;
    int64_t slices = q->slices, strips = ceil_div(rows, TILE_ROWS);
    /* A tile first prefetches its part of C and of the arrays of the epilogue. If another slice follows, the tile then
       prefetches one column of cache lines of that slice's operands. In the last slice, the first tile of a strip
       prefetches the next strip of A. */
    int64_t lines_of_a = q->transpose_a ? ceil_div(rows, LINE) : 0;
    int64_t lines_of_b = q->transpose_b ? 0 : ceil_div(columns, LINE);
    Ahead *ahead = &scratch->ahead;
    for (int64_t s = 0; s < slices; s++) {
        int64_t p = part_begin(q->k, slices, s), depth = part_begin(q->k, slices, s + 1) - p;
        const T *a = q->a + z * q->m * q->k + (q->transpose_a ? p * lda + row : row * lda + p);
        const T *b = q->b + z * q->k * q->n + (q->transpose_b ? column * ldb + p : p * ldb + column);
        if (scratch->packed_b != b) pack_b(scratch->packed_b = b, ldb, q->transpose_b, columns, depth, scratch->b);
        if (q->transpose_a && scratch->packed_a != a)
            pack_transposed_a(scratch->packed_a = a, lda, rows, strips, depth, scratch->a);
        int64_t line = 0; /* of the rows of the next slice */
        for (int64_t t = 0; t < strips; t++) {
            int64_t i = part_begin(rows, strips, t), height = part_begin(rows, strips, t + 1) - i;
            const T *strip = q->transpose_a ? scratch->a + i * depth : a + i * lda;
            int64_t row_step = q->transpose_a ? 1 : lda, step = q->transpose_a ? height : 1;
            /* Without C, scratch memory holds the block, or only a strip where there are no slices to add up. */
            T *c = q->c ? q->c + z * q->m * q->n + (row + i) * ldc + column : scratch->c + (slices > 1 ? i * ldc : 0);
            bool last = q->epilogue && s == slices - 1;
            for (int64_t j = 0; j < columns; j += TILE_COLUMNS, line++) {
                int64_t width = min_i64(TILE_COLUMNS, columns - j), at = (z * q->m + row + i) * q->n + column + j;
                int64_t count = q->c ? add_lines(ahead->lines, 0, c + j, ldc, height, width) : 0;
                for (int64_t x = 0; last && x < q->epilogue->ahead_count; x++)
                    count = add_lines(ahead->lines, count, q->epilogue->ahead[x] + at, q->n, height, width);
                ahead->count = count, ahead->step = 0, ahead->stream = strip; /* which is in the cache */
                if (s + 1 < slices && line < lines_of_a) {
                    ahead->stream = a + depth * lda + line * LINE, ahead->step = lda;
                } else if (!q->transpose_a && slices == 1 && j == 0) {
                    ahead->stream = strip + height * lda, ahead->step = LINE;
                } else if (s + 1 < slices && line < lines_of_a + lines_of_b) {
                    ahead->stream = b + depth * ldb + (line - lines_of_a) * LINE, ahead->step = ldb;
                }
                any_tile(height, width, depth, strip, row_step, step, scratch->b + j * depth, c + j, ldc, s % GROUP > 0,
                         ahead);
            }
            for (int64_t r = 0; ends_group(s, slices) && r < height; r++)
                add_group(s, slices, columns, c + r * ldc, scratch->total + (i + r) * BLOCK_LD);
            if (last) q->epilogue->function(q->epilogue->context, c, ldc, z * q->m + row + i, column, height, columns);
        }
    }
}

/* C[batch][m][n] = op(A) op(B): A is [batch][m][k], or with transpose_a [batch][k][m]; B is [batch][k][n], or with
   transpose_b [batch][n][k]. With an epilogue c may be NULL if the product itself is not needed. */
void FN(gemm)(const Team *team, const T *a, const T *b, T *c, int64_t batch, int64_t m, int64_t n, int64_t k,
              int64_t transpose_a, int64_t transpose_b, const FN(Epilogue) * epilogue) {
    if (batch == 0 || m == 0 || n == 0) return;
    const int64_t slices = max_i64(1, ceil_div(k, DEPTH));
    if (n == 1) {
        gemv(team, a, b, c, batch, m, k, slices, !transpose_a, false, epilogue);
        return;
    }
    if (m == 1) {
        gemv(team, b, a, c, batch, n, k, slices, transpose_b, true, epilogue);
        return;
    }
    if (batch == 1 && k == 1 && !epilogue) {
        outer_product(team, a, b, c, m, n);
        return;
    }
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
