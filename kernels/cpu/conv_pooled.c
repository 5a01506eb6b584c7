/* Gradients of a convolution that max pooling follows: one image.

   The gradient of the convolution's output has at most one nonzero element per pooling window. Only products of
   these elements are computed. With the channels of a pixel contiguous in memory (NHWC), kernel row i at an output
   pixel is a run of kernel_width * channels consecutive elements, of the image and of the weights in the same order:

     weight gradient   for each output channel:  sum over its nonzero elements of g * run of the image
     input gradient    for each window and position in it:  sum over the output channels that are nonzero there of
                       g * run of the weights, added to the run of the input gradient

   Both are sums of scaled runs whose indices are in a list. The sums stay in registers. */

#include "conv.h"

/* Sums in registers, which leave some for a factor and an input; bytes of weights that are reread: most of L1. */
enum { MAX_SUMS = VECTOR_REGISTERS - VECTOR_REGISTERS / 8 - 2, CACHED_BYTES = 24 << 10 };

/* One nonzero element of the gradient, and the index of the run that it multiplies. */
typedef struct {
    int32_t place;
    T factor;
} Live;

/* out[r out_step + i] += sum over the list of factor * numbers[place + r step + i], for i < width * LANES. */
SPECIALISED void sum_runs(const T *numbers, const Live *live, int64_t count, int64_t step, T *out, int64_t out_step,
                          const int rows, const int width) {
    Vector sums[MAX_SUMS];
    UNROLL for (int i = 0; i < rows * width; i++) sums[i] = (Vector){0};
#pragma GCC unroll 1
    for (const Live *end = live + count; live < end; live++) {
        const T *run = numbers + live->place;
        UNROLL for (int r = 0; r < rows; r++, run += step)
            UNROLL for (int i = 0; i < width; i++) sums[r * width + i] += live->factor * load(run + i * LANES);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < width; i++) {
            T *to = out + r * out_step + i * LANES;
            store(to, load(to) + sums[r * width + i]);
        }
}

typedef void (*Sum)(const T *numbers, const Live *live, int64_t count, int64_t step, T *out, int64_t out_step);

#define SUM(rows, width)                                                                                               \
    static void sum_##rows##x##width(const T *numbers, const Live *live, int64_t count, int64_t step, T *out,          \
                                     int64_t out_step) {                                                               \
        sum_runs(numbers, live, count, step, out, out_step, rows, width);                                              \
    }
SUM(1, 1) SUM(1, 2) SUM(1, 3) SUM(1, 4) SUM(1, 5) SUM(1, 6) SUM(1, 7) SUM(1, 8) SUM(1, 9) SUM(1, 10) SUM(1, 11)
SUM(1, 12) SUM(2, 1) SUM(2, 2) SUM(2, 3) SUM(2, 4) SUM(2, 5) SUM(2, 6) SUM(3, 1) SUM(3, 2) SUM(3, 3) SUM(3, 4)
SUM(5, 1) SUM(5, 2)
#if VECTOR_REGISTERS == 32
SUM(3, 5) SUM(3, 6) SUM(3, 7) SUM(3, 8) SUM(5, 3) SUM(5, 4)
#endif

/* By rows - 1, and width. */
static const Sum SUMS[5][13] = {
    {0, sum_1x1, sum_1x2, sum_1x3, sum_1x4, sum_1x5, sum_1x6, sum_1x7, sum_1x8, sum_1x9, sum_1x10, sum_1x11, sum_1x12},
    {0, sum_2x1, sum_2x2, sum_2x3, sum_2x4, sum_2x5, sum_2x6},
#if VECTOR_REGISTERS == 32
    {0, sum_3x1, sum_3x2, sum_3x3, sum_3x4, sum_3x5, sum_3x6, sum_3x7, sum_3x8},
    {0},
    {0, sum_5x1, sum_5x2, sum_5x3, sum_5x4},
#else
    {0, sum_3x1, sum_3x2, sum_3x3, sum_3x4},
    {0},
    {0, sum_5x1, sum_5x2},
#endif
};

/* Part of the kernel: rows [row, row + rows) and vectors [first, first + width) of their runs. */
typedef struct {
    int64_t row, rows, first, width;
} Part;

/* The part after `part` of a kernel of `rows` rows of `vectors` vectors: the largest that SUMS has a function for, in
   equal widths. Returns false after the last one. */
static bool next_part(Part *part, int64_t rows, int64_t vectors, int64_t max_rows) {
    const int64_t blocks = ceil_div(vectors, 12);
    part->first += part->width;
    if (part->first == vectors) part->first = 0, part->row += part->rows;
    if (part->row == rows) return false;
    const int64_t block = part->first * blocks / vectors;
    part->width = ceil_div(vectors * (block + 1), blocks) - part->first;
    if (part->first == 0) {
        part->rows = min_i64(5, min_i64(rows - part->row, max_rows));
        while (!SUMS[part->rows - 1][ceil_div(vectors, blocks)]) part->rows--;
    }
    return true;
}

/* 1 for a number other than 0 and -0, without a branch, which would be unpredictable. */
static inline int64_t is_live(T number) {
    Bits bits;
    memcpy(&bits, &number, sizeof bits);
    return bits << 1 != 0;
}

/* `strip`: rows of windows that are computed together, so few that the image's rows under them stay in the L1 cache. */
#define POOLED_NUMBERS                                                                                                 \
    int64_t pooled_height, int64_t pooled_width, int64_t pool_height, int64_t pool_width, int64_t pool_stride_y,       \
        int64_t pool_stride_x, int64_t strip
#define POOLED_ARGUMENTS pooled_height, pooled_width, pool_height, pool_width, pool_stride_y, pool_stride_x, strip

void FN(conv2d_weight_grad_pooled)(const T *x, const T *g, const int32_t *where, T *dw, CONV_NUMBERS,
                                   POOLED_NUMBERS, char *scratch) {
    const Conv v = CONV;
    const int64_t rows = v.height + 2 * v.padding_y, pitch = (v.width + 2 * v.padding_x) * v.channels;
    const int64_t kernel = v.kernel_height * v.kernel_width, windows = pooled_height * pooled_width;
    const int64_t area = pool_height * pool_width, out = v.out_channels;
    const int64_t length = v.kernel_width * v.channels, vectors = ceil_div(length, LANES), run = vectors * LANES;
    int32_t *within = take_bytes(&scratch, area * sizeof(int32_t));
    int32_t *counts = take_bytes(&scratch, out * sizeof(int32_t));
    Live *live = take_bytes(&scratch, (out * strip * pooled_width + 1) * sizeof(Live));
    T *sums = take_bytes(&scratch, out * v.kernel_height * run * sizeof(T));
    T *added = take_bytes(&scratch, (v.channels * kernel + LANES) * sizeof(T)), *image = (T *)scratch;

    if (v.padding_y || v.padding_x) {
        memset(image, 0, rows * pitch * sizeof(T));
        for (int64_t r = 0; r < v.height; r++)
            transpose(x + r * v.width, v.channels, v.width, v.height * v.width,
                      image + (r + v.padding_y) * pitch + v.padding_x * v.channels, v.channels, v.channels);
    } else {
        transpose(x, v.channels, v.height * v.width, v.height * v.width, image, v.channels, max_i64(v.channels, LANES));
    }
    for (int64_t i = 0; i < area; i++) within[i] = i / pool_width * pitch + i % pool_width * v.channels;
    memset(sums, 0, out * v.kernel_height * run * sizeof(T));

    for (int64_t top = 0; top < pooled_height; top += strip) {
        const int64_t bottom = min_i64(top + strip, pooled_height), most = (bottom - top) * pooled_width;
        for (int64_t o = 0; o < out; o++) {
            int64_t count = 0, window = o * windows + top * pooled_width;
            Live *list = live + o * most;
            for (int64_t row = top; row < bottom; row++)
                for (int64_t column = 0; column < pooled_width; column++, window++) {
                    const int32_t place = row * pool_stride_y * pitch + column * pool_stride_x * v.channels;
                    list[count] = (Live){place + within[where[window]], g[window]};
                    count += is_live(g[window]);
                }
            counts[o] = count;
        }
        Part part = {0};
        while (next_part(&part, v.kernel_height, vectors, 5))
            for (int64_t o = 0; o < out; o++)
                SUMS[part.rows - 1][part.width](
                    image + part.row * pitch + part.first * LANES, live + o * most, counts[o], pitch,
                    sums + (o * v.kernel_height + part.row) * run + part.first * LANES, run);
    }

    for (int64_t o = 0; o < out; o++, dw += v.channels * kernel) {
        /* The runs of a channel, made contiguous, are a matrix [kernel position][channel]. */
        T *from = sums + o * v.kernel_height * run;
        for (int64_t i = 1; i < v.kernel_height && length < run; i++)
            memmove(from + i * length, from + i * run, length * sizeof(T));
        transpose(from, kernel, v.channels, v.channels, added, kernel, max_i64(kernel, LANES));
        for (int64_t k = 0; k < v.channels * kernel; k++) dw[k] += added[k];
    }
}

/* The gradient of one image, in place of adding it. */
void FN(conv2d_weight_grad_by_image_pooled)(const T *x, const T *g, const int32_t *where, T *dw, CONV_NUMBERS,
                                            POOLED_NUMBERS, char *scratch) {
    memset(dw, 0, out_channels * channels * kernel_height * kernel_width * sizeof(T));
    FN(conv2d_weight_grad_pooled)(x, g, where, dw, CONV_ARGUMENTS, POOLED_ARGUMENTS, scratch);
}

/* The weights as runs, one per kernel row of each output channel, padded with zeros so that whole vectors can be added
   to the image's gradient. */
void FN(conv2d_input_grad_pooled_prepare)(const T *w, CONV_NUMBERS, POOLED_NUMBERS, char *prepared) {
    const Conv v = CONV;
    const int64_t kernel = v.kernel_height * v.kernel_width, length = v.kernel_width * v.channels;
    const int64_t run = ceil_div(length, LANES) * LANES;
    T *weights = (T *)prepared;
    memset(weights, 0, v.out_channels * v.kernel_height * run * sizeof(T));
    for (int64_t o = 0; o < v.out_channels; o++, w += v.channels * kernel)
        for (int64_t i = 0; i < v.kernel_height; i++, weights += run)
            for (int64_t j = 0; j < v.kernel_width; j++)
                for (int64_t c = 0; c < v.channels; c++)
                    weights[j * v.channels + c] = w[c * kernel + i * v.kernel_width + j];
}

void FN(conv2d_input_grad_pooled)(const T *g, const int32_t *where, const T *w, T *dx, CONV_NUMBERS,
                                   POOLED_NUMBERS, char *scratch, char *prepared) {
    const Conv v = CONV;
    const int64_t rows = v.height + 2 * v.padding_y, pitch = (v.width + 2 * v.padding_x) * v.channels;
    const int64_t windows = pooled_height * pooled_width, area = pool_height * pool_width, out = v.out_channels;
    const int64_t vectors = ceil_div(v.kernel_width * v.channels, LANES), run = vectors * LANES;
    const T *weights = (const T *)prepared;
    int32_t *counts = take_bytes(&scratch, windows * area * sizeof(int32_t));
    Live *live = take_bytes(&scratch, (strip * pooled_width * area * out + 1) * sizeof(Live));
    T *image = (T *)scratch;

    memset(image, 0, (rows * pitch + LANES) * sizeof(T));
    memset(counts, 0, windows * area * sizeof(int32_t));

    const int64_t max_rows = max_i64(1, CACHED_BYTES / max_i64(1, out * run * sizeof(T)));
    for (int64_t top = 0; top < pooled_height; top += strip) {
        /* For each window of the strip and each position, the output channels that are nonzero there. */
        const int64_t begin = top * pooled_width, end = min_i64(top + strip, pooled_height) * pooled_width;
        for (int64_t o = 0; o < out; o++)
            for (int64_t window = begin; window < end; window++) {
                const int64_t position = where[o * windows + window];
                const T factor = g[o * windows + window];
                int32_t *count = &counts[window * area + position];
                live[((window - begin) * area + position) * out + *count] = (Live){o * v.kernel_height * run, factor};
                *count += is_live(factor);
            }
        /* One part of the kernel after another, each so small that its weights stay in the L1 cache. */
        Part part = {0};
        while (next_part(&part, v.kernel_height, vectors, max_rows)) {
            const Sum sum = SUMS[part.rows - 1][part.width];
            const T *part_weights = weights + part.row * run + part.first * LANES;
            T *part_image = image + part.row * pitch + part.first * LANES;
            for (int64_t window = begin; window < end; window++)
                for (int64_t position = 0; position < area; position++) {
                    const int64_t y = window / pooled_width * pool_stride_y + position / pool_width;
                    const int64_t x = window % pooled_width * pool_stride_x + position % pool_width;
                    sum(part_weights, live + ((window - begin) * area + position) * out,
                        counts[window * area + position], run, part_image + y * pitch + x * v.channels, pitch);
                }
        }
    }
    for (int64_t r = 0; r < v.height; r++)
        transpose(image + (r + v.padding_y) * pitch + v.padding_x * v.channels, v.width, v.channels, v.channels,
                  dx + r * v.width, v.height * v.width, v.width);
}
