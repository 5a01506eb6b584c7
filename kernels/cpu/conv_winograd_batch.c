/* Convolution of all images with 3x3 kernels, and its gradients, by Winograd's method (winograd.h), where images have
   few tiles and transformed weights do not fit in the caches.

   The tiles of a block of `block_images` images are the rows of the matrix products. Transformed weights are made for
   TILE_COLUMNS output channels and CHUNK channels at a time, used for all tiles of the block, and never leave L2:

         for each block of images and each panel of output channels, divided among the threads
           for each chunk of channels
             transform the weights [position][channel][out channel]              -> L2
             products[position][tile][out channel] += patches * weights          products -> L2
           transform the products

   The transformed patches of a block, [position][chunk][tile][channel], serve for all panels of a thread. The weight
   gradient has the products [position][channel][out channel], each a sum over the tiles of the block; they are
   transformed, and then summed over blocks of images in their order. So results do not depend on the threads. */

#include "winograd.h"

/* A layer and its images: `tiles` is the number of tiles of a block. */
typedef struct {
    Layer l;
    Sizes s; /* of an image */
    int64_t images, block_images, tiles, chunks, image_size;
    Compared compared;
} Batch;

static Batch batch_of(Layer l, int64_t images, int64_t block_images, int64_t size, int64_t span) {
    Batch b = {l, sizes_of(&l, 1), images, block_images};
    b.tiles = block_images * b.s.tiles;
    b.chunks = ceil_div(l.channels, CHUNK);
    b.image_size = image_rows(&b.s) * image_pitch(&b.s) * b.s.in;
    b.s.patch_step = b.tiles * b.chunks * CHUNK + LANES;
    b.s.product_step = b.tiles * TILE_COLUMNS + LANES;
    b.compared = (Compared){NULL, l.height, l.width, l.padding_y, l.padding_x, size, span};
    return b;
}

/* Numbers from one position to the next of transformed weights, and of a chunk of the weight gradient. */
enum { WEIGHT_STEP = CHUNK * TILE_COLUMNS + LANES };

/* The images of a block with channels last, their wide tiles, and their patches. */
typedef struct {
    Magnitude *pixels;
    bool *wide;
    T *images, *patches;
} Patches;

static Patches take_patches(const Batch *b, char **scratch) {
    const Layer *l = &b->l;
    const int64_t pixels = max_i64(l->height * l->width, l->out_height * l->out_width);
    Patches p = {take_bytes(scratch, pixels * sizeof(Magnitude)), take_bytes(scratch, b->tiles)};
    p.images = take_bytes(scratch, b->block_images * b->image_size * sizeof(T));
    p.patches = take_bytes(scratch, POSITIONS * b->s.patch_step * sizeof(T));
    return p;
}

static void make_patches(const Batch *b, const T *x, int64_t first, int64_t count, const Patches *p) {
    const Layer *l = &b->l;
    const Sizes *s = &b->s;
    Compared compared = b->compared;
    compared.pixels = p->pixels;
    memset(p->wide, false, b->tiles);
    for (int64_t i = 0; i < count; i++) {
        T *image = p->images + i * b->image_size;
        bool *wide = p->wide + i * s->tiles;
        const Range range =
            to_channels_last(x + (first + i) * l->channels * l->height * l->width, l->channels, l->height, l->width,
                             l->padding_y, l->padding_x, image, image_rows(s), image_pitch(s), s->in, p->pixels);
        if (is_wide(range)) mark_wide_tiles(s, compared, wide);
        transform_patches(s, image, 0, s->tiles, wide, p->patches + i * s->tiles * CHUNK, CHUNK, b->tiles * CHUNK);
    }
}

static void convolve(const Team *team, const T *x, T *y, Layer layer, Kernels kernels, int64_t images,
                     int64_t block_images) {
    const Batch b = batch_of(layer, images, block_images, 3, SIZE_OF_TILE);
    const Layer *l = &b.l;
    const int64_t out_pitch = SIZE_OF_TILE * b.s.tile_columns, pixels = l->out_height * l->out_width;
    char *scratch = team->scratch;
    const Patches p = take_patches(&b, &scratch);
    T *weights = take_bytes(&scratch, max_i64(POSITIONS * WEIGHT_STEP, l->channels * TILE_COLUMNS) * sizeof(T));
    T *products = take_bytes(&scratch, POSITIONS * b.s.product_step * sizeof(T));
    bool *all = take_bytes(&scratch, b.s.tiles);
    T *outputs = (T *)scratch;
    memset(all, true, b.s.tiles);
    int64_t begin, end, made = -1;
    my_share(team, ceil_div(images, block_images) * b.s.panels, &begin, &end);
    for (int64_t task = begin; task < end; task++) {
        const int64_t first = task / b.s.panels * block_images, count = min_i64(block_images, images - first);
        const int64_t o = task % b.s.panels * TILE_COLUMNS, outs = min_i64(TILE_COLUMNS, l->out_channels - o);
        if (made != first) make_patches(&b, x, made = first, count, &p);
        Layer panel = *l;
        Sizes s = b.s;
        panel.out_channels = outs, s.out = whole_vectors(outs);
        Kernels of_panel = kernels;
        of_panel.w += o * kernels.out_step;
        Magnitudes most[2][9] = {{{0}}};
        for (int64_t c = 0; c < l->channels; c += CHUNK) {
            const int64_t depth = min_i64(CHUNK, l->channels - c);
            Kernels part = of_panel;
            part.w += c * kernels.in_step;
            pack_panel(&part, depth, outs, weights, WEIGHT_STEP, most);
            multiply_positions(count * s.tiles, s.out, depth, p.patches + c * b.tiles, s.patch_step, CHUNK, 1, weights,
                               WEIGHT_STEP, products, s.product_step, TILE_COLUMNS, c > 0);
        }
        const bool wide_weights = are_wide(most[0]) || are_wide(most[1]);
        for (int64_t i = 0; i < count; i++) {
            const bool *wide = wide_weights ? all : p.wide + i * s.tiles;
            for (int64_t tile = 0; tile < s.tiles; tile++)
                for (int64_t j = 0; j < s.out; j += LANES)
                    transform_both(transform_products, SPAN, SIZE_OF_TILE,
                                   products + (i * s.tiles + tile) * TILE_COLUMNS + j, SPAN * s.product_step,
                                   s.product_step, outputs + tile_offset(&s, tile, out_pitch, s.out) + j,
                                   out_pitch * s.out, s.out);
            if (memchr(wide, true, s.tiles))
                convolve_wide_tiles(&s, &panel, &of_panel, p.images + i * b.image_size, wide, weights, outputs);
            from_channels_last(outputs, out_pitch, y + ((first + i) * l->out_channels + o) * pixels, outs,
                               l->out_height, l->out_width);
        }
    }
}

void FN(conv2d_winograd_batch)(const Team *team, const T *x, const T *w, T *y, CONV_NUMBERS, int64_t images,
                               int64_t block_images) {
    const Conv v = CONV;
    convolve(team, x, y, layer_of(&v), kernels_of(&v, w), images, block_images);
}

void FN(conv2d_input_grad_winograd_batch)(const Team *team, const T *g, const T *w, T *dx, CONV_NUMBERS,
                                          int64_t images, int64_t block_images) {
    const Conv v = CONV;
    convolve(team, g, dx, gradient_layer_of(&v), flipped_kernels_of(&v, w), images, block_images);
}

/* The output's gradient for a panel of output channels: images with channels last, wide tiles, and transformed tiles
   [position][tile][out channel]. Tiles that are wide, here or in `of_images`, are zeros. */
static void make_gradients(const Batch *b, const T *g, int64_t outs, int64_t first, int64_t count,
                           const Patches *of_images, const Patches *p) {
    const Layer *l = &b->l;
    const Sizes *s = &b->s;
    const int64_t out_rows = SIZE_OF_TILE * s->tile_rows, out_pitch = SIZE_OF_TILE * s->tile_columns;
    const int64_t out = whole_vectors(outs);
    memcpy(p->wide, of_images->wide, b->tiles);
    for (int64_t i = 0; i < count; i++) {
        T *image = p->images + i * out_rows * out_pitch * TILE_COLUMNS;
        bool *wide = p->wide + i * s->tiles;
        const Range range =
            to_channels_last(g + (first + i) * l->out_channels * l->out_height * l->out_width, outs, l->out_height,
                             l->out_width, 0, 0, image, out_rows, out_pitch, out, p->pixels);
        if (is_wide(range))
            mark_wide_tiles(s, (Compared){p->pixels, l->out_height, l->out_width, 0, 0, 1, SIZE_OF_TILE}, wide);
        for (int64_t tile = 0; tile < s->tiles; tile++)
            for (int64_t j = 0; j < out; j += LANES) {
                T *to = p->patches + (i * s->tiles + tile) * TILE_COLUMNS + j;
                if (!wide[tile])
                    transform_both(transform_gradient, SIZE_OF_TILE, SPAN,
                                   image + tile_offset(s, tile, out_pitch, out) + j, out_pitch * out, out, to,
                                   SPAN * s->product_step, s->product_step);
                else
                    for (int64_t k = 0; k < POSITIONS; k++) store(to + k * s->product_step, (Vector){0});
            }
    }
}

void FN(conv2d_weight_grad_winograd_batch)(const Team *team, const T *x, const T *g, T *dw, CONV_NUMBERS,
                                           int64_t images, int64_t block_images) {
    const Conv v = CONV;
    const Batch b = batch_of(layer_of(&v), images, block_images, 1, SPAN);
    const Layer *l = &b.l;
    const int64_t pixels = l->out_height * l->out_width, out_size = SIZE_OF_TILE * SIZE_OF_TILE * b.s.tiles;
    char *scratch = team->scratch;
    const Patches p = take_patches(&b, &scratch);
    Patches q = {p.pixels, take_bytes(&scratch, b.tiles)};
    q.images = take_bytes(&scratch, block_images * out_size * TILE_COLUMNS * sizeof(T));
    q.patches = take_bytes(&scratch, POSITIONS * b.s.product_step * sizeof(T));
    T *sums = take_bytes(&scratch, POSITIONS * WEIGHT_STEP * sizeof(T)), *gradient = (T *)scratch;
    int64_t begin, end;
    my_share(team, b.s.panels * b.chunks, &begin, &end);
    if (begin == end) return;
    for (int64_t first = 0; first < max_i64(images, 1); first += block_images) {
        const int64_t count = min_i64(block_images, images - first);
        make_patches(&b, x, first, count, &p);
        for (int64_t task = begin, made = -1; task < end; task++) {
            const int64_t o = task / b.chunks * TILE_COLUMNS, outs = min_i64(TILE_COLUMNS, l->out_channels - o);
            const int64_t c = task % b.chunks * CHUNK, depth = min_i64(CHUNK, l->channels - c);
            if (made != o) make_gradients(&b, g + (made = o) * pixels, outs, first, count, &p, &q);
            Layer part = *l;
            Sizes s = b.s;
            part.channels = depth, part.out_channels = outs, s.out = whole_vectors(outs);
            multiply_positions(depth, s.out, count * s.tiles, p.patches + c * b.tiles, s.patch_step, 1, CHUNK,
                               q.patches, s.product_step, sums, WEIGHT_STEP, TILE_COLUMNS, false);
            for (int64_t i = 0; i < depth; i++)
                for (int64_t j = 0; j < s.out; j += LANES)
                    transform_both(transform_weight_gradient, SPAN, 3, sums + i * TILE_COLUMNS + j, SPAN * WEIGHT_STEP,
                                   WEIGHT_STEP, gradient + 9 * i * s.out + j, 3 * s.out, s.out);
            for (int64_t tile = 0; tile < count * s.tiles; tile++)
                if (q.wide[tile]) {
                    const int64_t i = tile / s.tiles;
                    add_wide_tile(&s, &part, p.images + i * b.image_size + c, q.images + i * out_size * TILE_COLUMNS,
                                  tile % s.tiles, gradient);
                }
            put_transposed(gradient, 9 * depth, outs, dw + (o * l->channels + c) * 9, 9 * l->channels, first > 0);
        }
    }
}
