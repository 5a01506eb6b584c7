/* Winograd's convolution with 3x3 kernels, F(4x4, 3x3), and its weight gradient: the transforms, the tiles in images with
   channels last, and the products between the transforms.

   The transforms mix all elements of a patch. A NaN, an infinity, or the rounding errors of an element that is much
   larger than the others would spread to outputs whose windows exclude it. Tiles with such elements are called wide
   (is_wide). They are computed from the definition, and count as zeros in the transforms. */

#pragma once

#include "channels_last.h"
#include "tile.h"

/* The transforms (S. Winograd: "Arithmetic Complexity of Computations", 1980; A. Lavin, S. Gray: "Fast Algorithms for
   Convolutional Neural Networks", 2016).

   Four neighbouring outputs of a convolution with 3 weights take 6 products in place of 12. The convolution is a product
   of polynomials, by their values at 0, +-A, +-B and infinity. With rows and columns both transformed, a tile of 4x4
   outputs takes 36 products of a transformed patch of the image with the transformed kernel, in place of 144. Sums over
   channels commute with the transforms, so between the transforms there is one matrix product for each position k in the
   patch:

     m[k] = v[k] u[k]      v[k]: tiles x channels      u[k]: channels x out channels, once for all images

   The weight gradient applies the transposed transforms: a sum over tiles of the products of transformed patches with
   transformed tiles of the output's gradient, and the transpose of the kernel's transform at the end.

   Rounding errors are about twice those of the plain sum (six times with the usual points +-1 and +-2), if the elements
   of a patch are of similar size. */

enum { SIZE_OF_TILE = 4, SPAN = SIZE_OF_TILE + 2, POSITIONS = SPAN * SPAN };

/* The points besides 0 and infinity are +-A and +-B. All constants made of them are exact in floating point, except the
   scales of the weights. */
#define A ((T)0.75)
#define B ((T)1.5)
#define AA (A * A)
#define BB (B * B)
#define SCALE_0 (1 / (AA * BB))
#define SCALE_A (1 / (2 * AA * (AA - BB)))
#define SCALE_B (1 / (2 * BB * (BB - AA)))

/* The transforms of one row or column. */
static inline void transform_weights(const Vector *w, Vector *u) {
    const Vector at_a = w[0] + AA * w[2], at_b = w[0] + BB * w[2];
    u[0] = w[0] * SCALE_0;
    u[1] = (at_a + A * w[1]) * SCALE_A;
    u[2] = (at_a - A * w[1]) * SCALE_A;
    u[3] = (at_b + B * w[1]) * SCALE_B;
    u[4] = (at_b - B * w[1]) * SCALE_B;
    u[5] = w[2];
}

static inline void transform_patch(const Vector *x, Vector *v) {
    const Vector even_a = x[4] - BB * x[2], odd_a = A * (x[3] - BB * x[1]);
    const Vector even_b = x[4] - AA * x[2], odd_b = B * (x[3] - AA * x[1]);
    v[0] = AA * BB * x[0] - (AA + BB) * x[2] + x[4];
    v[1] = even_a + odd_a;
    v[2] = even_a - odd_a;
    v[3] = even_b + odd_b;
    v[4] = even_b - odd_b;
    v[5] = AA * BB * x[1] - (AA + BB) * x[3] + x[5];
}

static inline void transform_products(const Vector *m, Vector *y) {
    const Vector even_a = m[1] + m[2], odd_a = A * (m[1] - m[2]), even_b = m[3] + m[4], odd_b = B * (m[3] - m[4]);
    y[0] = m[0] + even_a + even_b;
    y[1] = odd_a + odd_b;
    y[2] = AA * even_a + BB * even_b;
    y[3] = AA * odd_a + BB * odd_b + m[5];
}

/* The transposes of transform_products and transform_weights. */
static inline void transform_gradient(const Vector *g, Vector *h) {
    const Vector even_a = g[0] + AA * g[2], odd_a = A * (g[1] + AA * g[3]);
    const Vector even_b = g[0] + BB * g[2], odd_b = B * (g[1] + BB * g[3]);
    h[0] = g[0];
    h[1] = even_a + odd_a;
    h[2] = even_a - odd_a;
    h[3] = even_b + odd_b;
    h[4] = even_b - odd_b;
    h[5] = g[3];
}

static inline void transform_weight_gradient(const Vector *m, Vector *dw) {
    const Vector even_a = SCALE_A * (m[1] + m[2]), odd_a = SCALE_A * (m[1] - m[2]);
    const Vector even_b = SCALE_B * (m[3] + m[4]), odd_b = SCALE_B * (m[3] - m[4]);
    dw[0] = SCALE_0 * m[0] + even_a + even_b;
    dw[1] = A * odd_a + B * odd_b;
    dw[2] = AA * even_a + BB * even_b + m[5];
}

/* Applies a transform of `from` to `to` numbers to the columns, then to the rows, of from x from vectors at
   x[i * x_row + j * x_column]. Vector (i, j) of the result goes to y[i * y_row + j * y_column]. */
SPECIALISED void transform_both(void (*transform)(const Vector *, Vector *), const int from, const int to, const T *x,
                                int64_t x_row, int64_t x_column, T *y, int64_t y_row, int64_t y_column) {
    Vector rows[SPAN][SPAN];
    UNROLL for (int j = 0; j < from; j++) {
        Vector column[SPAN], transformed[SPAN];
        UNROLL for (int i = 0; i < from; i++) column[i] = load(x + i * x_row + j * x_column);
        transform(column, transformed);
        UNROLL for (int i = 0; i < to; i++) rows[i][j] = transformed[i];
    }
    UNROLL for (int i = 0; i < to; i++) {
        Vector row[SPAN];
        transform(rows[i], row);
        UNROLL for (int j = 0; j < to; j++) store(y + i * y_row + j * y_column, row[j]);
    }
}

typedef struct {
    int64_t channels, height, width, padding_y, padding_x, out_channels, out_height, out_width;
} Layer;

/* What follows from a layer: the numbers of tiles; `in` and `out`, the numbers of a pixel of the image and of the
   output; the panels of outputs; patch_step and product_step, the elements from one position to the next in arrays of
   patches and products. These steps are odd numbers of vectors, so that positions do not share sets of the cache. */
typedef struct {
    int64_t tile_rows, tile_columns, tiles, block_tiles;
    int64_t in, out, panels, patch_step, product_step;
} Sizes;

static inline Sizes sizes_of(const Layer *l, int64_t block_tiles) {
    Sizes s = {ceil_div(l->out_height, SIZE_OF_TILE), ceil_div(l->out_width, SIZE_OF_TILE)};
    s.tiles = s.tile_rows * s.tile_columns;
    s.in = whole_vectors(l->channels), s.out = whole_vectors(l->out_channels);
    s.panels = ceil_div(s.out, TILE_COLUMNS);
    s.block_tiles = block_tiles;
    s.patch_step = s.block_tiles * s.in + LANES;
    s.product_step = s.block_tiles * s.panels * TILE_COLUMNS + LANES;
    return s;
}

/* Rows and columns of the image with channels last, its padding included. */
static inline int64_t image_rows(const Sizes *s) { return SIZE_OF_TILE * s->tile_rows + 2; }
static inline int64_t image_pitch(const Sizes *s) { return SIZE_OF_TILE * s->tile_columns + 2; }

/* The first pixel of a tile, in rows of `pitch` pixels of `step` numbers. */
static inline int64_t tile_offset(const Sizes *s, int64_t tile, int64_t pitch, int64_t step) {
    return (tile / s->tile_columns * pitch + tile % s->tile_columns) * SIZE_OF_TILE * step;
}

/* C[k] (rows x columns, whole vectors) = or += A[k] B[k] for each position k. Element (i, p) of A[k] is
   a[k * a_step + i * row_step + p * step]; B[k] has panels of `depth` rows, C[k] rows of `ld` elements. */
static inline void multiply_positions(int64_t rows, int64_t columns, int64_t depth, const T *a, int64_t a_step,
                                      int64_t row_step, int64_t step, const T *b, int64_t b_step, T *c,
                                      int64_t c_step, int64_t ld, bool add) {
    const int64_t strips = ceil_div(rows, TILE_ROWS);
    for (int64_t k = 0; k < POSITIONS; k++, a += a_step, b += b_step, c += c_step)
        for (int64_t j = 0; j < columns; j += TILE_COLUMNS)
            for (int64_t t = 0; t < strips; t++) {
                const int64_t i = part_begin(rows, strips, t), height = part_begin(rows, strips, t + 1) - i;
                any_tile(height, min_i64(TILE_COLUMNS, columns - j), depth, a + i * row_step, row_step, step,
                         b + j * depth, c + i * ld + j, ld, add);
            }
}

/* Whether the largest magnitude is infinite or NaN, or more than 2^WIDE_BITS times the smallest. */
static inline bool is_wide(Range range) {
    enum { WIDE_BITS = 10, MANTISSA_BITS = sizeof(T) == 4 ? 23 : 52 };
    const Magnitude infinite = LARGEST_MAGNITUDE >> MANTISSA_BITS << MANTISSA_BITS;
    return range.most >= infinite || range.most - range.least > (Magnitude)WIDE_BITS << MANTISSA_BITS;
}

/* The magnitudes of the pixels of an image, and which of them are compared for a tile: the largest ones of windows of
   `size` x `size` pixels, for `span` x `span` windows. The first one begins at the tile's first output, less the
   padding. */
typedef struct {
    const Magnitude *pixels;
    int64_t height, width, padding_y, padding_x, size, span;
} Compared;

static inline Magnitude window_magnitude(const Compared *m, int64_t top, int64_t left) {
    Magnitude most = 0;
    for (int64_t y = max_i64(top, 0); y < min_i64(top + m->size, m->height); y++)
        for (int64_t x = max_i64(left, 0); x < min_i64(left + m->size, m->width); x++)
            most = m->pixels[y * m->width + x] > most ? m->pixels[y * m->width + x] : most;
    return most;
}

static inline void mark_wide_tiles(const Sizes *s, const Compared m, bool *wide) {
    for (int64_t tile = 0; tile < s->tiles; tile++) {
        const int64_t top = tile / s->tile_columns * SIZE_OF_TILE - m.padding_y;
        const int64_t left = tile % s->tile_columns * SIZE_OF_TILE - m.padding_x;
        Range range = EMPTY_RANGE;
        for (int64_t i = 0; i < m.span * m.span; i++)
            include(&range, window_magnitude(&m, top + i / m.span, left + i % m.span));
        wide[tile] |= is_wide(range);
    }
}

/* The transformed patches of tiles first to end - 1 of an image, in parts of `chunk` channels that are `chunk_step`
   numbers apart: v[k][chunk][tile][channel]. Those of wide tiles are zeros. */
static inline void transform_patches(const Sizes *s, const T *image, int64_t first, int64_t end, const bool *wide,
                                     T *v, int64_t chunk, int64_t chunk_step) {
    const int64_t pitch = image_pitch(s);
    for (int64_t tile = first; tile < end; tile++, v += chunk) {
        const T *patch = image + tile_offset(s, tile, pitch, s->in);
        for (int64_t c = 0; c < s->in; c += LANES) {
            T *to = v + c / chunk * chunk_step + c % chunk;
            if (!wide[tile])
                transform_both(transform_patch, SPAN, SPAN, patch + c, pitch * s->in, s->in, to, SPAN * s->patch_step,
                               s->patch_step);
            else
                for (int64_t k = 0; k < POSITIONS; k++) store(to + k * s->patch_step, (Vector){0});
        }
    }
}

/* The kernels of a convolution: weight k of output channel o and input channel c is w[o * out_step + c * in_step + k],
   or that of 8 - k for kernels flipped by 180 degrees. All weights lie before `end`. */
typedef struct {
    const T *w, *end;
    int64_t out_step, in_step;
    bool flipped;
} Kernels;

/* Weight k of the kernels as the panel of output channels from o on. */
static inline void pack_tap(const Kernels *n, const Layer *l, int64_t k, int64_t o, T *panel) {
    const T *w = n->w + o * n->out_step + (n->flipped ? 8 - k : k);
    for (int64_t c = 0; c < l->channels; c++, panel += TILE_COLUMNS, w += n->in_step)
        for (int64_t i = 0; i < TILE_COLUMNS; i++) panel[i] = o + i < l->out_channels ? w[i * n->out_step] : 0;
}

/* Whether the magnitudes at the nine places of a kernel, for some output channel, are of a wide range. */
static inline bool are_wide(const Magnitudes *most) {
    for (int i = 0; i < LANES; i++) {
        Range range = EMPTY_RANGE;
        for (int k = 0; k < 9; k++) include(&range, most[k][i]);
        if (is_wide(range)) return true;
    }
    return false;
}

enum { COLUMNS = LANES > 9 ? LANES : 9 }; /* read from a kernel where memory has as many */

/* The transformed weights of `channels` channels and up to TILE_COLUMNS output channels, panels [channel][out channel]
   that are `step` numbers apart. `most` gets the largest magnitudes of each vector of output channels at the nine
   places, if they are larger than those that are there. */
static inline void pack_panel(const Kernels *n, int64_t channels, int64_t outs, T *to, int64_t step,
                              Magnitudes most[2][9]) {
    for (int64_t o = 0; o < TILE_COLUMNS; o += LANES)
        for (int64_t c = 0; c < channels; c++) {
            T kernels[COLUMNS][LANES];
            const int64_t rows = max_i64(0, min_i64(LANES, outs - o));
            const T *w = n->w + o * n->out_step + c * n->in_step;
            const bool inside = rows > 0 && w + (rows - 1) * n->out_step + COLUMNS <= n->end;
            if (!inside) memset(kernels, 0, sizeof kernels);
            transpose(w, rows, inside ? COLUMNS : 9, n->out_step, kernels[0], LANES, LANES);
            UNROLL for (int k = 0; k < 9; k++)
                most[o / LANES][k] = larger(most[o / LANES][k], (Magnitudes)load(kernels[k]) & LARGEST_MAGNITUDE);
            const int64_t tap = n->flipped ? -LANES : LANES;
            transform_both(transform_weights, 3, SPAN, kernels[n->flipped ? 8 : 0], 3 * tap, tap,
                           to + c * TILE_COLUMNS + o, SPAN * step, step);
        }
}

/* The outputs of wide tiles from the definition: for each weight of the kernel, matrix products of four neighbouring
   pixels. `panel` has memory for TILE_COLUMNS weights a channel. */
static inline void convolve_wide_tiles(const Sizes *s, const Layer *l, const Kernels *kernels, const T *image,
                                       const bool *wide, T *panel, T *outputs) {
    const int64_t pitch = image_pitch(s), out_pitch = SIZE_OF_TILE * s->tile_columns;
    for (int64_t o = 0; o < s->out; o += TILE_COLUMNS)
        for (int64_t k = 0; k < 9; k++) {
            pack_tap(kernels, l, k, o, panel);
            for (int64_t tile = 0; tile < s->tiles; tile++) {
                if (!wide[tile]) continue;
                const T *patch = image + tile_offset(s, tile, pitch, s->in) + (k / 3 * pitch + k % 3) * s->in;
                T *to = outputs + tile_offset(s, tile, out_pitch, s->out) + o;
                for (int64_t row = 0; row < SIZE_OF_TILE; row++)
                    any_tile(SIZE_OF_TILE, min_i64(TILE_COLUMNS, s->out - o), l->channels, patch + row * pitch * s->in,
                             s->in, 1, panel, to + row * out_pitch * s->out, s->out, k > 0);
            }
        }
}

/* The layer and the kernels of a convolution. */
static inline Layer layer_of(const Conv *v) {
    return (Layer){v->channels,     v->height,     v->width,     v->padding_y, v->padding_x,
                   v->out_channels, v->out_height, v->out_width};
}
static inline Kernels kernels_of(const Conv *v, const T *w) {
    return (Kernels){w, w + v->out_channels * v->channels * 9, v->channels * 9, 9, false};
}

/* The gradient of the image is a convolution of the output's gradient, padded by 2 minus the padding, with the kernels
   flipped. */
static inline Layer gradient_layer_of(const Conv *v) {
    return (Layer){v->out_channels, v->out_height, v->out_width, 2 - v->padding_y, 2 - v->padding_x,
                   v->channels,     v->height,     v->width};
}
static inline Kernels flipped_kernels_of(const Conv *v, const T *w) {
    return (Kernels){w, w + v->out_channels * v->channels * 9, 9, v->channels * 9, true};
}

/* dw[out channel][...] (rows of `pitch`) = (or, with `add`, +=) the transposes of a gradient
   [channel and tap][out channel], of whole vectors. */
static inline void put_transposed(const T *gradient, int64_t rows, int64_t out, T *dw, int64_t pitch, bool add) {
    const int64_t step = whole_vectors(out);
    for (int64_t o = 0; o < out; o += LANES)
        for (int64_t r = 0; r < rows; r += LANES) {
            Vector square[LANES];
            UNROLL for (int i = 0; i < LANES; i++) square[i] = load(gradient + (r + i) * step + o);
            shuffle(square, LANES);
            for (int64_t i = 0; i < min_i64(LANES, out - o); i++) {
                T *to = dw + (o + i) * pitch + r;
                if (r + LANES <= rows)
                    store(to, add ? load(to) + square[i] : square[i]);
                else
                    for (int64_t j = 0; j < rows - r; j++) to[j] = add ? to[j] + square[i][j] : square[i][j];
            }
        }
}

/* Adds the gradient of one tile, from the definition: for each tap, products of the pixels of a row. */
static inline void add_wide_tile(const Sizes *s, const Layer *l, const T *image, const T *outputs, int64_t tile,
                                 T *gradient) {
    const int64_t pitch = image_pitch(s), out_pitch = SIZE_OF_TILE * s->tile_columns;
    const int64_t top = tile / s->tile_columns * SIZE_OF_TILE, left = tile % s->tile_columns * SIZE_OF_TILE;
    const int64_t height = min_i64(SIZE_OF_TILE, l->out_height - top);
    const int64_t width = min_i64(SIZE_OF_TILE, l->out_width - left);
    const T *patch = image + tile_offset(s, tile, pitch, s->in);
    const T *from = outputs + tile_offset(s, tile, out_pitch, s->out);
    for (int64_t row = 0; row < height; row++)
        for (int64_t o = 0; o < s->out; o += TILE_COLUMNS) {
            const int64_t columns = min_i64(TILE_COLUMNS, s->out - o);
            T panel[SIZE_OF_TILE * TILE_COLUMNS] = {0};
            for (int64_t p = 0; p < width; p++)
                memcpy(panel + p * TILE_COLUMNS, from + (row * out_pitch + p) * s->out + o, columns * sizeof(T));
            for (int64_t k = 0; k < 9; k++)
                for (int64_t c = 0; c < l->channels; c += TILE_ROWS)
                    any_tile(min_i64(TILE_ROWS, l->channels - c), columns, width,
                             patch + ((row + k / 3) * pitch + k % 3) * s->in + c, 1, s->in, panel,
                             gradient + (9 * c + k) * s->out + o, 9 * s->out, true);
        }
}
