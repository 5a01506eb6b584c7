/* Convolution of one image with 3x3 kernels, and its gradients, by Winograd's method (winograd.h).

   Channels are the vector axis, so vectors are full for every size of the image. The image is first transposed to
   channels last. Blocks of up to `block_tiles` tiles are processed in all three stages before the next ones, so that
   intermediate results stay in the caches: the transform of patches, matrix products, the transform of products. Tiles
   are numbered row by row.

   Patches, products and transformed weights are arrays [position][tile or channel][channel], of whole vectors. Right-hand
   sides of products are packed in panels as tile.h reads them. */

#include "channels_last.h"
#include "tile.h"
#include "winograd.h"

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

static Sizes sizes_of(const Layer *l, int64_t block_tiles) {
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
static int64_t image_rows(const Sizes *s) { return SIZE_OF_TILE * s->tile_rows + 2; }
static int64_t image_pitch(const Sizes *s) { return SIZE_OF_TILE * s->tile_columns + 2; }

/* The first pixel of a tile, in rows of `pitch` pixels of `step` numbers. */
static int64_t tile_offset(const Sizes *s, int64_t tile, int64_t pitch, int64_t step) {
    return (tile / s->tile_columns * pitch + tile % s->tile_columns) * SIZE_OF_TILE * step;
}

/* C[k] (rows x columns, whole vectors) = or += A[k] B[k] for each position k. Element (i, p) of A[k] is
   a[k * a_step + i * row_step + p * step]; B[k] has panels of `depth` rows, C[k] rows of `ld` elements. */
static void multiply_positions(int64_t rows, int64_t columns, int64_t depth, const T *a, int64_t a_step,
                               int64_t row_step, int64_t step, const T *b, int64_t b_step, T *c, int64_t c_step,
                               int64_t ld, bool add) {
    const int64_t strips = ceil_div(rows, TILE_ROWS);
    for (int64_t k = 0; k < POSITIONS; k++, a += a_step, b += b_step, c += c_step)
        for (int64_t j = 0; j < columns; j += TILE_COLUMNS)
            for (int64_t t = 0; t < strips; t++) {
                const int64_t i = part_begin(rows, strips, t), height = part_begin(rows, strips, t + 1) - i;
                any_tile(height, min_i64(TILE_COLUMNS, columns - j), depth, a + i * row_step, row_step, step,
                         b + j * depth, c + i * ld + j, ld, add);
            }
}

/* The elements from one position to the next of the weight gradient's sums: an odd number of vectors. */
static int64_t sums_step(const Sizes *s, const Layer *l) { return l->channels * s->out + LANES; }

/* The transformed patches of tiles first to end - 1: v[k][tile][channel]. */
static void transform_patches(const Sizes *s, const T *image, int64_t first, int64_t end, T *v) {
    const int64_t pitch = image_pitch(s);
    for (int64_t tile = first; tile < end; tile++, v += s->in) {
        const T *patch = image + tile_offset(s, tile, pitch, s->in);
        for (int64_t c = 0; c < s->in; c += LANES)
            transform_both(transform_patch, SPAN, SPAN, patch + c, pitch * s->in, s->in, v + c, SPAN * s->patch_step,
                           s->patch_step);
    }
}

/* All weights as panels [position][panel][channel][out channel]. w_out and w_in are strides of w; `flipped`: of kernels
   flipped by 180 degrees. */
static void pack_weights(const T *w, int64_t out, int64_t in, int64_t w_out, int64_t w_in, bool flipped, T *to) {
    const int64_t width = ceil_div(whole_vectors(out), TILE_COLUMNS) * TILE_COLUMNS;
    for (int64_t o = 0; o < width; o += LANES)
        for (int64_t c = 0; c < in; c++) {
            T kernels[9][LANES] = {0};
            for (int64_t i = 0; i < min_i64(LANES, out - o); i++)
                for (int64_t k = 0; k < 9; k++) kernels[k][i] = w[(o + i) * w_out + c * w_in + (flipped ? 8 - k : k)];
            T *panel = to + o / TILE_COLUMNS * in * TILE_COLUMNS + c * TILE_COLUMNS + o % TILE_COLUMNS;
            Vector rows[SPAN][3];
            UNROLL for (int j = 0; j < 3; j++) {
                Vector column[3], transformed[SPAN];
                UNROLL for (int i = 0; i < 3; i++) column[i] = load(kernels[3 * i + j]);
                transform_weights(column, transformed);
                UNROLL for (int i = 0; i < SPAN; i++) rows[i][j] = transformed[i];
            }
            UNROLL for (int i = 0; i < SPAN; i++) {
                Vector row[SPAN];
                transform_weights(rows[i], row);
                UNROLL for (int j = 0; j < SPAN; j++) store(panel + (i * SPAN + j) * in * width, row[j]);
            }
        }
}

static void convolve(const T *x, T *y, const Layer *l, int64_t block_tiles, char *scratch,
                     const T *weights) {
    const Sizes s = sizes_of(l, block_tiles);
    const int64_t rows = image_rows(&s), pitch = image_pitch(&s), out_pitch = SIZE_OF_TILE * s.tile_columns;
    const int64_t ld = s.panels * TILE_COLUMNS;
    T *v = take_bytes(&scratch, POSITIONS * s.patch_step * sizeof(T));
    T *m = take_bytes(&scratch, POSITIONS * s.product_step * sizeof(T));
    T *image = take_bytes(&scratch, rows * pitch * s.in * sizeof(T)), *outputs = (T *)scratch;
    to_channels_last(x, l->channels, l->height, l->width, l->padding_y, l->padding_x, image, rows, pitch, s.in);
    const int64_t blocks = ceil_div(s.tiles, s.block_tiles);
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = part_begin(s.tiles, blocks, block), end = part_begin(s.tiles, blocks, block + 1);
        transform_patches(&s, image, first, end, v);
        multiply_positions(end - first, s.out, l->channels, v, s.patch_step, s.in, 1, weights, l->channels * ld, m,
                           s.product_step, ld, false);
        for (int64_t tile = first; tile < end; tile++) {
            T *to = outputs + tile_offset(&s, tile, out_pitch, s.out);
            for (int64_t o = 0; o < s.out; o += LANES)
                transform_both(transform_products, SPAN, SIZE_OF_TILE, m + (tile - first) * ld + o,
                               SPAN * s.product_step, s.product_step, to + o, out_pitch * s.out, s.out);
        }
    }
    from_channels_last(outputs, out_pitch, y, l->out_channels, l->out_height, l->out_width);
}

void FN(conv2d_winograd_prepare)(const T *w, CONV_NUMBERS, int64_t block_tiles, char *prepared) {
    const Conv v = CONV;
    pack_weights(w, v.out_channels, v.channels, v.channels * 9, 9, false, (T *)prepared);
}

void FN(conv2d_winograd)(const T *x, const T *w, T *y, CONV_NUMBERS, int64_t block_tiles, char *scratch, char *prepared) {
    const Conv v = CONV;
    const Layer layer = {v.channels,     v.height,     v.width,     v.padding_y, v.padding_x,
                         v.out_channels, v.out_height, v.out_width};
    convolve(x, y, &layer, block_tiles, scratch, (T *)prepared);
}

/* The gradient of the image is a convolution of the output's gradient, padded by 2 minus the padding, with the kernels
   flipped. */
void FN(conv2d_input_grad_winograd_prepare)(const T *w, CONV_NUMBERS, int64_t block_tiles, char *prepared) {
    const Conv v = CONV;
    pack_weights(w, v.channels, v.out_channels, 9, v.channels * 9, true, (T *)prepared);
}

void FN(conv2d_input_grad_winograd)(const T *g, const T *w, T *dx, CONV_NUMBERS, int64_t block_tiles, char *scratch, char *prepared) {
    const Conv v = CONV;
    const Layer layer = {v.out_channels, v.out_height, v.out_width, 2 - v.padding_y, 2 - v.padding_x,
                         v.channels,     v.height,     v.width};
    convolve(g, dx, &layer, block_tiles, scratch, (T *)prepared);
}

/* Adds the transposes of a gradient [channel and tap][out channel], of whole vectors, to dw[out channel][...]. */
static void add_transposed(const T *gradient, int64_t rows, int64_t out, T *dw) {
    const int64_t step = whole_vectors(out);
    for (int64_t o = 0; o < out; o += LANES)
        for (int64_t r = 0; r < rows; r += LANES) {
            Vector square[LANES];
            UNROLL for (int i = 0; i < LANES; i++) square[i] = load(gradient + (r + i) * step + o);
            shuffle(square, LANES);
            for (int64_t i = 0; i < min_i64(LANES, out - o); i++) {
                T *to = dw + (o + i) * rows + r;
                if (r + LANES <= rows)
                    store(to, load(to) + square[i]);
                else
                    for (int64_t j = 0; j < rows - r; j++) to[j] += square[i][j];
            }
        }
}

/* The products of this image are added to the sums [position][channel][out channel] at `collected`, not yet to dw. */
void FN(conv2d_weight_grad_winograd)(const T *x, const T *g, T *dw, CONV_NUMBERS, int64_t block_tiles, char *scratch,
                                     char *collected) {
    const Conv v = CONV;
    const Layer l = {v.channels,     v.height,     v.width,     v.padding_y, v.padding_x,
                     v.out_channels, v.out_height, v.out_width};
    const Sizes s = sizes_of(&l, block_tiles);
    const int64_t rows = image_rows(&s), pitch = image_pitch(&s);
    const int64_t out_rows = SIZE_OF_TILE * s.tile_rows, out_pitch = SIZE_OF_TILE * s.tile_columns;
    T *patches = take_bytes(&scratch, POSITIONS * s.patch_step * sizeof(T));
    T *gradients = take_bytes(&scratch, POSITIONS * s.product_step * sizeof(T));
    T *image = take_bytes(&scratch, rows * pitch * s.in * sizeof(T)), *outputs = (T *)scratch;
    to_channels_last(x, l.channels, l.height, l.width, l.padding_y, l.padding_x, image, rows, pitch, s.in);
    to_channels_last(g, l.out_channels, l.out_height, l.out_width, 0, 0, outputs, out_rows, out_pitch,
                     s.out);
    const int64_t blocks = ceil_div(s.tiles, s.block_tiles);
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = part_begin(s.tiles, blocks, block), end = part_begin(s.tiles, blocks, block + 1);
        transform_patches(&s, image, first, end, patches);
        for (int64_t tile = first; tile < end; tile++) {
            const T *from = outputs + tile_offset(&s, tile, out_pitch, s.out);
            for (int64_t o = 0; o < s.out; o += LANES) {
                T *panel = gradients + o / TILE_COLUMNS * (end - first) * TILE_COLUMNS + o % TILE_COLUMNS;
                transform_both(transform_gradient, SIZE_OF_TILE, SPAN, from + o, out_pitch * s.out, s.out,
                               panel + (tile - first) * TILE_COLUMNS, SPAN * s.product_step, s.product_step);
            }
        }
        multiply_positions(l.channels, s.out, end - first, patches, s.patch_step, 1, s.in, gradients, s.product_step,
                           (T *)collected, sums_step(&s, &l), s.out, true);
    }
}

/* Transforms the sums over images and adds the gradient to dw. */
void FN(conv2d_weight_grad_winograd_finish)(T *dw, CONV_NUMBERS, int64_t block_tiles, char *collected) {
    const Conv v = CONV;
    const Layer l = {v.channels,     v.height,     v.width,     v.padding_y, v.padding_x,
                     v.out_channels, v.out_height, v.out_width};
    const Sizes s = sizes_of(&l, block_tiles);
    const int64_t step = sums_step(&s, &l), taps = 9 * l.channels;
    const T *sums = take_bytes(&collected, POSITIONS * step * sizeof(T));
    T *gradient = (T *)collected;
    for (int64_t c = 0; c < l.channels; c++)
        for (int64_t o = 0; o < s.out; o += LANES)
            transform_both(transform_weight_gradient, SPAN, 3, sums + c * s.out + o, SPAN * step, step,
                           gradient + 9 * c * s.out + o, 3 * s.out, s.out);
    add_transposed(gradient, taps, l.out_channels, dw);
}
