/* Gradient of a convolution with respect to its weights: adds one image's contribution.

     dw[o, k] += sum over output pixels p of g[o, p] * x[input of p under tap k],   taps k = (c, i, j)

   is a matrix product whose inner axis is the pixels. The output channels are the vector axis: g is transposed into
   panels [pixel][channel]. A tile of some taps x one or two vectors of channels reads one element of the image per
   pixel and tap, at any stride and dilation, so that vectors are full for every length of rows.

   Groups of few output channels, as in a depthwise convolution, would leave most lanes empty. Then the pixels of a row
   are the vector axis, and the image is split into planes without strides (split_image). In a depthwise convolution of
   many channels these are the vector axis of image and gradient, channels last, a vector of channels at a time. */

#include "channels_last.h"

/* Sums, two vectors of g and an element of the image fill the registers. */
enum {
    MAX_TAPS = VECTOR_REGISTERS / 2 - 2,
    ROW_TAPS = VECTOR_REGISTERS == 32 ? 12 : 6, /* maximum of taps of a tile where pixels are the vector axis */
    FEW_CHANNELS = 4 /* for groups of fewer output channels, pixels are the vector axis */
};

/* For each tap t and channel o, adds the sum over pixels (r, c) of x[offsets[t] + r row_step + c step] times its
   gradient to dw[o dw_pitch + t]. dw ends at `end`. The gradients of a pixel are the next `vectors` vectors of g. */
SPECIALISED void tile(const T *x, const int32_t *offsets, int64_t row_step, int64_t step, int64_t rows, int64_t columns,
                      const T *g, T *dw, const T *end, int64_t channels, int64_t dw_pitch, const int taps,
                      const int vectors) {
    Vector sums[2 * MAX_TAPS][2];
    const T *inputs[2 * MAX_TAPS];
    UNROLL for (int t = 0; t < taps; t++) {
        inputs[t] = x + offsets[t];
        UNROLL for (int v = 0; v < vectors; v++) sums[t][v] = (Vector){0};
    }
    for (int64_t row = 0; row < rows; row++) {
        const int64_t begin = row * row_step, row_end = begin + columns * step;
#pragma GCC unroll 1
        for (int64_t p = begin; p < row_end; p += step) {
            Vector gradient[2];
            UNROLL for (int v = 0; v < vectors; v++) gradient[v] = *(const Vector *)(g + v * LANES);
            g += vectors * LANES;
            UNROLL for (int t = 0; t < taps; t++)
                UNROLL for (int v = 0; v < vectors; v++) sums[t][v] += inputs[t][p] * gradient[v];
        }
    }
    UNROLL for (int v = 0; v < vectors; v++)
        UNROLL for (int first = 0; first < taps; first += LANES) {
            Vector square[LANES];
            UNROLL for (int t = 0; t < LANES; t++) square[t] = first + t < taps ? sums[first + t][v] : (Vector){0};
            shuffle(square, LANES);
            for (int64_t o = 0; o < min_i64(LANES, channels - v * LANES); o++) {
                T *to = dw + (v * LANES + o) * dw_pitch + first;
                if (to + LANES <= end) /* the taps after these get zeros added */
                    store(to, load(to) + square[o]);
                else
                    for (int t = 0; t < min_i64(LANES, taps - first); t++) to[t] += square[o][t];
            }
        }
}

typedef void (*Tile)(const T *x, const int32_t *offsets, int64_t row_step, int64_t step, int64_t rows, int64_t columns,
                     const T *g, T *dw, const T *end, int64_t channels, int64_t dw_pitch);

#define TILE(taps, vectors)                                                                                            \
    static void tile_##taps##_##vectors(const T *x, const int32_t *offsets, int64_t row_step, int64_t step,            \
                                        int64_t rows, int64_t columns, const T *g, T *dw, const T *end,                \
                                        int64_t channels, int64_t dw_pitch) {                                          \
        tile(x, offsets, row_step, step, rows, columns, g, dw, end, channels, dw_pitch, taps, vectors);                \
    }
#define TILES_OF(taps) TILE(taps, 1) TILE(taps, 2)
TILES_OF(1)
TILES_OF(2)
TILES_OF(3)
TILES_OF(4)
TILES_OF(5)
TILES_OF(6)
TILE(7, 1)
TILE(8, 1)
TILE(9, 1)
TILE(10, 1)
TILE(11, 1)
TILE(12, 1)
static const Tile NARROW[] = {
    0,        tile_1_1, tile_2_1, tile_3_1,  tile_4_1,  tile_5_1, tile_6_1,
    tile_7_1, tile_8_1, tile_9_1, tile_10_1, tile_11_1, tile_12_1,
};
#if VECTOR_REGISTERS == 32
TILE(7, 2)
TILE(8, 2)
TILE(9, 2)
TILE(10, 2)
TILE(11, 2)
TILE(12, 2)
#endif
static const Tile WIDE[] = {
    0,        tile_1_2, tile_2_2, tile_3_2,  tile_4_2,  tile_5_2, tile_6_2,
#if VECTOR_REGISTERS == 32
    tile_7_2, tile_8_2, tile_9_2, tile_10_2, tile_11_2, tile_12_2,
#endif
};

/* For each tap t: dw[t] += the sum over pixels of x[offsets[t] + row pitch + column] g[row][column]. Rows of g have
   `strips` vectors, whose lanes from the end of a row on are zeros; x is not used there. */
SPECIALISED void row_tile(const T *x, const int32_t *offsets, int64_t pitch, int64_t rows, int64_t columns, const T *g,
                          T *dw, const int taps) {
    const int64_t strips = ceil_div(columns, LANES);
    Vector sums[ROW_TAPS];
    UNROLL for (int t = 0; t < taps; t++) sums[t] = (Vector){0};
    for (int64_t strip = 0; strip < strips; strip++) {
        Lanes inside;
        for (int lane = 0; lane < LANES; lane++) inside[lane] = strip * LANES + lane < columns ? ~(Bits)0 : 0;
        for (int64_t row = 0; row < rows; row++) {
            const T *input = x + row * pitch + strip * LANES;
            const Vector gradient = load(g + (row * strips + strip) * LANES);
            UNROLL for (int t = 0; t < taps; t++)
                sums[t] += (Vector)((Lanes)load(input + offsets[t]) & inside) * gradient;
        }
    }
    UNROLL for (int t = 0; t < taps; t++) {
        T lanes[LANES], sum = 0;
        store(lanes, sums[t]);
        for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
        dw[t] += sum;
    }
}

static void any_row_tile(const T *x, const int32_t *offsets, int64_t pitch, int64_t rows, int64_t columns, const T *g,
                         T *dw, int64_t taps) {
#define ROW_TILE(n)                                                \
    case n:                                                        \
        row_tile(x, offsets, pitch, rows, columns, g, dw, n);      \
        break;
    switch (taps) {
        ROW_TILE(1) ROW_TILE(2) ROW_TILE(3) ROW_TILE(4) ROW_TILE(5) ROW_TILE(6)
#if VECTOR_REGISTERS == 32
        ROW_TILE(7) ROW_TILE(8) ROW_TILE(9) ROW_TILE(10) ROW_TILE(11) ROW_TILE(12)
#endif
    }
}

/* For each tap t and channel: dw[channel kernel + t] += the sum over pixels (r, c) of
   x[offsets[t] + r row_step + c step] times the channel's gradient. */
SPECIALISED void depthwise_tile(const T *x, const int32_t *offsets, int64_t row_step, int64_t step, int64_t rows,
                                int64_t columns, const T *g, T *dw, int64_t channels, int64_t kernel, const int taps) {
    Vector sums[ROW_TAPS];
    const T *inputs[ROW_TAPS];
    UNROLL for (int t = 0; t < taps; t++) inputs[t] = x + offsets[t], sums[t] = (Vector){0};
    for (int64_t row = 0; row < rows; row++)
        for (int64_t p = row * row_step, end = p + columns * step; p < end; p += step, g += LANES) {
            const Vector gradient = load(g);
            UNROLL for (int t = 0; t < taps; t++) sums[t] += load(inputs[t] + p) * gradient;
        }
    UNROLL for (int t = 0; t < taps; t++)
        for (int64_t channel = 0; channel < channels; channel++) dw[channel * kernel + t] += sums[t][channel];
}

/* The gradient of a depthwise convolution. */
static void weight_grad_depthwise(const Conv *v, const T *x, const T *g, T *dw, char *scratch) {
    const int64_t kernel = v->kernel_height * v->kernel_width, pixels = v->out_height * v->out_width;
    const int64_t rows = v->height + 2 * v->padding_y, pitch = v->width + 2 * v->padding_x;
    int32_t *offsets = take_bytes(&scratch, kernel * sizeof(int32_t));
    T *gradient = take_bytes(&scratch, pixels * LANES * sizeof(T)), *image = (T *)scratch;
    for (int64_t k = 0; k < kernel; k++)
        offsets[k] = (k / v->kernel_width * v->dilation_y * pitch + k % v->kernel_width * v->dilation_x) * LANES;
    const int64_t blocks = ceil_div(kernel, ROW_TAPS);
    for (int64_t first = 0; first < v->channels; first += LANES) {
        const int64_t channels = min_i64(LANES, v->channels - first);
        to_channels_last(x + first * v->height * v->width, channels, v->height, v->width, v->padding_y, v->padding_x,
                         image, rows, pitch, LANES, NULL);
        to_channels_last(g + first * pixels, channels, v->out_height, v->out_width, 0, 0, gradient, v->out_height,
                         v->out_width, LANES, NULL);
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t k = kernel * block / blocks, taps = kernel * (block + 1) / blocks - k;
#define DEPTHWISE_TILE(n)                                                                                          \
    case n:                                                                                                        \
        depthwise_tile(image, offsets + k, v->stride_y * pitch * LANES, v->stride_x * LANES, v->out_height,        \
                       v->out_width, gradient, dw + first * kernel + k, channels, kernel, n);                      \
        break;
            switch (taps) {
                DEPTHWISE_TILE(1) DEPTHWISE_TILE(2) DEPTHWISE_TILE(3) DEPTHWISE_TILE(4) DEPTHWISE_TILE(5)
                DEPTHWISE_TILE(6)
#if VECTOR_REGISTERS == 32
                DEPTHWISE_TILE(7) DEPTHWISE_TILE(8) DEPTHWISE_TILE(9) DEPTHWISE_TILE(10) DEPTHWISE_TILE(11)
                DEPTHWISE_TILE(12)
#endif
            }
        }
    }
}

/* The gradient where groups have few output channels. */
static void weight_grad_of_few(const Conv *v, const T *x, const T *g, T *dw, char *scratch) {
    const int64_t in = v->channels / v->groups, out = v->out_channels / v->groups, phases = v->stride_y * v->stride_x;
    const int64_t kernel = v->kernel_height * v->kernel_width, taps = in * kernel;
    const int64_t rows = v->out_height + (v->kernel_height - 1) * v->dilation_y / v->stride_y;
    const int64_t pitch = v->out_width + (v->kernel_width - 1) * v->dilation_x / v->stride_x;
    const int64_t pixels = v->out_height * v->out_width, wide = ceil_div(v->out_width, LANES) * LANES;
    int32_t *offsets = take_bytes(&scratch, taps * sizeof(int32_t));
    T *panel = take_bytes(&scratch, v->out_height * wide * sizeof(T)), *planes = (T *)scratch;
    split_image(x, v->channels, v->height, v->width, v->padding_y, v->padding_x, v->stride_y, v->stride_x, planes, rows,
                pitch);
    for (int64_t k = 0; k < taps; k++) {
        const int64_t i = k % kernel / v->kernel_width * v->dilation_y, j = k % v->kernel_width * v->dilation_x;
        const int64_t phase = i % v->stride_y * v->stride_x + j % v->stride_x;
        offsets[k] = ((k / kernel * phases + phase) * rows + i / v->stride_y) * pitch + j / v->stride_x;
    }
    memset(panel, 0, v->out_height * wide * sizeof(T));
    for (int64_t o = 0; o < v->out_channels; o++, g += pixels, dw += taps) {
        for (int64_t row = 0; row < v->out_height; row++)
            memcpy(panel + row * wide, g + row * v->out_width, v->out_width * sizeof(T));
        const int64_t blocks = ceil_div(taps, ROW_TAPS);
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t k = taps * block / blocks, count = taps * (block + 1) / blocks - k;
            any_row_tile(planes + o / out * in * phases * rows * pitch, offsets + k, pitch, v->out_height, v->out_width,
                         panel, dw + k, count);
        }
    }
}

void FN(conv2d_weight_grad)(const T *x, const T *g, T *dw, CONV_NUMBERS, char *scratch) {
    const Conv v = CONV;
    const int64_t in = v.channels / v.groups, out = v.out_channels / v.groups;
    if (in == 1 && out == 1 && v.groups >= MIN_DEPTHWISE) {
        weight_grad_depthwise(&v, x, g, dw, scratch);
        return;
    }
    if (out < FEW_CHANNELS) {
        weight_grad_of_few(&v, x, g, dw, scratch);
        return;
    }
    const int64_t kernel = v.kernel_height * v.kernel_width, taps = in * kernel, pixels = v.out_height * v.out_width;
    const int64_t rows = v.height + 2 * v.padding_y, pitch = v.width + 2 * v.padding_x;
    int32_t *offsets = take_bytes(&scratch, taps * sizeof(int32_t));
    T *panel = take_bytes(&scratch, 2 * LANES * pixels * sizeof(T));
    T *padded = (T *)scratch;

    const bool in_place = v.padding_y == 0 && v.padding_x == 0;
    if (!in_place)
        split_image(x, v.channels, v.height, v.width, v.padding_y, v.padding_x, 1, 1, padded, rows, pitch);
    const T *image = in_place ? x : padded;
    for (int64_t k = 0; k < taps; k++)
        offsets[k] = (k / kernel * rows + k % kernel / v.kernel_width * v.dilation_y) * pitch +
                     k % v.kernel_width * v.dilation_x;

    for (int64_t group = 0; group < v.groups; group++)
        for (int64_t o = 0, width; o < out; o += width * LANES) {
            width = out - o > LANES ? 2 : 1; /* vectors of the panel */
            const int64_t first = group * out + o;
            for (int64_t i = 0; i < width; i++)
                transpose(g + (first + i * LANES) * pixels, min_i64(LANES, out - o - i * LANES), pixels, pixels,
                          panel + i * LANES, width * LANES, LANES);
            const int64_t most = width == 2 ? sizeof(WIDE) / sizeof(Tile) - 1 : sizeof(NARROW) / sizeof(Tile) - 1;
            const int64_t blocks = ceil_div(taps, most);
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t k = taps * block / blocks, height = taps * (block + 1) / blocks - k;
                (width == 2 ? WIDE : NARROW)[height](
                    image + group * in * rows * pitch, offsets + k, v.stride_y * pitch, v.stride_x, v.out_height,
                    v.out_width, panel, dw + first * taps + k, dw + v.out_channels * taps, min_i64(width * LANES, out - o), taps);
            }
        }
}

/* The gradient of one image, in place of adding it. */
void FN(conv2d_weight_grad_by_image)(const T *x, const T *g, T *dw, CONV_NUMBERS, char *scratch) {
    const Conv v = CONV;
    memset(dw, 0, v.out_channels * (v.channels / v.groups) * v.kernel_height * v.kernel_width * sizeof(T));
    FN(conv2d_weight_grad)(x, g, dw, CONV_ARGUMENTS, scratch);
}
