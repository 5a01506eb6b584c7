/* Images with channels last: [row][column][channel]. Vectors of channels are full for every size of the image.
   Neighbouring pixels are `step` numbers apart: the number of channels, or whole vectors with zeros at the end. */

#pragma once

#include "conv.h"

static inline int64_t whole_vectors(int64_t channels) { return ceil_div(channels, LANES) * LANES; }

/* The addresses of `count` pixels, from number `first` on, of an image `width` pixels wide in rows of `pitch` pixels of
   `step` numbers. */
static inline void pixel_addresses(T *image, int64_t first, int64_t count, int64_t width, int64_t pitch, int64_t step,
                                   T **to) {
    int64_t column = first % width;
    T *pixel = image + (first / width * pitch + column) * step;
    for (int64_t i = 0; i < count; i++) {
        to[i] = pixel;
        pixel += step;
        if (++column == width) column = 0, pixel += (pitch - width) * step;
    }
}

/* Copies an image to channels last, in `rows` rows of `pitch` pixels. Zeros surround it: padding_y rows and padding_x
   columns before it, the others after it. `step` is at least the number of channels. With fewer than LANES channels a
   vector may be stored past the last pixel; with more, `step` must be whole vectors. */
static void to_channels_last(const T *x, int64_t channels, int64_t height, int64_t width, int64_t padding_y,
                             int64_t padding_x, T *to, int64_t rows, int64_t pitch, int64_t step) {
    const int64_t pixels = height * width;
    memset(to, 0, rows * pitch * step * sizeof(T));
    to += (padding_y * pitch + padding_x) * step;
    for (int64_t strip = 0; strip < pixels; strip += LANES) {
        const int64_t first = max_i64(min_i64(strip, pixels - LANES), 0), count = min_i64(LANES, pixels);
        T *at[LANES];
        pixel_addresses(to, first, count, width, pitch, step, at);
        for (int64_t c = 0; c < channels; c += LANES) {
            const T *plane = x + c * pixels + first;
            if (count < LANES) {
                for (int64_t i = 0; i < count; i++)
                    for (int64_t j = 0; j < min_i64(LANES, channels - c); j++) at[i][c + j] = plane[j * pixels + i];
                continue;
            }
            Vector square[LANES];
            UNROLL for (int j = 0; j < LANES; j++)
                square[j] = c + j < channels ? load(plane + j * pixels) : (Vector){0};
            shuffle(square, LANES);
            UNROLL for (int i = 0; i < LANES; i++) store(at[i] + c, square[i]);
        }
    }
}

/* The inverse, for an image without padding before it. */
static void from_channels_last(T *from, int64_t pitch, T *y, int64_t channels, int64_t height, int64_t width) {
    const int64_t step = whole_vectors(channels), pixels = height * width;
    for (int64_t strip = 0; strip < pixels; strip += LANES) {
        const int64_t first = max_i64(min_i64(strip, pixels - LANES), 0), count = min_i64(LANES, pixels);
        T *at[LANES];
        pixel_addresses(from, first, count, width, pitch, step, at);
        for (int64_t c = 0; c < channels; c += LANES) {
            T *plane = y + c * pixels + first;
            if (count < LANES) {
                for (int64_t i = 0; i < count; i++)
                    for (int64_t j = 0; j < min_i64(LANES, channels - c); j++) plane[j * pixels + i] = at[i][c + j];
                continue;
            }
            Vector square[LANES];
            UNROLL for (int i = 0; i < LANES; i++) square[i] = load(at[i] + c);
            shuffle(square, LANES);
            UNROLL for (int j = 0; j < LANES; j++)
                if (c + j < channels) store(plane + j * pixels, square[j]);
        }
    }
}
