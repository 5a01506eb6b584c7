/* What the convolution kernels share: vectors, the numbers of a convolution, planes of a padded image, transposes.

   All of them work on one image, and T is its element type. An image is (channels, height, width); with y = x * w, y is
   (out channels, out height, out width) and w (out channels, channels / groups, kernel height, kernel width). */

#pragma once

#include "common.h"

/* Numbers in a vector register; the preprocessor can compare it. */
#define SIZE_float 4
#define SIZE_double 8
#define LANES (VECTOR_BYTES / PASTE(SIZE_, T))

typedef T Vector __attribute__((vector_size(VECTOR_BYTES)));
typedef T VectorAnywhere __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));

static inline Vector load(const T *x) { return *(const VectorAnywhere *)x; }
static inline void store(T *x, Vector value) { *(VectorAnywhere *)x = value; }

/* A function whose constant parameters make a loop nest of its own, unrolled with its sums in registers, where UNROLL
   stands before its loops of constant length. */
#define SPECIALISED static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

typedef struct {
    int64_t channels, height, width, out_channels, out_height, out_width, kernel_height, kernel_width;
    int64_t stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, groups;
} Conv;

#define CONV_NUMBERS                                                                                                   \
    int64_t channels, int64_t height, int64_t width, int64_t out_channels, int64_t out_height, int64_t out_width,      \
        int64_t kernel_height, int64_t kernel_width, int64_t stride_y, int64_t stride_x, int64_t padding_y,            \
        int64_t padding_x, int64_t dilation_y, int64_t dilation_x, int64_t groups
#define CONV                                                                                                           \
    {channels,  height,    width,     out_channels, out_height, out_width,  kernel_height, kernel_width,               \
     stride_y,  stride_x,  padding_y, padding_x,    dilation_y, dilation_x, groups}

static inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The next `bytes` of *memory, in whole cache lines. */
static inline void *take_bytes(char **memory, int64_t bytes) {
    void *taken = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return taken;
}

/* Copies a padded image apart into stride_y x stride_x planes for each channel: element (r, c) of plane (a, b) is the
   padded image's element (r stride_y + a, c stride_x + b), zero outside of the image. What a kernel with these strides
   multiplies with one of its weights is then contiguous in a plane. A negative padding crops. */
static inline void split_image(const T *x, int64_t channels, int64_t height, int64_t width, int64_t padding_y,
                               int64_t padding_x, int64_t stride_y, int64_t stride_x, T *planes, int64_t rows,
                               int64_t pitch) {
    for (int64_t plane = 0; plane < channels * stride_y * stride_x; plane++) {
        const int64_t b = plane % stride_x, a = plane / stride_x % stride_y;
        const T *image = x + plane / (stride_x * stride_y) * height * width;
        const int64_t begin = min_i64(pitch, ceil_divide(max_i64(padding_x - b, 0), stride_x));
        const int64_t end = max_i64(begin, min_i64(pitch, ceil_divide(max_i64(width + padding_x - b, 0), stride_x)));
        for (int64_t r = 0; r < rows; r++, planes += pitch) {
            const int64_t source = r * stride_y + a - padding_y;
            if (source < 0 || source >= height) {
                memset(planes, 0, pitch * sizeof(T));
                continue;
            }
            for (int64_t c = 0; c < begin; c++) planes[c] = 0;
            const T *row = image + source * width + b - padding_x;
            if (stride_x == 1)
                for (int64_t c = begin; c < end; c++) planes[c] = row[c];
            else
                for (int64_t c = begin; c < end; c++) planes[c] = row[c * stride_x];
            for (int64_t c = end; c < pitch; c++) planes[c] = 0;
        }
    }
}

#if PASTE(SIZE_, T) == 4
typedef uint32_t Bits; /* as many as T has */
#else
typedef uint64_t Bits;
#endif
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef Bits Lanes __attribute__((vector_size(VECTOR_BYTES)));
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

/* Transposes LANES vectors: interleaving the halves of the rows is half a step of a perfect shuffle, and log2(LANES)
   of them exchange the bits of the row with those of the column. */
SPECIALISED void transpose_vectors(Vector *rows) {
    UNROLL for (int length = LANES; length > 1; length /= 2) {
        Vector mixed[LANES];
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            mixed[2 * i] = INTERLEAVE_FIRST(rows[i], rows[i + LANES / 2]);
            mixed[2 * i + 1] = INTERLEAVE_SECOND(rows[i], rows[i + LANES / 2]);
        }
        UNROLL for (int i = 0; i < LANES; i++) rows[i] = mixed[i];
    }
}

/* y[j y_pitch + i] = x[i x_pitch + j] for i < rows, j < columns. Numbers of a row of y up to `width` >= rows may be
   written too (as zeros), so that a few rows take vectors as well. */
static inline void transpose(const T *x, int64_t rows, int64_t columns, int64_t x_pitch, T *y, int64_t y_pitch,
                             int64_t width) {
    if (columns < LANES || width < LANES) {
        for (int64_t j = 0; j < columns; j++)
            for (int64_t i = 0; i < rows; i++) y[j * y_pitch + i] = x[i * x_pitch + j];
        return;
    }
    for (int64_t block = 0; block < rows; block += LANES) {
        const int64_t i = min_i64(block, max_i64(rows - LANES, 0)); /* the last may repeat some of the one before */
        for (int64_t strip = 0; strip < columns; strip += LANES) {
            const int64_t j = min_i64(strip, columns - LANES);
            Vector square[LANES];
            UNROLL for (int r = 0; r < LANES; r++)
                square[r] = i + r < rows ? load(x + (i + r) * x_pitch + j) : (Vector){0};
            transpose_vectors(square);
            UNROLL for (int r = 0; r < LANES; r++) store(y + (j + r) * y_pitch + i, square[r]);
        }
    }
}
