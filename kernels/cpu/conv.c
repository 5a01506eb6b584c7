/* Convolution of one image, and its gradient with respect to the image, as correlations of planes (correlate.h).

   For strides above 1 the image is first split into planes over which the kernel moves by one (split_image). Dilation
   only changes offsets.

   The input gradient is also a convolution: of the padded gradient of y with the kernel rotated by 180 degrees and its
   channels exchanged. For strides above 1 only every stride-th row and column of the kernel multiplies an element of
   the image. The elements with the same rows and columns are a phase; each phase is the output of one convolution. */

#include "correlate.h"

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
