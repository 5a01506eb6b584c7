/* Shared by the convolution kernels: the numbers of a convolution, and planes of a padded image.

   All kernels work on one image. T is its element type. An image is (channels, height, width); with y = x * w, y is
   (out channels, out height, out width) and w (out channels, channels / groups, kernel height, kernel width). */

#pragma once

#include "vectors.h"

typedef struct {
    int64_t channels, height, width, out_channels, out_height, out_width, kernel_height, kernel_width;
    int64_t stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, groups;
} Conv;

#define CONV_NUMBERS                                                                                                   \
    int64_t channels, int64_t height, int64_t width, int64_t out_channels, int64_t out_height, int64_t out_width,      \
        int64_t kernel_height, int64_t kernel_width, int64_t stride_y, int64_t stride_x, int64_t padding_y,            \
        int64_t padding_x, int64_t dilation_y, int64_t dilation_x, int64_t groups
#define CONV_ARGUMENTS                                                                                                 \
    channels, height, width, out_channels, out_height, out_width, kernel_height, kernel_width, stride_y, stride_x,     \
        padding_y, padding_x, dilation_y, dilation_x, groups
#define CONV {CONV_ARGUMENTS}

/* The next `bytes` of *memory, in whole cache lines. */
static inline void *take_bytes(char **memory, int64_t bytes) {
    void *taken = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return taken;
}

/* Splits each channel of a padded image into stride_y x stride_x planes: element (r, c) of plane (a, b) is the
   padded image's element (r stride_y + a, c stride_x + b), zero outside of the image. All inputs that a kernel
   with these strides multiplies by one weight are then contiguous in a plane. A negative padding crops. */
static inline void split_image(const T *x, int64_t channels, int64_t height, int64_t width, int64_t padding_y,
                               int64_t padding_x, int64_t stride_y, int64_t stride_x, T *planes, int64_t rows,
                               int64_t pitch) {
    for (int64_t plane = 0; plane < channels * stride_y * stride_x; plane++) {
        const int64_t b = plane % stride_x, a = plane / stride_x % stride_y;
        const T *image = x + plane / (stride_x * stride_y) * height * width;
        const int64_t begin = min_i64(pitch, ceil_div(max_i64(padding_x - b, 0), stride_x));
        const int64_t end = max_i64(begin, min_i64(pitch, ceil_div(max_i64(width + padding_x - b, 0), stride_x)));
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
            else if (stride_x == 2) /* a constant, so that vectors are loaded */
                for (int64_t c = begin; c < end; c++) planes[c] = row[c * 2];
            else
                for (int64_t c = begin; c < end; c++) planes[c] = row[c * stride_x];
            for (int64_t c = end; c < pitch; c++) planes[c] = 0;
        }
    }
}
