/* Convolution of one image, and its gradient with respect to the image, with channels as the vector axis.

   The image is transposed to channels last. A row of the kernel then reads contiguous numbers, the channels of
   neighbouring pixels. So the outputs of a row are sums of matrix products: pixels x (kernel columns and channels) times
   (kernel columns and channels) x out channels, by the tiles of tile.h. Vectors are full for every stride and size
   of the image.

   A depthwise convolution has a group for each channel. Its outputs are sums of products of vectors, the same channels
   of images and weights. A block of channels that fill a vector is transposed and computed at a time, so that it stays
   in the cache.

   The input gradient of a convolution with stride s has s x s phases: elements of the image whose row and column have
   the same remainders. Each phase is a convolution, with stride 1, of the gradient of the output with every s-th row and
   column of the flipped kernel. */

#include "channels_last.h"
#include "tile.h"

enum { COLUMNS = VECTOR_REGISTERS / 4 }; /* maximum outputs of a tile of a depthwise convolution */

static bool is_depthwise(const Conv *v) { return v->groups > 1; }

/* Input and output channels of a block: those of a vector, or all. */
static int64_t block_in(const Conv *v) { return is_depthwise(v) ? LANES : v->channels; }
static int64_t block_out(const Conv *v) { return is_depthwise(v) ? LANES : v->out_channels; }
static int64_t block_count(const Conv *v) { return ceil_div(v->channels, block_in(v)); }

/* The `step` of channels_last.h: contiguous pixels if they have one vector or less, else whole vectors. */
static int64_t pixel_step(int64_t channels) { return channels <= LANES ? channels : whole_vectors(channels); }

/* Output (r, c) is at r * y_row + c * y_column. Its first input is at r * x_row + c * x_column. Kernel row i and column
   j read the input i * x_pitch + j * x_step numbers after that. */
typedef struct {
    int64_t rows, columns, kernel_rows, kernel_columns, channels, out;
    int64_t x_row, x_column, x_pitch, x_step, y_row, y_column;
} Correlation;

/* y = the correlation of x with the weights, panels [panel][kernel row][kernel column][channel][out channel]. */
static void correlate(const Correlation *p, const T *x, const T *w, T *y) {
    const bool contiguous = p->x_step == p->channels;
    const int64_t runs = contiguous ? 1 : p->kernel_columns;
    const int64_t depth = contiguous ? p->channels * p->kernel_columns : p->channels;
    const int64_t strips = ceil_div(p->columns, TILE_ROWS);
    for (int64_t o = 0; o < p->out; o += TILE_COLUMNS)
        for (int64_t r = 0; r < p->rows; r++)
            for (int64_t t = 0; t < strips; t++) {
                const int64_t c = part_begin(p->columns, strips, t), count = part_begin(p->columns, strips, t + 1) - c;
                const T *from = x + r * p->x_row + c * p->x_column;
                const T *panel = w + o * p->kernel_rows * p->kernel_columns * p->channels;
                for (int64_t i = 0; i < p->kernel_rows; i++)
                    for (int64_t j = 0; j < runs; j++, panel += depth * TILE_COLUMNS)
                        any_tile(count, min_i64(TILE_COLUMNS, whole_vectors(p->out) - o), depth,
                                 from + i * p->x_pitch + j * p->x_step, p->x_column, 1, panel,
                                 y + r * p->y_row + c * p->y_column + o, p->y_column, i + j > 0);
            }
}

/* `columns` neighbouring outputs of a depthwise convolution, from the first one's input x on. */
SPECIALISED void depthwise_tile(const Correlation *p, const T *x, const T *w, T *y, const int columns) {
    Vector sums[COLUMNS];
    UNROLL for (int c = 0; c < columns; c++) sums[c] = (Vector){0};
    for (int64_t i = 0; i < p->kernel_rows; i++)
        for (int64_t j = 0; j < p->kernel_columns; j++, w += LANES) {
            const T *from = x + i * p->x_pitch + j * p->x_step;
            const Vector weight = load(w);
            UNROLL for (int c = 0; c < columns; c++) sums[c] += weight * load(from + c * p->x_column);
        }
    UNROLL for (int c = 0; c < columns; c++) store(y + c * p->y_column, sums[c]);
}

/* The same as correlate() for a block of a depthwise convolution, with weights [kernel row][kernel column][channel]. */
static void correlate_depthwise(const Correlation *p, const T *x, const T *w, T *y) {
    const int64_t strips = ceil_div(p->columns, COLUMNS);
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t t = 0; t < strips; t++) {
            const int64_t c = part_begin(p->columns, strips, t), count = part_begin(p->columns, strips, t + 1) - c;
            const T *from = x + r * p->x_row + c * p->x_column;
            T *to = y + r * p->y_row + c * p->y_column;
#define DEPTHWISE_TILE(n)                        \
    case n:                                      \
        depthwise_tile(p, from, w, to, n);       \
        break;
            switch (count) {
                DEPTHWISE_TILE(1) DEPTHWISE_TILE(2) DEPTHWISE_TILE(3) DEPTHWISE_TILE(4)
#if VECTOR_REGISTERS >= 32
                DEPTHWISE_TILE(5) DEPTHWISE_TILE(6) DEPTHWISE_TILE(7) DEPTHWISE_TILE(8)
#endif
            }
        }
}

/* Where weights are. Row i of the kernel is row first_row + i * step_row of w; a negative step flips the kernel. So are
   columns. */
typedef struct {
    int64_t first_row, first_column, step_row, step_column, out_stride, channel_stride, width;
} Taps;

/* The panels of correlate(), or the weights of all blocks of a depthwise convolution. Returns the end. */
static T *pack_weights(const Conv *v, const Correlation *p, const T *w, Taps t, T *to) {
    const int64_t out = is_depthwise(v) ? v->channels : p->out, channels = is_depthwise(v) ? 1 : p->channels;
    const int64_t panel = is_depthwise(v) ? LANES : TILE_COLUMNS;
    for (int64_t o = 0; o < out; o += panel)
        for (int64_t i = 0; i < p->kernel_rows; i++)
            for (int64_t j = 0; j < p->kernel_columns; j++) {
                const T *tap = w + (t.first_row + i * t.step_row) * t.width + t.first_column + j * t.step_column;
                for (int64_t c = 0; c < channels; c++, to += panel)
                    for (int64_t k = 0; k < panel; k++)
                        to[k] = o + k < out ? tap[(o + k) * t.out_stride + c * t.channel_stride] : 0;
            }
    return to;
}

/* How many elements of T the packed weights of a block have. */
static int64_t block_weights(const Conv *v, const Correlation *p) {
    const int64_t taps = p->kernel_rows * p->kernel_columns;
    return is_depthwise(v) ? taps * LANES : ceil_div(p->out, TILE_COLUMNS) * TILE_COLUMNS * taps * p->channels;
}

static int64_t image_rows(const Conv *v) { return (v->out_height - 1) * v->stride_y + v->kernel_height; }
static int64_t image_pitch(const Conv *v) { return (v->out_width - 1) * v->stride_x + v->kernel_width; }

static Correlation forward(const Conv *v) {
    const int64_t step = pixel_step(block_in(v)), pitch = max_i64(image_pitch(v), v->padding_x + v->width) * step;
    const int64_t out = whole_vectors(block_out(v));
    return (Correlation){
        v->out_height, v->out_width, v->kernel_height, v->kernel_width, block_in(v), block_out(v),
        v->stride_y * pitch, v->stride_x * step, pitch, step, v->out_width * out, out,
    };
}

void FN(conv2d_channels_last_prepare)(const T *w, CONV_NUMBERS, char *prepared) {
    const Conv v = CONV;
    const Correlation c = forward(&v);
    const int64_t kernel = v.kernel_height * v.kernel_width;
    const int64_t out_stride = v.channels / v.groups * kernel;
    pack_weights(&v, &c, w, (Taps){0, 0, 1, 1, out_stride, kernel, v.kernel_width}, (T *)prepared);
}

void FN(conv2d_channels_last)(const T *x, const T *w, T *y, CONV_NUMBERS, char *scratch, char *prepared) {
    const Conv v = CONV;
    const Correlation c = forward(&v);
    const int64_t rows = max_i64(image_rows(&v), v.padding_y + v.height), pitch = c.x_pitch / c.x_step;
    T *image = take_bytes(&scratch, (rows * c.x_pitch + LANES) * sizeof(T)), *out = (T *)scratch;
    const T *weights = (const T *)prepared;
    for (int64_t block = 0; block < block_count(&v); block++, weights += block_weights(&v, &c)) {
        const int64_t first = block * c.channels, first_out = block * c.out;
        to_channels_last(x + first * v.height * v.width, min_i64(c.channels, v.channels - first), v.height, v.width,
                         v.padding_y, v.padding_x, image, rows, pitch, c.x_step, NULL);
        (is_depthwise(&v) ? correlate_depthwise : correlate)(&c, image, weights, out);
        from_channels_last(out, v.out_width, y + first_out * v.out_height * v.out_width,
                           min_i64(c.out, v.out_channels - first_out), v.out_height, v.out_width);
    }
}

/* Along one axis: elements q * stride + phase - padding of the image, for begin <= q < end, belong to the phase. Each is
   a sum of `taps` terms. Term t is kernel element phase + stride * t times element q - t of the gradient. */
typedef struct {
    int64_t begin, end, taps;
} Phase;

static Phase phase_of(int64_t length, int64_t kernel, int64_t phase, int64_t padding, int64_t stride) {
    const int64_t begin = ceil_div(max_i64(padding - phase, 0), stride);
    return (Phase){begin, max_i64(begin, ceil_div(max_i64(length + padding - phase, 0), stride)),
                   ceil_div(max_i64(kernel - phase, 0), stride)};
}

/* The padded gradient: zeros before it, and its whole length. */
static int64_t zeros_before(int64_t kernel, int64_t stride) { return (kernel - 1) / stride; }
static int64_t padded_length(int64_t length, int64_t padding, int64_t out, int64_t kernel, int64_t stride) {
    return zeros_before(kernel, stride) + max_i64(out, ceil_div(length + padding, stride));
}

static Correlation of_phase(const Conv *v, Phase row, Phase column) {
    const int64_t step = pixel_step(block_out(v)), in = whole_vectors(block_in(v));
    const int64_t pitch = padded_length(v->width, v->padding_x, v->out_width, v->kernel_width, v->stride_x) * step;
    return (Correlation){
        row.end - row.begin, column.end - column.begin, row.taps, column.taps, block_out(v), block_in(v),
        pitch, step, pitch, step, v->stride_y * v->width * in, v->stride_x * in,
    };
}

void FN(conv2d_input_grad_channels_last_prepare)(const T *w, CONV_NUMBERS, char *prepared) {
    const Conv v = CONV;
    const int64_t kernel = v.kernel_height * v.kernel_width;
    T *to = (T *)prepared;
    for (int64_t a = 0; a < v.stride_y; a++)
        for (int64_t b = 0; b < v.stride_x; b++) {
            const Phase row = phase_of(v.height, v.kernel_height, a, v.padding_y, v.stride_y);
            const Phase column = phase_of(v.width, v.kernel_width, b, v.padding_x, v.stride_x);
            const Correlation c = of_phase(&v, row, column);
            const Taps taps = {a + (row.taps - 1) * v.stride_y, b + (column.taps - 1) * v.stride_x, -v.stride_y,
                               -v.stride_x, kernel, v.channels / v.groups * kernel, v.kernel_width};
            to = pack_weights(&v, &c, w, taps, to);
        }
}

void FN(conv2d_input_grad_channels_last)(const T *g, const T *w, T *dx, CONV_NUMBERS, char *scratch, char *prepared) {
    const Conv v = CONV;
    const int64_t step = pixel_step(block_out(&v)), in = whole_vectors(block_in(&v));
    const int64_t rows = padded_length(v.height, v.padding_y, v.out_height, v.kernel_height, v.stride_y);
    const int64_t pitch = padded_length(v.width, v.padding_x, v.out_width, v.kernel_width, v.stride_x);
    const int64_t top = zeros_before(v.kernel_height, v.stride_y), left = zeros_before(v.kernel_width, v.stride_x);
    T *gradient = take_bytes(&scratch, (rows * pitch * step + LANES) * sizeof(T)), *image = (T *)scratch;
    for (int64_t block = 0; block < block_count(&v); block++) {
        const int64_t first = block * block_in(&v), first_out = block * block_out(&v);
        to_channels_last(g + first_out * v.out_height * v.out_width, min_i64(block_out(&v), v.out_channels - first_out),
                         v.out_height, v.out_width, top, left, gradient, rows, pitch, step, NULL);
        if (v.kernel_height < v.stride_y || v.kernel_width < v.stride_x) /* some phases have no taps */
            memset(image, 0, v.height * v.width * in * sizeof(T));
        const T *weights = (const T *)prepared;
        for (int64_t a = 0; a < v.stride_y; a++)
            for (int64_t b = 0; b < v.stride_x; b++) {
                const Phase row = phase_of(v.height, v.kernel_height, a, v.padding_y, v.stride_y);
                const Phase column = phase_of(v.width, v.kernel_width, b, v.padding_x, v.stride_x);
                const Correlation c = of_phase(&v, row, column);
                const int64_t y = row.begin * v.stride_y + a - v.padding_y;
                const int64_t x = column.begin * v.stride_x + b - v.padding_x;
                const int64_t above = row.begin + top - row.taps + 1, before = column.begin + left - column.taps + 1;
                (is_depthwise(&v) ? correlate_depthwise : correlate)(
                    &c, gradient + (above * pitch + before) * step, weights + block * block_weights(&v, &c),
                    image + (y * v.width + x) * in);
                weights += block_count(&v) * block_weights(&v, &c);
            }
        from_channels_last(image, v.width, dx + first * v.height * v.width, min_i64(block_in(&v), v.channels - first),
                           v.height, v.width);
    }
}
