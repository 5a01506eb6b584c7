/* Matrix-vector products, for gemm.c, where C has one row or one column. They are bound by memory. A tile of gemm.c
   would use one of its columns, or pack a matrix that is read once.

   Vector lanes are elements of the result. So each is summed over k one product after another, in the slices of gemm.c,
   and has the same bits as from gemm.c. A k-major matrix is transposed in squares that stay in the cache. */

#pragma once

#include "gemm.h"
#include "tile.h"

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
