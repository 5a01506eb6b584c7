/* The innermost part of matrix products: packed panels of B, and tiles of C in registers. Used by gemm.c, which explains
   them, and attention.c. */

#pragma once

#include "vectors.h"

#if VECTOR_REGISTERS >= 32
#define TILE_ROWS 12
#else
#define TILE_ROWS 6
#endif

enum { TILE_COLUMNS = 2 * LANES };

typedef T four __attribute__((vector_size(4 * sizeof(T)), aligned(sizeof(T)), may_alias));
typedef T eight __attribute__((vector_size(8 * sizeof(T)), aligned(sizeof(T)), may_alias));

/* The begin of part t of `lines` rows or columns in `parts` parts whose lengths differ by at most one. So 128 rows make
   strips of 6 and 5, and not one of 2, in which too few additions would overlap. */
static inline int64_t part_begin(int64_t lines, int64_t parts, int64_t t) {
    return t * (lines / parts) + min_i64(t, lines % parts);
}

#ifdef AHEAD
#define AHEAD_PARAMETERS , const T *ahead, int64_t ahead_step
#define AHEAD_ARGUMENTS , ahead, ahead_step
#else
#define AHEAD_PARAMETERS
#define AHEAD_ARGUMENTS
#endif

/* C[rows][columns] = (or, with `add`, +=) the product of `rows` rows of A and a panel of B, over `depth` steps.

   Element (i, p) of A is a[i * row_step + p * step]. With AHEAD each step prefetches the line at `ahead` into L2, and
   moves `ahead` on by `ahead_step`: one line a step, because a core waits when too many of them are missing. Rows and vectors are constants where this is inlined: with all
   loops over them unrolled the sums stay in registers. */
static inline __attribute__((always_inline)) void tile(const int rows, const int vectors, int64_t depth, const T *a,
                                                       int64_t row_step, int64_t step, const T *b, T *c, int64_t ld,
                                                       int64_t columns, bool add AHEAD_PARAMETERS) {
    Vector sum[TILE_ROWS][2];
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) sum[i][j] = (Vector){};
#ifdef AHEAD /* C may be in memory; it is needed when the sums are done */
        __builtin_prefetch(c + i * ld, 1);
        __builtin_prefetch(c + i * ld + columns - 1, 1);
#endif
    }
    for (int64_t p = 0; p < depth; p++, a += step, b += TILE_COLUMNS) {
        Vector row[2];
#ifdef AHEAD
        __builtin_prefetch(ahead, 0, 2);
        ahead += ahead_step;
#endif
        UNROLL
        for (int j = 0; j < vectors; j++) row[j] = *(const Vector *)(b + j * LANES);
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
                UnalignedVector *to = (UnalignedVector *)(c + j * LANES);
                *to = add ? (Vector)*to + sum[i][j] : sum[i][j];
            }
        } else {
            T edge[TILE_COLUMNS];
            memcpy(edge, sum[i], vectors * sizeof(Vector));
            for (int64_t j = 0; j < columns; j++) c[j] = add ? c[j] + edge[j] : edge[j];
        }
}

/* tile() for any 1 <= rows <= TILE_ROWS and 1 <= columns <= TILE_COLUMNS. */
static void any_tile(int64_t rows, int64_t columns, int64_t depth, const T *a, int64_t row_step, int64_t step,
                     const T *b, T *c, int64_t ld, bool add AHEAD_PARAMETERS) {
#define ROWS(r)                                                           \
    case r:                                                               \
        if (columns > LANES)                                              \
            tile(r, 2, depth, a, row_step, step, b, c, ld, columns, add AHEAD_ARGUMENTS); \
        else                                                              \
            tile(r, 1, depth, a, row_step, step, b, c, ld, columns, add AHEAD_ARGUMENTS); \
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
            *(UnalignedVector *)to = *(const UnalignedVector *)from;
            *(UnalignedVector *)(to + LANES) = *(const UnalignedVector *)(from + LANES);
        } else if (8 <= width && width <= 16) { /* the last eight overlap the first */
            const eight first = *(const eight *)from, last = *(const eight *)(from + width - 8);
            *(eight *)to = first;
            *(eight *)(to + width - 8) = last;
        } else if (width >= 4) { /* the last four overlap those before */
            for (int64_t j = 0; j < width - 4; j += 4)
                *(four *)(to + j) = *(const four *)(from + j);
            *(four *)(to + width - 4) = *(const four *)(from + width - 4);
        } else {
            for (int64_t j = 0; j < width; j++) to[j] = from[j];
        }
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
                transpose(b + j * ld, width, depth, ld, panel, TILE_COLUMNS, TILE_COLUMNS);
            else
                copy_rows(b + p * ld + j, ld, width, min_i64(chunk, depth - p), panel, TILE_COLUMNS);
        }
}
