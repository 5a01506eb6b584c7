/* Correlation of planes with kernels, without im2col. conv.c expresses a convolution and its gradient as correlations.

   In a row-major plane of pitch P (the length of a row, padding included), let p = row P + column be the index of an
   output element. The weight of kernel position (i, j) multiplies the input at index p + i P + j, a constant offset
   from p. So LANES consecutive outputs, across the ends of rows, take one vector load per weight, and convolution is a
   matrix product whose right-hand side is never materialised:

     y[o, p..p+LANES) = sum over taps k = (i, c, j) of w[o, k] * planes[offset(k) + p ..+LANES)

   with tiles of several output channels x several vectors in registers. Indices past the end of a row are computed and
   not stored. plan_correlation computes once for many images what does not depend on the image: the indices, the
   offsets, and the weights in the order in which they are read. */

#pragma once

#include "conv.h"

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
