/* Convolution of one image with 3x3 kernels by Winograd's method (winograd.h).

   Tiles of size x size outputs are numbered row by row. The three stages are the transform of patches, matrix products,
   and the transform of products. TILES tiles, two vectors, are processed in all stages before the next ones, so that
   intermediate results stay in the caches. */

#include "winograd.h"

/* Sums, two vectors of patches and a weight fill the registers. */
enum { MAX_CHANNELS = VECTOR_REGISTERS / 2 - 2, TILES = 2 * LANES };

typedef struct {
    int64_t channels, height, width, padding_y, padding_x, out_channels, out_height, out_width;
} Layer;

/* The transform of one kernel to u[k * step]; `flipped`: of the kernel flipped by 180 degrees. */
SPECIALISED void transform_kernel(const T *w, bool flipped, T *u, int64_t step, const int size) {
    T columns[3][MAX_SPAN], row[MAX_SPAN];
    UNROLL for (int j = 0; j < 3; j++)
        transform_weights((T[]){w[flipped ? 8 - j : j], w[flipped ? 5 - j : 3 + j], w[flipped ? 2 - j : 6 + j]},
                          columns[j], size);
    UNROLL for (int i = 0; i < size + 2; i++) {
        transform_weights((T[]){columns[0][i], columns[1][i], columns[2][i]}, row, size);
        UNROLL for (int j = 0; j < size + 2; j++) u[(i * (size + 2) + j) * step] = row[j];
    }
}

/* All weights in the order in which `multiply` reads them: [block][position][channel][output channel of the block].
   w_out and w_in are strides of w. CHANNELS channels at a time: writes to many distant addresses are slow. */
SPECIALISED void pack(const T *w, int64_t out, int64_t in, int64_t w_out, int64_t w_in, bool flipped, T *to,
                      const int size) {
    enum { CHANNELS = 16, STEP = CHANNELS * MAX_CHANNELS };
    const int64_t blocks = ceil_divide(out, MAX_CHANNELS), positions = (size + 2) * (size + 2);
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = out * block / blocks, count = out * (block + 1) / blocks - first;
        for (int64_t begin = 0; begin < in; begin += CHANNELS) {
            const int64_t channels = min_i64(CHANNELS, in - begin);
            T u[MAX_SPAN * MAX_SPAN][STEP];
            for (int64_t o = 0; o < count; o++)
                for (int64_t c = 0; c < channels; c++)
                    transform_kernel(w + (first + o) * w_out + (begin + c) * w_in, flipped, &u[0][c * count + o], STEP,
                                     size);
            for (int64_t k = 0; k < positions; k++)
                memcpy(to + (k * in + begin) * count, u[k], channels * count * sizeof(T));
        }
        to += positions * in * count;
    }
}

/* Up to LANES neighbouring tiles of one row; `tile` is the number of the first among the TILES that are computed
   together. */
typedef struct {
    int64_t tile, count, row, column;
} RowOfTiles;

static int64_t divide_into_rows(int64_t first, int64_t count, int64_t columns, RowOfTiles *rows_of_tiles) {
    int64_t row_count = 0;
    for (int64_t tile = 0, take; tile < count; tile += take) {
        const int64_t row = (first + tile) / columns, column = (first + tile) % columns;
        take = min_i64(LANES, min_i64(columns - column, count - tile));
        rows_of_tiles[row_count++] = (RowOfTiles){tile, take, row, column};
    }
    return row_count;
}

/* Pads the image and splits each row by columns: column `size * t + b` becomes element t of row b. These rows are
   `pitch` elements long, whole vectors, with zeros at the end. `line` has capacity for a padded row. */
SPECIALISED void split_columns(const T *x, const Layer *l, int64_t rows, int64_t pitch, T *line, T *to,
                               const int size) {
    memset(line, 0, size * pitch * sizeof(T));
    for (int64_t r = 0; r < l->channels * rows; r++, to += size * pitch) {
        const int64_t row = r % rows - l->padding_y;
        if (row < 0 || row >= l->height) {
            memset(to, 0, size * pitch * sizeof(T));
            continue;
        }
        memcpy(line + l->padding_x, x + (r / rows * l->height + row) * l->width, l->width * sizeof(T));
        for (int64_t t = 0; t < pitch; t += LANES) {
            Vector of[MAX_SIZE];
            UNROLL for (int i = 0; i < size; i++) of[i] = load(line + size * t + i * LANES);
            shuffle(of, size);
            UNROLL for (int b = 0; b < size; b++) store(to + b * pitch + t, of[b]);
        }
    }
}

/* v[k step + i] from the patches of LANES tiles, the first at `x`, of an image split by columns. */
SPECIALISED void transform_patches(const T *x, int64_t pitch, T *v, int64_t step, const int size) {
    Vector rows[MAX_SPAN][MAX_SPAN];
    UNROLL for (int j = 0; j < size + 2; j++) {
        Vector column[MAX_SPAN], transformed[MAX_SPAN];
        UNROLL for (int i = 0; i < size + 2; i++) column[i] = load(x + (i * size + j % size) * pitch + j / size);
        transform_patch(column, transformed, size);
        UNROLL for (int i = 0; i < size + 2; i++) rows[i][j] = transformed[i];
    }
    UNROLL for (int i = 0; i < size + 2; i++) {
        Vector row[MAX_SPAN];
        transform_patch(rows[i], row, size);
        UNROLL for (int j = 0; j < size + 2; j++) store(v + (i * (size + 2) + j) * step, row[j]);
    }
}

/* m = u v for `height` output channels and the tiles of `vectors` vectors. */
SPECIALISED void multiply(const T *u, const T *v, int64_t channels, T *m, const int height, const int vectors) {
    Vector sums[MAX_CHANNELS][2];
    UNROLL for (int i = 0; i < height; i++)
        UNROLL for (int j = 0; j < vectors; j++) sums[i][j] = (Vector){0};
#pragma GCC unroll 1
    for (const T *end = u + channels * height; u < end; u += height, v += TILES) {
        Vector x[2];
        UNROLL for (int j = 0; j < vectors; j++) x[j] = load(v + j * LANES);
        UNROLL for (int i = 0; i < height; i++)
            UNROLL for (int j = 0; j < vectors; j++) sums[i][j] += u[i] * x[j];
    }
    UNROLL for (int i = 0; i < height; i++)
        UNROLL for (int j = 0; j < vectors; j++) store(m + i * TILES + j * LANES, sums[i][j]);
}

typedef void (*Multiply)(const T *u, const T *v, int64_t channels, T *m);

#define MULTIPLY(height, vectors)                                                                                      \
    static void multiply_##height##x##vectors(const T *u, const T *v, int64_t channels, T *m) {                        \
        multiply(u, v, channels, m, height, vectors);                                                                  \
    }
#define MULTIPLIES(height) MULTIPLY(height, 1) MULTIPLY(height, 2)
#define PAIR(height) {multiply_##height##x1, multiply_##height##x2}
MULTIPLIES(1) MULTIPLIES(2) MULTIPLIES(3) MULTIPLIES(4) MULTIPLIES(5) MULTIPLIES(6)
#if VECTOR_REGISTERS == 32
MULTIPLIES(7) MULTIPLIES(8) MULTIPLIES(9) MULTIPLIES(10) MULTIPLIES(11) MULTIPLIES(12) MULTIPLIES(13) MULTIPLIES(14)
#endif

/* By height less one and vectors less one. */
static const Multiply MULTIPLY_BY_SIZE[MAX_CHANNELS][2] = {
    PAIR(1), PAIR(2), PAIR(3), PAIR(4),  PAIR(5),  PAIR(6),
#if VECTOR_REGISTERS == 32
    PAIR(7), PAIR(8), PAIR(9), PAIR(10), PAIR(11), PAIR(12), PAIR(13), PAIR(14),
#endif
};

/* Interleaves `size` vectors and stores the first `count` <= size * LANES elements. */
SPECIALISED void store_in_turn(T *y, const Vector *of, int64_t count, const int size) {
    Vector row[MAX_SIZE];
    if (size == 2) {
        row[0] = INTERLEAVE_FIRST(of[0], of[1]), row[1] = INTERLEAVE_SECOND(of[0], of[1]);
    } else {
        const Vector even[] = {INTERLEAVE_FIRST(of[0], of[2]), INTERLEAVE_SECOND(of[0], of[2])};
        const Vector odd[] = {INTERLEAVE_FIRST(of[1], of[3]), INTERLEAVE_SECOND(of[1], of[3])};
        row[0] = INTERLEAVE_FIRST(even[0], odd[0]), row[1] = INTERLEAVE_SECOND(even[0], odd[0]);
        row[2] = INTERLEAVE_FIRST(even[1], odd[1]), row[3] = INTERLEAVE_SECOND(even[1], odd[1]);
    }
    UNROLL for (int i = 0; i < size; i++)
        if (count >= (i + 1) * LANES) store(y + i * LANES, row[i]);
    if (count % LANES == 0) return;
    T numbers[MAX_SIZE * LANES];
    UNROLL for (int i = 0; i < size; i++) store(numbers + i * LANES, row[i]);
    if (count > LANES)
        store(y + count - LANES, load(numbers + count - LANES)); /* overlaps the vector before */
    else
        for (int64_t i = 0; i < count; i++) y[i] = numbers[i];
}

/* The outputs of a row of tiles, up to `rows` and `columns` of them, from their products m[k step + i]. */
SPECIALISED void store_outputs(const T *m, int64_t step, T *y, int64_t width, int64_t rows, int64_t columns,
                               const int size) {
    Vector transformed[MAX_SIZE][MAX_SPAN];
    UNROLL for (int j = 0; j < size + 2; j++) {
        Vector column[MAX_SPAN], outputs[MAX_SIZE];
        UNROLL for (int i = 0; i < size + 2; i++) column[i] = load(m + (i * (size + 2) + j) * step);
        transform_products(column, outputs, size);
        UNROLL for (int i = 0; i < size; i++) transformed[i][j] = outputs[i];
    }
    UNROLL for (int i = 0; i < size; i++) {
        Vector outputs[MAX_SIZE];
        if (i >= rows) return;
        transform_products(transformed[i], outputs, size);
        store_in_turn(y + i * width, outputs, columns, size);
    }
}

SPECIALISED void convolve(const T *x, T *y, const Layer *l, char *scratch, const T *weights, const int size) {
    const int64_t tile_rows = ceil_divide(l->out_height, size), tile_columns = ceil_divide(l->out_width, size);
    const int64_t tiles = tile_rows * tile_columns, positions = (size + 2) * (size + 2);
    const int64_t rows = size * tile_rows + 2, pitch = ceil_divide(tile_columns + 1, LANES) * LANES;
    /* A vector may be stored past the last tile, into the next channel, which is computed later, and past the last
       channel. */
    const int64_t in = l->channels, v_step = in * TILES + LANES, m_step = MAX_CHANNELS * TILES + LANES;
    const int64_t blocks = ceil_divide(l->out_channels, MAX_CHANNELS);
    T *v = take_bytes(&scratch, positions * v_step * sizeof(T));
    T *m = take_bytes(&scratch, positions * m_step * sizeof(T));
    T *line = take_bytes(&scratch, size * pitch * sizeof(T)), *image = (T *)scratch;
    split_columns(x, l, rows, pitch, line, image, size);

    for (int64_t first_tile = 0; first_tile < tiles; first_tile += TILES) {
        RowOfTiles rows_of_tiles[TILES];
        const int64_t count = min_i64(TILES, tiles - first_tile);
        const int64_t row_count = divide_into_rows(first_tile, count, tile_columns, rows_of_tiles);
        for (int64_t c = 0; c < in; c++)
            for (const RowOfTiles *p = rows_of_tiles; p < rows_of_tiles + row_count; p++) {
                const T *patches = image + (c * rows + size * p->row) * size * pitch + p->column;
                transform_patches(patches, pitch, v + c * TILES + p->tile, v_step, size);
            }
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = l->out_channels * block / blocks;
            const int64_t height = l->out_channels * (block + 1) / blocks - first;
            const Multiply product = MULTIPLY_BY_SIZE[height - 1][count > LANES];
            for (int64_t k = 0; k < positions; k++)
                product(weights + (positions * first + k * height) * in, v + k * v_step, in, m + k * m_step);
            for (int64_t i = 0; i < height; i++)
                for (const RowOfTiles *p = rows_of_tiles; p < rows_of_tiles + row_count; p++) {
                    const int64_t row = size * p->row, column = size * p->column;
                    store_outputs(m + i * TILES + p->tile, m_step,
                                  y + ((first + i) * l->out_height + row) * l->out_width + column, l->out_width,
                                  l->out_height - row, min_i64(size * p->count, l->out_width - column), size);
                }
        }
    }
}

/* `size` is 2 or 4. */
static void pack_by_size(const T *w, int64_t out, int64_t in, int64_t w_out, int64_t w_in, bool flipped, T *to,
                         int64_t size) {
    if (size == 2)
        pack(w, out, in, w_out, w_in, flipped, to, 2);
    else
        pack(w, out, in, w_out, w_in, flipped, to, 4);
}

static void convolve_by_size(const T *x, T *y, const Layer *l, char *scratch, const T *weights, int64_t size) {
    if (size == 2)
        convolve(x, y, l, scratch, weights, 2);
    else
        convolve(x, y, l, scratch, weights, 4);
}

void FN(conv2d_winograd_prepare)(const T *w, CONV_NUMBERS, int64_t size, char *prepared) {
    const Conv v = CONV;
    pack_by_size(w, v.out_channels, v.channels, v.channels * 9, 9, false, (T *)prepared, size);
}

void FN(conv2d_winograd)(const T *x, const T *w, T *y, CONV_NUMBERS, int64_t size, char *scratch, char *prepared) {
    const Conv v = CONV;
    const Layer layer = {v.channels,     v.height,     v.width,     v.padding_y, v.padding_x,
                         v.out_channels, v.out_height, v.out_width};
    convolve_by_size(x, y, &layer, scratch, (T *)prepared, size);
}

/* The gradient of the image is a convolution of the output's gradient, padded by 2 minus the padding, with the kernels
   flipped. */
void FN(conv2d_input_grad_winograd_prepare)(const T *w, CONV_NUMBERS, int64_t size, char *prepared) {
    const Conv v = CONV;
    pack_by_size(w, v.channels, v.out_channels, 9, v.channels * 9, true, (T *)prepared, size);
}

void FN(conv2d_input_grad_winograd)(const T *g, const T *w, T *dx, CONV_NUMBERS, int64_t size, char *scratch,
                                    char *prepared) {
    const Conv v = CONV;
    const Layer layer = {v.out_channels, v.out_height, v.out_width, 2 - v.padding_y, 2 - v.padding_x,
                         v.channels,     v.height,     v.width};
    convolve_by_size(g, dx, &layer, scratch, (T *)prepared, size);
}
