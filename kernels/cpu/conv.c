/* Convolution of one image, and its gradient with respect to the image, as correlations of planes.

   For strides above 1 the image is first split into planes over which the kernel moves by one (split_image). Dilation
   only changes offsets.

   The input gradient is also a convolution: of the padded gradient of y with the kernel rotated by 180 degrees and its
   channels exchanged. For strides above 1 only every stride-th row and column of the kernel multiplies an element of
   the image. The elements with the same rows and columns are a phase; each phase is the output of one convolution. */

#include "conv.h"

/* Correlation of planes with kernels, without im2col.

   In a row-major plane of pitch P (the length of a row, padding included), let p = row P + column be the index of an
   output element. The weight of kernel position (i, j) multiplies the input at index p + i P + j, a constant offset
   from p. So LANES consecutive outputs, across the ends of rows, take one vector load per weight, and convolution is a
   matrix product whose right-hand side is never materialised:

     y[o, p..p+LANES) = sum over taps k = (i, c, j) of w[o, k] * planes[offset(k) + p ..+LANES)

   with tiles of several output channels x several vectors in registers. Indices past the end of a row are computed and
   not stored. plan_correlation computes once for many images what does not depend on the image: the indices, the
   offsets, and the weights in the order in which they are read. */

/* Sums, two vectors of input and a weight fill the registers. A tile with fewer channels has more vectors, so that
   enough additions overlap: up to MAX_VECTORS, a macro (lowering/cpu/conv.py). */
enum { MAX_CHANNELS = VECTOR_REGISTERS / 2 - 2 };

/* Number of tiles of a block of channels that are computed before the next block. */
enum { STRIP = 4 };

/* One product of a sum: offset of its input from the output's index, of its weight from the channel's first weight. */
typedef struct {
    int32_t input, weight;
} Tap;

/* LANES consecutive outputs from this index, row and column. In the first span of a tile, taps [begin, end) are all
   that read more than padding. */
typedef struct {
    int32_t place, row, column, begin, end;
} Span;

typedef struct {
    int64_t pitch, first_row, end_row; /* rows [first_row, end_row) of each plane are not all zeros */
    Tap *taps; /* kernel_rows times row_taps; those of kernel row i read tap_rows[i] rows below the output */
    int32_t *tap_rows;
    int64_t kernel_rows, row_taps;
    int64_t channels, rows, columns; /* of the output of a group */
    int64_t y_first, y_channel, y_row, y_column; /* offset and strides of a group's output in y */
    int64_t groups, group_planes; /* each group of channels has its own planes, weights and output */
    int64_t vectors, count; /* vectors per tile; number of spans, a multiple of vectors */
    bool whole_rows;        /* no span crosses the end of a row, except the last of short rows */
    Span *spans;
    T *w; /* for each group and block of channels, tap by tap */
} Correlation;

/* Blocks of channels, as equal as possible; `block_begin` is the first channel of one. */
static inline int64_t block_count(const Correlation *c) { return ceil_div(c->channels, MAX_CHANNELS); }
static inline int64_t block_begin(const Correlation *c, int64_t block) {
    return c->channels * block / block_count(c);
}

/* The fewest spans that cover all outputs or, with `whole_rows`, the fewest that do not cross the end of a row, or one
   for each row of fewer than LANES outputs. The last one is moved back so that nothing past the last output is read.
   Returns their number. */
static int64_t cover(const Correlation *c, bool whole_rows, Span *spans) {
    const int64_t total = (c->rows - 1) * c->pitch + c->columns;
    int64_t count = 0, place = 0;
    while (place < total) {
        int64_t row = place / c->pitch, column = place - row * c->pitch;
        if (column >= c->columns) row++, column = 0;
        place = row * c->pitch + column;
        const bool short_rows = whole_rows && c->columns < LANES;
        const int64_t next_row = (row + 1) * c->pitch;
        const int64_t latest = whole_rows && !short_rows ? row * c->pitch + c->columns - LANES : total - LANES;
        if (place > latest && latest >= 0) place = latest, row = place / c->pitch, column = place - row * c->pitch;
        spans[count++] = (Span){place, row, column, 0, 0};
        place = short_rows ? next_row : place + LANES;
    }
    return count;
}

/* Whether each row of the output begins where the one before it ends. What a vector stores past the end of a row, the
   next row then replaces. */
static inline bool rows_touch(const Correlation *c) { return c->y_column == 1 && c->y_row == c->columns; }

/* Whether a vector stores all lanes of a span. */
static inline bool is_stored_whole(const Correlation *c, Span span) {
    if (c->y_column == 1 && span.column + LANES <= c->columns) return true;
    return c->whole_rows && rows_touch(c) && span.column == 0 && (c->rows - span.row) * c->columns >= LANES;
}

/* Chooses the spans that take the least time. A span across the end of a row is stored element by element, which costs
   about as much as TAPS_OF_SPLIT products. The last span is repeated to make their number a multiple of c->vectors. */
static void choose_spans(Correlation *c) {
    enum { TAPS_OF_SPLIT = 24 };
    Span *spans = c->spans;
    int64_t count = cover(c, false, spans), split = 0;
    for (int64_t s = 0; s < count; s++) split += spans[s].column + LANES > c->columns;
    const int64_t whole = c->rows * ceil_div(c->columns, LANES), taps = c->kernel_rows * c->row_taps;
    if ((c->columns >= LANES || rows_touch(c)) && whole * taps <= count * taps + split * TAPS_OF_SPLIT) {
        count = cover(c, true, spans);
        c->whole_rows = true;
    }
    for (; count % c->vectors; count++) spans[count] = spans[count - 1];
    c->count = count;
}

/* Leaves out the taps of kernel rows that read only padding at a tile's spans. */
static void choose_taps(Correlation *c) {
    for (int64_t s = 0; s < c->count; s += c->vectors) {
        const int64_t first_row = c->spans[s].row;
        const int64_t last_row = (c->spans[s + c->vectors - 1].place + LANES - 1) / c->pitch;
        int64_t top = 0, bottom = c->kernel_rows;
        while (top < bottom && last_row + c->tap_rows[top] < c->first_row) top++;
        while (bottom > top && first_row + c->tap_rows[bottom - 1] >= c->end_row) bottom--;
        c->spans[s].begin = top * c->row_taps;
        c->spans[s].end = bottom * c->row_taps;
    }
}

/* Completes a correlation whose fields up to group_planes are set: chooses the spans and packs the weights. The weight
   of output channel o and tap k is w[o * channel_weights + taps[k].weight]. c->spans has capacity for one span per
   output and MAX_VECTORS more, c->w for all weights. */
static void plan_correlation(Correlation *c, const T *w, int64_t channel_weights, int64_t group_weights) {
    const int64_t taps = c->kernel_rows * c->row_taps;
    if (c->rows <= 0 || c->columns <= 0) c->channels = 0;
    if (c->channels == 0) return;
    c->vectors = ceil_div(c->channels, block_count(c)) <= MAX_CHANNELS / 2 ? 4 : 2;
    choose_spans(c);
    choose_taps(c);
    T *to = c->w;
    for (int64_t group = 0; group < c->groups; group++, w += group_weights)
        for (int64_t block = 0; block < block_count(c); block++)
            for (int64_t k = 0; k < taps; k++)
                for (int64_t o = block_begin(c, block); o < block_begin(c, block + 1); o++)
                    *to++ = w[o * channel_weights + c->taps[k].weight];
}

/* Stores one span's sums for `channels` channels, without those past the ends of rows. */
static void store_split(const Correlation *c, const T (*sums)[LANES], int channels, Span span, T *y) {
    for (int64_t lane = 0, row = span.row, column = span.column; lane < LANES; lane++) {
        if (column < c->columns && row < c->rows)
            for (int i = 0; i < channels; i++)
                y[i * c->y_channel + row * c->y_row + column * c->y_column] = sums[i][lane];
        if (++column == c->pitch) column = 0, row++;
    }
}

/* Outputs of `channels` channels at `vectors` spans. w has the weights of these channels, tap by tap. */
SPECIALISED void tile(const Correlation *c, const T *w, const T *image, T *y, const Span *spans,
                      const int channels, const int vectors) {
    Vector sums[MAX_CHANNELS][MAX_VECTORS];
    const T *planes[MAX_VECTORS];
    UNROLL for (int v = 0; v < vectors; v++) planes[v] = image + spans[v].place;
    UNROLL for (int i = 0; i < channels; i++)
        UNROLL for (int v = 0; v < vectors; v++) sums[i][v] = (Vector){0};
    w += spans->begin * channels;
    for (const Tap *tap = c->taps + spans->begin, *end = c->taps + spans->end; tap < end; tap++, w += channels) {
        Vector x[MAX_VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) x[v] = load(planes[v] + tap->input);
        UNROLL for (int i = 0; i < channels; i++)
            UNROLL for (int v = 0; v < vectors; v++) sums[i][v] += w[i] * x[v];
    }
    UNROLL for (int v = 0; v < vectors; v++) {
        if (is_stored_whole(c, spans[v])) {
            T *to = y + spans[v].row * c->y_row + spans[v].column;
            const int64_t y_channel = c->y_channel;
            UNROLL for (int i = 0; i < channels; i++) store(to + i * y_channel, sums[i][v]);
        } else {
            T split[MAX_CHANNELS][LANES];
            UNROLL for (int i = 0; i < channels; i++) store(split[i], sums[i][v]);
            store_split(c, split, channels, spans[v], y);
        }
    }
}

typedef void (*Tile)(const Correlation *c, const T *w, const T *image, T *y, const Span *spans);

#define TILE(channels, vectors)                                                                                        \
    static void tile_##channels##x##vectors(const Correlation *c, const T *w, const T *image, T *y,                    \
                                            const Span *spans) {                                                       \
        tile(c, w, image, y, spans, channels, vectors);                                                                \
    }
#define TILES(channels) TILE(channels, 2) TILE(channels, 4)
TILES(1) TILES(2) TILES(3) TILE(4, 2) TILE(5, 2) TILE(6, 2)
#if VECTOR_REGISTERS == 32
TILE(4, 4) TILE(5, 4) TILE(6, 4) TILES(7) TILE(8, 2) TILE(9, 2) TILE(10, 2) TILE(11, 2) TILE(12, 2)
TILE(13, 2) TILE(14, 2)
#endif

/* By number of channels, with 2 and with 4 vectors. */
static const Tile TWO[] = {
    0,        tile_1x2, tile_2x2, tile_3x2,  tile_4x2,  tile_5x2,  tile_6x2,
#if VECTOR_REGISTERS == 32
    tile_7x2, tile_8x2, tile_9x2, tile_10x2, tile_11x2, tile_12x2, tile_13x2, tile_14x2,
#endif
};
static const Tile FOUR[] = {
    0,        tile_1x4, tile_2x4, tile_3x4,
#if VECTOR_REGISTERS == 32
    tile_4x4, tile_5x4, tile_6x4, tile_7x4,
#endif
};

/* All outputs. The outer loop is over strips of spans, the inner one over channels, so that the spans' input and a
   block's weights stay in the L1 cache. */
static void correlate(const Correlation *c, const T *planes, T *y) {
    if (c->channels == 0) return;
    const int64_t blocks = block_count(c), strip_spans = STRIP * c->vectors;
    const Tile *tiles = c->vectors == 4 ? FOUR : TWO;
    const T *w = c->w;
    y += c->y_first;
    for (int64_t group = 0; group < c->groups; group++) {
        for (int64_t strip = 0; strip < c->count; strip += strip_spans)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t first = block_begin(c, block), end = block_begin(c, block + 1);
                for (int64_t s = strip; s < min_i64(c->count, strip + strip_spans); s += c->vectors)
                    tiles[end - first](c, w + first * c->kernel_rows * c->row_taps, planes, y + first * c->y_channel,
                                       c->spans + s);
            }
        planes += c->group_planes;
        w += c->channels * c->kernel_rows * c->row_taps;
        y += c->channels * c->y_channel;
    }
}

/* The correlations of a convolution, with memory for their arrays. */
static Correlation *take_correlations(char **memory, int64_t count, int64_t taps, int64_t tap_rows, int64_t spans,
                                      Correlation first) {
    Correlation *correlations = take_bytes(memory, count * sizeof(Correlation));
    _Static_assert(sizeof(Correlation) == CORRELATION_BYTES && sizeof(Tap) == TAP_BYTES && sizeof(Span) == SPAN_BYTES,
                   "STRUCTS of adtrain/lowering/cpu/conv.py");
    first.taps = take_bytes(memory, taps * sizeof(Tap));
    first.tap_rows = take_bytes(memory, tap_rows * sizeof(int32_t));
    first.spans = take_bytes(memory, (spans + count * MAX_VECTORS) * sizeof(Span));
    first.w = (T *)*memory;
    *correlations = first;
    return correlations;
}

/* Rows, and length of a row, of the planes that conv2d reads. */
static int64_t plane_rows(const Conv *v) {
    return v->out_height + (v->kernel_height - 1) * v->dilation_y / v->stride_y;
}
static int64_t plane_pitch(const Conv *v) {
    return v->out_width + (v->kernel_width - 1) * v->dilation_x / v->stride_x;
}

void FN(conv2d_prepare)(const T *w, CONV_NUMBERS, char *prepared) {
    const Conv v = CONV;
    const int64_t in = v.channels / v.groups, out = v.out_channels / v.groups, phases = v.stride_y * v.stride_x;
    const int64_t kernel = v.kernel_height * v.kernel_width, pixels = v.out_height * v.out_width;
    const int64_t pitch = plane_pitch(&v), plane = plane_rows(&v) * pitch;
    const Correlation numbers = {
        .pitch = pitch,
        .first_row = v.padding_y / v.stride_y,
        .end_row = (v.height - 1 + v.padding_y) / v.stride_y + 1,
        .kernel_rows = v.kernel_height,
        .row_taps = in * v.kernel_width,
        .channels = out,
        .rows = v.out_height,
        .columns = v.out_width,
        .y_channel = pixels,
        .y_row = v.out_width,
        .y_column = 1,
        .groups = v.groups,
        .group_planes = in * phases * plane,
    };
    Correlation *c = take_correlations(&prepared, 1, in * kernel, v.kernel_height, pixels, numbers);
    Tap *tap = c->taps;
    for (int64_t i = 0; i < v.kernel_height; i++) {
        const int64_t y0 = i * v.dilation_y;
        c->tap_rows[i] = y0 / v.stride_y;
        for (int64_t channel = 0; channel < in; channel++)
            for (int64_t j = 0; j < v.kernel_width; j++) {
                const int64_t x0 = j * v.dilation_x, phase = y0 % v.stride_y * v.stride_x + x0 % v.stride_x;
                *tap++ = (Tap){(channel * phases + phase) * plane + y0 / v.stride_y * pitch + x0 / v.stride_x,
                               channel * kernel + i * v.kernel_width + j};
            }
    }
    plan_correlation(c, w, in * kernel, out * in * kernel);
}

void FN(conv2d)(const T *x, const T *w, T *y, CONV_NUMBERS, char *scratch, char *prepared) {
    const Conv v = CONV;
    const int64_t rows = plane_rows(&v), pitch = plane_pitch(&v);
    /* An image without padding is a plane already, unless a span would reach past its end. */
    const bool in_place = v.stride_y * v.stride_x == 1 && pitch == v.width && rows == v.height &&
                          (v.out_height - 1) * pitch + v.out_width >= LANES;
    T *planes = (T *)scratch;
    if (!in_place)
        split_image(x, v.channels, v.height, v.width, v.padding_y, v.padding_x, v.stride_y, v.stride_x, planes, rows,
                    pitch);
    correlate((const Correlation *)prepared, in_place ? x : planes, y);
}

/* Along one axis, kernel positions congruent to `phase` modulo the stride multiply the image elements
   q stride + phase - padding, for begin <= q < end. */
static void phase_range(int64_t length, int64_t phase, int64_t padding, int64_t stride, int64_t *begin, int64_t *end) {
    *begin = ceil_div(max_i64(padding - phase, 0), stride);
    *end = max_i64(*begin, ceil_div(max_i64(length + padding - phase, 0), stride));
}

/* The planes of the gradient of y that the input gradient reads: kernel position i at q reads row q - i / stride. `top`
   rows and `left` columns of zeros precede the gradient. */
typedef struct {
    int64_t top, left, rows, pitch;
} Planes;

static Planes gradient_planes(const Conv *v) {
    const int64_t top = (v->kernel_height - 1) * v->dilation_y / v->stride_y - v->padding_y / v->stride_y;
    const int64_t left = (v->kernel_width - 1) * v->dilation_x / v->stride_x - v->padding_x / v->stride_x;
    return (Planes){top, left, ceil_div(v->height + v->padding_y, v->stride_y) + top,
                    ceil_div(v->width + v->padding_x, v->stride_x) + left};
}

void FN(conv2d_input_grad_prepare)(const T *w, CONV_NUMBERS, char *prepared) {
    const Conv v = CONV;
    const int64_t in = v.channels / v.groups, out = v.out_channels / v.groups, pixels = v.height * v.width;
    const int64_t kernel = v.kernel_height * v.kernel_width, phases = v.stride_y * v.stride_x;
    const Planes p = gradient_planes(&v);
    const int64_t plane = p.rows * p.pitch;
    Correlation next = {
        .pitch = p.pitch,
        .first_row = p.top,
        .end_row = p.top + v.out_height,
        .y_channel = pixels,
        .y_row = v.stride_y * v.width,
        .y_column = v.stride_x,
        .groups = v.groups,
        .group_planes = out * plane,
    };
    Correlation *c =
        take_correlations(&prepared, phases, out * kernel, v.kernel_height * v.stride_x, pixels, next);
    next = *c;
    for (int64_t a = 0; a < v.stride_y; a++)
        for (int64_t b = 0; b < v.stride_x; b++, c++) {
            int64_t row, row_end, column, column_end, kernel_rows = 0;
            phase_range(v.height, a, v.padding_y, v.stride_y, &row, &row_end);
            phase_range(v.width, b, v.padding_x, v.stride_x, &column, &column_end);
            Tap *tap = next.taps;
            for (int64_t i = v.kernel_height - 1; i >= 0; i--) {
                if (i * v.dilation_y % v.stride_y != a) continue;
                const int64_t tap_row = row + p.top - i * v.dilation_y / v.stride_y;
                for (int64_t o = 0; o < out; o++)
                    for (int64_t j = v.kernel_width - 1; j >= 0; j--)
                        if (j * v.dilation_x % v.stride_x == b)
                            *tap++ = (Tap){o * plane + tap_row * p.pitch + column + p.left -
                                               j * v.dilation_x / v.stride_x,
                                           o * in * kernel + i * v.kernel_width + j};
                next.tap_rows[kernel_rows++] = tap_row;
            }
            *c = next;
            c->kernel_rows = kernel_rows;
            c->row_taps = kernel_rows ? (tap - next.taps) / kernel_rows : 0;
            c->channels = in;
            c->rows = row_end - row;
            c->columns = column_end - column;
            c->y_first = (row * v.stride_y + a - v.padding_y) * v.width + column * v.stride_x + b - v.padding_x;
            plan_correlation(c, w, kernel, out * in * kernel);
            next.taps = tap;
            next.tap_rows += kernel_rows;
            next.spans += c->count;
            next.w += v.groups * in * (tap - c->taps);
        }
}

void FN(conv2d_input_grad)(const T *g, const T *w, T *dx, CONV_NUMBERS, char *scratch, char *prepared) {
    const Conv v = CONV;
    const Planes p = gradient_planes(&v);
    T *planes = (T *)scratch;
    split_image(g, v.out_channels, v.out_height, v.out_width, p.top, p.left, 1, 1, planes, p.rows, p.pitch);
    const Correlation *correlations = (const Correlation *)prepared;
    for (int64_t i = 0; i < v.stride_y * v.stride_x; i++) correlate(correlations + i, planes, dx);
}
