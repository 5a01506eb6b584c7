/* Vectors of T, and transposes by vector shuffles, for the types of four and eight bytes named here. */

#pragma once

#include "common.h"

#define SIZE_float 4
#define SIZE_int32_t 4
#define SIZE_uint32_t 4
#define SIZE_double 8
#define SIZE_int64_t 8
#define SIZE PASTE(SIZE_, T) /* sizeof(T) for the preprocessor; 0 for other types */

#if SIZE
#define LANES (VECTOR_BYTES / SIZE) /* numbers in a vector register */

typedef T Vector __attribute__((vector_size(VECTOR_BYTES)));
typedef T UnalignedVector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));

static inline Vector load(const T *x) { return *(const UnalignedVector *)x; }
static inline void store(T *x, Vector value) { *(UnalignedVector *)x = value; }

#if SIZE == 4
typedef uint32_t Bits; /* of the size of T */
#else
typedef uint64_t Bits;
#endif
typedef Bits Lanes __attribute__((vector_size(VECTOR_BYTES)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Lanes){__VA_ARGS__})
#endif

/* The first and the second halves of two vectors, interleaved. */
#if LANES == 2
#define INTERLEAVE_FIRST(a, b) SHUFFLE(a, b, 0, 2)
#define INTERLEAVE_SECOND(a, b) SHUFFLE(a, b, 1, 3)
#elif LANES == 4
#define INTERLEAVE_FIRST(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define INTERLEAVE_SECOND(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#elif LANES == 8
#define INTERLEAVE_FIRST(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define INTERLEAVE_SECOND(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define INTERLEAVE_FIRST(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define INTERLEAVE_SECOND(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#endif

enum { MAX_ROWS = LANES > 4 ? LANES : 4 };

/* Interleaves the halves of `count` vectors, a constant up to MAX_ROWS, log2(LANES) times. Each interleaving is a
   perfect shuffle: it rotates the bits of an element's index by one. With LANES vectors the result is the transpose;
   with fewer, vector i holds every count-th element, from the i-th on. */
SPECIALISED void shuffle(Vector *rows, const int count) {
    UNROLL for (int length = LANES; length > 1; length /= 2) {
        Vector mixed[MAX_ROWS];
        UNROLL for (int i = 0; i < count / 2; i++) {
            mixed[2 * i] = INTERLEAVE_FIRST(rows[i], rows[i + count / 2]);
            mixed[2 * i + 1] = INTERLEAVE_SECOND(rows[i], rows[i + count / 2]);
        }
        UNROLL for (int i = 0; i < count; i++) rows[i] = mixed[i];
    }
}

/* y[j y_pitch + i] = x[i x_pitch + j] for i < rows, j < columns. Elements of a row of y up to `width` >= rows may be
   overwritten with zeros, so that vectors serve for few rows as well. */
static inline void transpose(const T *x, int64_t rows, int64_t columns, int64_t x_pitch, T *y, int64_t y_pitch,
                             int64_t width) {
    if (columns < LANES || width < LANES) {
        for (int64_t j = 0; j < columns; j++)
            for (int64_t i = 0; i < rows; i++) y[j * y_pitch + i] = x[i * x_pitch + j];
        return;
    }
    for (int64_t block = 0; block < rows; block += LANES) {
        const int64_t i = min_i64(block, max_i64(rows - LANES, 0)); /* the last block may overlap the one before */
        for (int64_t strip = 0; strip < columns; strip += LANES) {
            const int64_t j = min_i64(strip, columns - LANES);
            Vector square[LANES];
            UNROLL for (int r = 0; r < LANES; r++)
                square[r] = i + r < rows ? load(x + (i + r) * x_pitch + j) : (Vector){0};
            shuffle(square, LANES);
            UNROLL for (int r = 0; r < LANES; r++) store(y + (j + r) * y_pitch + i, square[r]);
        }
    }
}
#endif
