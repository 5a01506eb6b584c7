/* The innermost part of matrix products: packed panels of B, and tiles of C in registers. gemm.c explains them. */

#pragma once

#include "vectors.h"

#if VECTOR_REGISTERS >= 32
#define TILE_ROWS 12
#else
#define TILE_ROWS 6
#endif

enum {
    TILE_COLUMNS = 2 * LANES,
/* Rows of A that share a pointer. An address of x86 is a register plus another one, once, twice or four times. With a
   pointer for all rows gcc computes more addresses than there are registers; clang does not. */
#ifdef __clang__
    POINTER_ROWS = TILE_ROWS,
#else
    POINTER_ROWS = 3,
#endif
};

typedef T four __attribute__((vector_size(4 * sizeof(T)), aligned(sizeof(T)), may_alias));
typedef T eight __attribute__((vector_size(8 * sizeof(T)), aligned(sizeof(T)), may_alias));

/* The begin of part t of `lines` rows or columns in `parts` parts whose lengths differ by at most one. So 128 rows make
   strips of 6 and 5, and not one of 2, in which too few additions would overlap. */
static inline int64_t part_begin(int64_t lines, int64_t parts, int64_t t) {
    return t * (lines / parts) + min_i64(t, lines % parts);
}

#ifdef AHEAD
/* Lines that a tile prefetches, one a step of k, because a core waits when many lines are missing at once: first a
   list, which it will write or read at the end, into L1, then one line every `step` elements from `stream` on, into
   L2. */
typedef struct {
    int64_t count, step;
    const T *stream, *lines[AHEAD];
} Ahead;

#define AHEAD_PARAMETER , const Ahead *ahead
#define AHEAD_ARGUMENT , ahead
#else
#define AHEAD_PARAMETER
#define AHEAD_ARGUMENT
#endif

/* A step of a tile along k. Row i of A is at a[i / POINTER_ROWS][i % POINTER_ROWS * row_step]. */
SPECIALISED void tile_step(const int rows, const int vectors, Vector sum[][2], const T **a, int64_t row_step,
                           int64_t step, const T *b) {
    Vector row[2];
    UNROLL
    for (int j = 0; j < vectors; j++) row[j] = *(const Vector *)(b + j * LANES);
    UNROLL
    for (int i = 0; i < rows; i++)
        UNROLL
        for (int j = 0; j < vectors; j++) sum[i][j] += row[j] * a[i / POINTER_ROWS][i % POINTER_ROWS * row_step];
    UNROLL
    for (int i = 0; i * POINTER_ROWS < rows; i++) a[i] += step;
}

/* c[rows][columns] = (or, with `add`, +=) the first columns of a tile, in pieces of a few lengths. Not inlined: gcc would
   keep the sums of a tile in memory. */
static __attribute__((noinline)) void put_edge(const T *from, int64_t rows, int64_t columns, T *c, int64_t ld,
                                               bool add) {
    for (int64_t i = 0; i < rows; i++, from += TILE_COLUMNS, c += ld) {
        int64_t j = 0;
        for (; j + 8 <= columns; j += 8) {
            eight piece = *(const eight *)(from + j);
            if (add) piece += *(eight *)(c + j);
            *(eight *)(c + j) = piece;
        }
        if (columns & 4) {
            four piece = *(const four *)(from + j);
            if (add) piece += *(four *)(c + j);
            *(four *)(c + j) = piece;
            j += 4;
        }
        for (; j < columns; j++) c[j] = add ? c[j] + from[j] : from[j];
    }
}

/* C[rows][columns] = (or, with `add`, +=) the product of `rows` rows of A and a panel of B, over `depth` steps.

   Element (i, p) of A is a[i * row_step + p * step]. Rows and vectors are constants where this is inlined: with all
   loops over them unrolled the sums stay in registers. */
static inline __attribute__((always_inline)) void tile(const int rows, const int vectors, int64_t depth, const T *a,
                                                       int64_t row_step, int64_t step, const T *b, T *c, int64_t ld,
                                                       int64_t columns, bool add AHEAD_PARAMETER) {
    Vector sum[TILE_ROWS][2];
    const T *pointers[TILE_ROWS / POINTER_ROWS];
    UNROLL
    for (int i = 0; i < rows; i++)
        UNROLL
        for (int j = 0; j < vectors; j++) sum[i][j] = (Vector){};
    UNROLL
    for (int i = 0; i * POINTER_ROWS < rows; i++) pointers[i] = a + i * POINTER_ROWS * row_step;
    int64_t p = 0;
#ifdef AHEAD
    for (const int64_t listed = min_i64(ahead->count, depth); p < listed; p++, b += TILE_COLUMNS) {
        __builtin_prefetch(ahead->lines[p], 1);
        tile_step(rows, vectors, sum, pointers, row_step, step, b);
    }
    const T *stream = ahead->stream;
#endif
    for (; p < depth; p++, b += TILE_COLUMNS) {
#ifdef AHEAD
        __builtin_prefetch(stream, 0, 2);
        stream += ahead->step;
#endif
        tile_step(rows, vectors, sum, pointers, row_step, step, b);
    }
    if (columns < vectors * LANES) {
        T edge[TILE_ROWS * TILE_COLUMNS];
        UNROLL
        for (int i = 0; i < rows; i++)
            UNROLL
            for (int j = 0; j < vectors; j++) *(UnalignedVector *)(edge + i * TILE_COLUMNS + j * LANES) = sum[i][j];
        put_edge(edge, rows, columns, c, ld, add);
        return;
    }
    UNROLL
    for (int i = 0; i < rows; i++, c += ld)
        UNROLL
        for (int j = 0; j < vectors; j++) {
            UnalignedVector *to = (UnalignedVector *)(c + j * LANES);
            *to = add ? (Vector)*to + sum[i][j] : sum[i][j];
        }
}

/* tile() for any 1 <= rows <= TILE_ROWS and 1 <= columns <= TILE_COLUMNS. */
static void any_tile(int64_t rows, int64_t columns, int64_t depth, const T *a, int64_t row_step, int64_t step,
                     const T *b, T *c, int64_t ld, bool add AHEAD_PARAMETER) {
#define ROWS(r)                                                                          \
    case r:                                                                              \
        if (columns > LANES)                                                             \
            tile(r, 2, depth, a, row_step, step, b, c, ld, columns, add AHEAD_ARGUMENT); \
        else                                                                             \
            tile(r, 1, depth, a, row_step, step, b, c, ld, columns, add AHEAD_ARGUMENT); \
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
