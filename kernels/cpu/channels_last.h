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

/* The bits of an absolute value: zero, finite numbers, infinity and NaN are in this order. */
typedef __typeof__(_Generic((T)0, float: (int32_t)0, default: (int64_t)0)) Magnitude;
typedef Magnitude Magnitudes __attribute__((vector_size(VECTOR_BYTES), may_alias));
#define LARGEST_MAGNITUDE ((Magnitude)(~(Bits)0 >> 1))

/* The largest of some magnitudes, and the smallest of those that are not 0. */
typedef struct {
    Magnitude most, least;
} Range;

static const Range EMPTY_RANGE = {0, LARGEST_MAGNITUDE};

SPECIALISED void include(Range *range, Magnitude m) {
    range->most = m > range->most ? m : range->most;
    range->least = m > 0 && m < range->least ? m : range->least;
}

static inline Magnitude magnitude(T x) {
    Magnitude bits;
    memcpy(&bits, &x, sizeof(T));
    return bits & LARGEST_MAGNITUDE;
}

/* The larger numbers of two vectors, and the smaller ones that are not 0. */
SPECIALISED Magnitudes larger(Magnitudes a, Magnitudes b) {
    UNROLL for (int i = 0; i < LANES; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}
SPECIALISED Magnitudes smaller_nonzero(Magnitudes a, Magnitudes b) {
    const Magnitudes first = (b == 0) | (a < b);
    return (a & first) | (b & ~first);
}

/* Copies an image to channels last, in `rows` rows of `pitch` pixels. Zeros surround it: padding_y rows and padding_x
   columns before it, the others after it. `step` is at least the number of channels. With fewer than LANES channels a
   vector may be stored past the last pixel; with more, `step` must be whole vectors.

   Unless `magnitudes` is NULL it gets, for each pixel of x, the largest magnitude of its channels. Returns their
   range. */
SPECIALISED Range to_channels_last(const T *x, int64_t channels, int64_t height, int64_t width, int64_t padding_y,
                                   int64_t padding_x, T *to, int64_t rows, int64_t pitch, int64_t step,
                                   Magnitude *magnitudes) {
    const int64_t pixels = height * width;
    Magnitudes most = {0}, least = most + LARGEST_MAGNITUDE;
    memset(to, 0, rows * pitch * step * sizeof(T));
    to += (padding_y * pitch + padding_x) * step;
    for (int64_t strip = 0; strip < pixels; strip += LANES) {
        const int64_t first = max_i64(min_i64(strip, pixels - LANES), 0), count = min_i64(LANES, pixels);
        T *at[LANES];
        pixel_addresses(to, first, count, width, pitch, step, at);
        Magnitudes strip_most = {0};
        for (int64_t c = 0; c < channels; c += LANES) {
            const T *plane = x + c * pixels + first;
            if (count < LANES) {
                for (int64_t i = 0; i < count; i++)
                    for (int64_t j = 0; j < min_i64(LANES, channels - c); j++) {
                        const T value = plane[j * pixels + i];
                        at[i][c + j] = value;
                        if (magnitudes && magnitude(value) > strip_most[i]) strip_most[i] = magnitude(value);
                    }
                continue;
            }
            Vector square[LANES];
            UNROLL for (int j = 0; j < LANES; j++)
                square[j] = c + j < channels ? load(plane + j * pixels) : (Vector){0};
            if (magnitudes)
                UNROLL for (int j = 0; j < LANES; j++)
                    strip_most = larger(strip_most, (Magnitudes)square[j] & LARGEST_MAGNITUDE);
            shuffle(square, LANES);
            UNROLL for (int i = 0; i < LANES; i++) store(at[i] + c, square[i]);
        }
        if (magnitudes) {
            if (count == LANES)
                store((T *)magnitudes + first, (Vector)strip_most);
            else
                for (int64_t i = 0; i < count; i++) magnitudes[first + i] = strip_most[i];
            most = larger(most, strip_most), least = smaller_nonzero(least, strip_most);
        }
    }
    Range range = EMPTY_RANGE;
    if (magnitudes)
        for (int i = 0; i < LANES; i++) include(&range, most[i]), include(&range, least[i]);
    return range;
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
