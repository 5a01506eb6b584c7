/* Convolution of one image with 3x3 kernels, and its gradients, by Winograd's method (winograd.h).

   Channels are the vector axis, so vectors are full for every size of the image. The image is first transposed to
   channels last. Blocks of up to `block_tiles` tiles are processed in all three stages before the next ones, so that
   intermediate results stay in the caches: the transform of patches, matrix products, the transform of products. Tiles
   are numbered row by row.

   Patches, products and transformed weights are arrays [position][tile or channel][channel], of whole vectors. Right
   operands of products are packed in panels as tile.h reads them. */

#include "winograd.h"

/* The elements from one position to the next of the weight gradient's sums: an odd number of vectors. */
static int64_t sums_step(const Sizes *s, const Layer *l) { return l->channels * s->out + LANES; }

/* All weights as panels [position][panel][channel][out channel]. Behind them, whether the weights of an output channel
   at the nine places have magnitudes of a wide range. */
static void pack_weights(const Kernels *n, const Layer *l, T *to) {
    const int64_t in = l->channels, width = ceil_div(whole_vectors(l->out_channels), TILE_COLUMNS) * TILE_COLUMNS;
    bool wide = false;
    for (int64_t o = 0; o < width; o += TILE_COLUMNS) {
        Kernels panel = *n;
        panel.w += o * n->out_step;
        Magnitudes most[2][9] = {{{0}}};
        pack_panel(&panel, in, l->out_channels - o, to + o * in, in * width, most);
        wide |= are_wide(most[0]) || are_wide(most[1]);
    }
    *(bool *)(to + POSITIONS * in * width) = wide;
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
        transform_patches(&s, image, first, end, wide, v, s.in, 0);
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

/* The arrays of the weight gradient that collect the sums over images: those of Winograd's method,
   [position][channel][out channel], and those of wide tiles, [channel][tap][out channel]. */
static T *take_sums(const Sizes *s, const Layer *l, char **collected) {
    return take_bytes(collected, POSITIONS * sums_step(s, l) * sizeof(T));
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
        transform_patches(&s, image, first, end, wide, patches, s.in, 0);
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
    put_transposed(gradient, 9 * l.channels, l.out_channels, dw, 9 * l.channels, true);
}

/* The gradient of one image, in place of adding it. The first bytes of `scratch` are for the sums. */
void FN(conv2d_weight_grad_by_image_winograd)(const T *x, const T *g, T *dw, CONV_NUMBERS, int64_t block_tiles,
                                              int64_t sum_bytes, char *scratch) {
    memset(scratch, 0, sum_bytes);
    memset(dw, 0, 9 * out_channels * channels * sizeof(T));
    FN(conv2d_weight_grad_winograd)(x, g, dw, CONV_ARGUMENTS, block_tiles, scratch + sum_bytes, scratch);
    FN(conv2d_weight_grad_winograd_finish)(dw, CONV_ARGUMENTS, block_tiles, scratch);
}
