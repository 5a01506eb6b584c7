/* Convolution of one image with 3x3 kernels, and its gradients, by Winograd's method (winograd.h).

   Channels are the vector axis, so vectors are full for every size of the image. The image is first transposed to
   channels last. Blocks of up to `block_tiles` tiles are processed in all three stages before the next ones, so that
   intermediate results stay in the caches: the transform of patches, matrix products, the transform of products. Tiles
   are numbered row by row.

   Patches, products and transformed weights are arrays [position][tile or channel][channel], of whole vectors. Right-hand
   sides of products are packed in panels as tile.h reads them.

   The transforms mix all elements of a patch. A NaN, an infinity, or the rounding errors of an element that is much
   larger than the others would spread to outputs whose windows exclude it. Tiles with such elements are called wide
   (is_wide). They are computed from the definition, and count as zeros in the transforms. */

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

/* Whether the largest magnitude is infinite or NaN, or more than 2^WIDE_BITS times the smallest. */
static bool is_wide(Range range) {
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

static Magnitude window_magnitude(const Compared *m, int64_t top, int64_t left) {
    Magnitude most = 0;
    for (int64_t y = max_i64(top, 0); y < min_i64(top + m->size, m->height); y++)
        for (int64_t x = max_i64(left, 0); x < min_i64(left + m->size, m->width); x++)
            most = m->pixels[y * m->width + x] > most ? m->pixels[y * m->width + x] : most;
    return most;
}

static void mark_wide_tiles(const Sizes *s, const Compared m, bool *wide) {
    for (int64_t tile = 0; tile < s->tiles; tile++) {
        const int64_t top = tile / s->tile_columns * SIZE_OF_TILE - m.padding_y;
        const int64_t left = tile % s->tile_columns * SIZE_OF_TILE - m.padding_x;
        Range range = EMPTY_RANGE;
        for (int64_t i = 0; i < m.span * m.span; i++)
            include(&range, window_magnitude(&m, top + i / m.span, left + i % m.span));
        wide[tile] |= is_wide(range);
    }
}

/* The elements from one position to the next of the weight gradient's sums: an odd number of vectors. */
static int64_t sums_step(const Sizes *s, const Layer *l) { return l->channels * s->out + LANES; }

/* The transformed patches of tiles first to end - 1: v[k][tile][channel]. Those of wide tiles are zeros. */
static void transform_patches(const Sizes *s, const T *image, int64_t first, int64_t end, const bool *wide, T *v) {
    const int64_t pitch = image_pitch(s);
    for (int64_t tile = first; tile < end; tile++, v += s->in) {
        if (wide[tile]) {
            for (int64_t k = 0; k < POSITIONS; k++) memset(v + k * s->patch_step, 0, s->in * sizeof(T));
            continue;
        }
        const T *patch = image + tile_offset(s, tile, pitch, s->in);
        for (int64_t c = 0; c < s->in; c += LANES)
            transform_both(transform_patch, SPAN, SPAN, patch + c, pitch * s->in, s->in, v + c, SPAN * s->patch_step,
                           s->patch_step);
    }
}

/* The kernels of a convolution: weight k of output channel o and input channel c is w[o * out_step + c * in_step + k],
   or that of 8 - k for kernels flipped by 180 degrees. */
typedef struct {
    const T *w;
    int64_t out_step, in_step;
    bool flipped;
} Kernels;

/* Weight k of the kernels as the panel of output channels from o on. */
static void pack_tap(const Kernels *n, const Layer *l, int64_t k, int64_t o, T *panel) {
    const T *w = n->w + o * n->out_step + (n->flipped ? 8 - k : k);
    for (int64_t c = 0; c < l->channels; c++, panel += TILE_COLUMNS, w += n->in_step)
        for (int64_t i = 0; i < TILE_COLUMNS; i++) panel[i] = o + i < l->out_channels ? w[i * n->out_step] : 0;
}

/* All weights as panels [position][panel][channel][out channel]. Behind them, whether the weights of an output channel
   at the nine places have magnitudes of a wide range. */
static void pack_weights(const Kernels *n, const Layer *l, T *to) {
    const int64_t in = l->channels, width = ceil_div(whole_vectors(l->out_channels), TILE_COLUMNS) * TILE_COLUMNS;
    bool wide = false;
    for (int64_t o = 0; o < width; o += LANES) {
        Magnitudes most[9] = {{0}};
        for (int64_t c = 0; c < in; c++) {
            T kernels[9][LANES] = {0};
            for (int64_t i = 0; i < min_i64(LANES, l->out_channels - o); i++)
                for (int64_t k = 0; k < 9; k++)
                    kernels[k][i] = n->w[(o + i) * n->out_step + c * n->in_step + (n->flipped ? 8 - k : k)];
            UNROLL for (int k = 0; k < 9; k++)
                most[k] = larger(most[k], (Magnitudes)load(kernels[k]) & LARGEST_MAGNITUDE);
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
        for (int i = 0; i < LANES; i++) {
            Range range = EMPTY_RANGE;
            for (int k = 0; k < 9; k++) include(&range, most[k][i]);
            wide |= is_wide(range);
        }
    }
    *(bool *)(to + POSITIONS * in * width) = wide;
}

/* The outputs of wide tiles from the definition: for each weight of the kernel, matrix products of four neighbouring
   pixels. `panel` has memory for TILE_COLUMNS weights a channel. */
static void convolve_wide_tiles(const Sizes *s, const Layer *l, const Kernels *kernels, const T *image,
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

static void convolve(const T *x, T *y, const Layer *l, const Kernels *kernels, int64_t block_tiles, char *scratch,
                     const T *weights) {
    const Sizes s = sizes_of(l, block_tiles);
    const int64_t rows = image_rows(&s), pitch = image_pitch(&s), out_pitch = SIZE_OF_TILE * s.tile_columns;
    const int64_t ld = s.panels * TILE_COLUMNS;
    T *v = take_bytes(&scratch, POSITIONS * s.patch_step * sizeof(T));
    T *m = take_bytes(&scratch, POSITIONS * s.product_step * sizeof(T));
    Magnitude *pixels = take_bytes(&scratch, l->height * l->width * sizeof(Magnitude));
    bool *wide = take_bytes(&scratch, s.tiles);
    T *image = take_bytes(&scratch, rows * pitch * s.in * sizeof(T)), *outputs = (T *)scratch;
    memset(wide, *(const bool *)(weights + POSITIONS * l->channels * ld), s.tiles);
    const Range range = to_channels_last(x, l->channels, l->height, l->width, l->padding_y, l->padding_x, image, rows,
                                         pitch, s.in, pixels);
    if (is_wide(range))
        mark_wide_tiles(&s, (Compared){pixels, l->height, l->width, l->padding_y, l->padding_x, 3, SIZE_OF_TILE}, wide);
    const int64_t blocks = ceil_div(s.tiles, s.block_tiles);
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = part_begin(s.tiles, blocks, block), end = part_begin(s.tiles, blocks, block + 1);
        transform_patches(&s, image, first, end, wide, v);
        multiply_positions(end - first, s.out, l->channels, v, s.patch_step, s.in, 1, weights, l->channels * ld, m,
                           s.product_step, ld, false);
        for (int64_t tile = first; tile < end; tile++) {
            T *to = outputs + tile_offset(&s, tile, out_pitch, s.out);
            for (int64_t o = 0; o < s.out; o += LANES)
                transform_both(transform_products, SPAN, SIZE_OF_TILE, m + (tile - first) * ld + o,
                               SPAN * s.product_step, s.product_step, to + o, out_pitch * s.out, s.out);
        }
    }
    _Static_assert((int)POSITIONS >= (int)TILE_COLUMNS, "a panel fits into the memory of patches");
    if (memchr(wide, true, s.tiles)) convolve_wide_tiles(&s, l, kernels, image, wide, v, outputs);
    from_channels_last(outputs, out_pitch, y, l->out_channels, l->out_height, l->out_width);
}

/* The layer and the kernels of a convolution. */
static Layer layer_of(const Conv *v) {
    return (Layer){v->channels,     v->height,     v->width,     v->padding_y, v->padding_x,
                   v->out_channels, v->out_height, v->out_width};
}
static Kernels kernels_of(const Conv *v, const T *w) { return (Kernels){w, v->channels * 9, 9, false}; }

void FN(conv2d_winograd_prepare)(const T *w, CONV_NUMBERS, int64_t block_tiles, char *prepared) {
    const Conv v = CONV;
    const Layer layer = layer_of(&v);
    const Kernels kernels = kernels_of(&v, w);
    pack_weights(&kernels, &layer, (T *)prepared);
}

void FN(conv2d_winograd)(const T *x, const T *w, T *y, CONV_NUMBERS, int64_t block_tiles, char *scratch, char *prepared) {
    const Conv v = CONV;
    const Layer layer = layer_of(&v);
    const Kernels kernels = kernels_of(&v, w);
    convolve(x, y, &layer, &kernels, block_tiles, scratch, (T *)prepared);
}

/* The gradient of the image is a convolution of the output's gradient, padded by 2 minus the padding, with the kernels
   flipped. */
static Layer gradient_layer_of(const Conv *v) {
    return (Layer){v->out_channels, v->out_height, v->out_width, 2 - v->padding_y, 2 - v->padding_x,
                   v->channels,     v->height,     v->width};
}
static Kernels flipped_kernels_of(const Conv *v, const T *w) { return (Kernels){w, 9, v->channels * 9, true}; }

void FN(conv2d_input_grad_winograd_prepare)(const T *w, CONV_NUMBERS, int64_t block_tiles, char *prepared) {
    const Conv v = CONV;
    const Layer layer = gradient_layer_of(&v);
    const Kernels kernels = flipped_kernels_of(&v, w);
    pack_weights(&kernels, &layer, (T *)prepared);
}

void FN(conv2d_input_grad_winograd)(const T *g, const T *w, T *dx, CONV_NUMBERS, int64_t block_tiles, char *scratch, char *prepared) {
    const Conv v = CONV;
    const Layer layer = gradient_layer_of(&v);
    const Kernels kernels = flipped_kernels_of(&v, w);
    convolve(g, dx, &layer, &kernels, block_tiles, scratch, (T *)prepared);
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

/* The arrays of the weight gradient that collect the sums over images: those of Winograd's method,
   [position][channel][out channel], and those of wide tiles, [channel][tap][out channel]. */
static T *take_sums(const Sizes *s, const Layer *l, char **collected) {
    return take_bytes(collected, POSITIONS * sums_step(s, l) * sizeof(T));
}

/* Adds the gradient of one tile, from the definition: for each tap, products of the pixels of a row. */
static void add_wide_tile(const Sizes *s, const Layer *l, const T *image, const T *outputs, int64_t tile, T *gradient) {
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

/* The products of this image are added to the sums at `collected`, not yet to dw. */
void FN(conv2d_weight_grad_winograd)(const T *x, const T *g, T *dw, CONV_NUMBERS, int64_t block_tiles, char *scratch,
                                     char *collected) {
    const Conv v = CONV;
    const Layer l = layer_of(&v);
    const Sizes s = sizes_of(&l, block_tiles);
    const int64_t rows = image_rows(&s), pitch = image_pitch(&s);
    const int64_t out_rows = SIZE_OF_TILE * s.tile_rows, out_pitch = SIZE_OF_TILE * s.tile_columns;
    T *patches = take_bytes(&scratch, POSITIONS * s.patch_step * sizeof(T));
    T *gradients = take_bytes(&scratch, POSITIONS * s.product_step * sizeof(T));
    const int64_t most_pixels = max_i64(l.height * l.width, l.out_height * l.out_width);
    Magnitude *pixels = take_bytes(&scratch, most_pixels * sizeof(Magnitude));
    bool *wide = take_bytes(&scratch, s.tiles);
    T *image = take_bytes(&scratch, rows * pitch * s.in * sizeof(T)), *outputs = (T *)scratch;
    T *sums = take_sums(&s, &l, &collected), *gradient = (T *)collected;
    memset(wide, false, s.tiles);
    Range range = to_channels_last(x, l.channels, l.height, l.width, l.padding_y, l.padding_x, image, rows, pitch, s.in,
                                   pixels);
    if (is_wide(range))
        mark_wide_tiles(&s, (Compared){pixels, l.height, l.width, l.padding_y, l.padding_x, 1, SPAN}, wide);
    range = to_channels_last(g, l.out_channels, l.out_height, l.out_width, 0, 0, outputs, out_rows, out_pitch, s.out,
                             pixels);
    if (is_wide(range)) mark_wide_tiles(&s, (Compared){pixels, l.out_height, l.out_width, 0, 0, 1, SIZE_OF_TILE}, wide);
    const int64_t blocks = ceil_div(s.tiles, s.block_tiles);
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = part_begin(s.tiles, blocks, block), end = part_begin(s.tiles, blocks, block + 1);
        transform_patches(&s, image, first, end, wide, patches);
        for (int64_t tile = first; tile < end; tile++) {
            T *from = outputs + tile_offset(&s, tile, out_pitch, s.out);
            if (wide[tile]) {
                add_wide_tile(&s, &l, image, outputs, tile, gradient);
                for (int64_t row = 0; row < SIZE_OF_TILE; row++)
                    memset(from + row * out_pitch * s.out, 0, SIZE_OF_TILE * s.out * sizeof(T));
            }
            for (int64_t o = 0; o < s.out; o += LANES) {
                T *panel = gradients + o / TILE_COLUMNS * (end - first) * TILE_COLUMNS + o % TILE_COLUMNS;
                transform_both(transform_gradient, SIZE_OF_TILE, SPAN, from + o, out_pitch * s.out, s.out,
                               panel + (tile - first) * TILE_COLUMNS, SPAN * s.product_step, s.product_step);
            }
        }
        multiply_positions(l.channels, s.out, end - first, patches, s.patch_step, 1, s.in, gradients, s.product_step,
                           sums, sums_step(&s, &l), s.out, true);
    }
}

/* Transforms the sums over images, adds the sums of wide tiles, and adds the gradient to dw. */
void FN(conv2d_weight_grad_winograd_finish)(T *dw, CONV_NUMBERS, int64_t block_tiles, char *collected) {
    const Conv v = CONV;
    const Layer l = layer_of(&v);
    const Sizes s = sizes_of(&l, block_tiles);
    const int64_t step = sums_step(&s, &l);
    const T *sums = take_sums(&s, &l, &collected);
    T *gradient = (T *)collected;
    for (int64_t c = 0; c < l.channels; c++)
        for (int64_t o = 0; o < s.out; o += LANES) {
            T taps[9 * LANES], *to = gradient + 9 * c * s.out + o;
            transform_both(transform_weight_gradient, SPAN, 3, sums + c * s.out + o, SPAN * step, step, taps, 3 * LANES,
                           LANES);
            UNROLL for (int k = 0; k < 9; k++) store(to + k * s.out, load(to + k * s.out) + load(taps + k * LANES));
        }
    add_transposed(gradient, 9 * l.channels, l.out_channels, dw);
}
