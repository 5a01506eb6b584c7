/* Operations on a batch, and their gradients, for --training and for layers composed of operations.

   All arrays are float and C-contiguous. A batch of images is (images, channels, height, width). */

#include <math.h>

/* y = x weight + bias for each row of x: (rows, inputs) to (rows, outputs). The weight is (outputs, inputs), as a
   training step updates it. */
static void linear_transposed(const float *x, int rows, int inputs, int outputs, const float *weight, const float *bias,
                              float *restrict y) {
    for (int row = 0; row < rows; row++, x += inputs, y += outputs)
        for (int o = 0; o < outputs; o++) {
            float sum = bias ? bias[o] : 0;
            for (int i = 0; i < inputs; i++) sum += x[i] * weight[o * inputs + i];
            y[o] = sum;
        }
}

/* y (m, n) = a (m, k) b (k, n), each stored transposed if its flag is set. */
static void matmul(const float *a, const float *b, int m, int k, int n, int transpose_a, int transpose_b,
                   float *restrict y) {
    for (int i = 0; i < m; i++, y += n) {
        for (int j = 0; j < n; j++) y[j] = 0;
        for (int p = 0; p < k; p++) {
            const float factor = transpose_a ? a[p * m + i] : a[i * k + p];
            for (int j = 0; j < n && !transpose_b; j++) y[j] += factor * b[p * n + j];
            for (int j = 0; j < n && transpose_b; j++) y[j] += factor * b[j * k + p];
        }
    }
}

/* Outputs *begin to *end - 1 of a row: those at which element `offset` of the window is inside the input's row, which
   has `length` elements. */
static void inside(int offset, int stride, int length, int outputs, int *begin, int *end) {
    *begin = offset < 0 ? (stride - 1 - offset) / stride : 0;
    *end = offset < length ? (length - 1 - offset) / stride + 1 : 0;
    if (*end > outputs) *end = outputs;
}

/* y = x * weight for a batch of images. */
static void conv2d_batch(const struct conv *s, int images, const float *x, const float *weight, float *restrict y) {
    const int inputs = s->channels / s->groups, outputs = s->filters / s->groups;
    const int taps = s->kernel_height * s->kernel_width;
    for (int image = 0; image < images; image++)
        for (int f = 0; f < s->filters; f++, y += s->out_height * s->out_width) {
            for (int i = 0; i < s->out_height * s->out_width; i++) y[i] = 0;
            for (int c = 0; c < inputs; c++)
                for (int tap = 0; tap < taps; tap++) {
                    const int top = tap / s->kernel_width * s->dilation_y - s->padding_y;
                    const int left = tap % s->kernel_width * s->dilation_x - s->padding_x;
                    const float *from = x + (image * s->channels + f / outputs * inputs + c) * s->height * s->width;
                    const float w = weight[(f * inputs + c) * taps + tap];
                    int row, last_row, begin, end;
                    inside(top, s->stride_y, s->height, s->out_height, &row, &last_row);
                    inside(left, s->stride_x, s->width, s->out_width, &begin, &end);
                    for (; row < last_row; row++)
                        for (int col = begin; col < end; col++)
                            y[row * s->out_width + col] +=
                                w * from[(row * s->stride_y + top) * s->width + col * s->stride_x + left];
                }
        }
}

/* The gradient dx of the loss by x of conv2d_batch, from the gradient dy by y. */
static void conv2d_input_grad(const struct conv *s, int images, const float *dy, const float *weight,
                              float *restrict dx) {
    const int inputs = s->channels / s->groups, outputs = s->filters / s->groups;
    const int taps = s->kernel_height * s->kernel_width;
    for (int i = 0; i < images * s->channels * s->height * s->width; i++) dx[i] = 0;
    for (int image = 0; image < images; image++)
        for (int f = 0; f < s->filters; f++, dy += s->out_height * s->out_width)
            for (int c = 0; c < inputs; c++)
                for (int tap = 0; tap < taps; tap++) {
                    const int top = tap / s->kernel_width * s->dilation_y - s->padding_y;
                    const int left = tap % s->kernel_width * s->dilation_x - s->padding_x;
                    float *to = dx + (image * s->channels + f / outputs * inputs + c) * s->height * s->width;
                    const float w = weight[(f * inputs + c) * taps + tap];
                    int row, last_row, begin, end;
                    inside(top, s->stride_y, s->height, s->out_height, &row, &last_row);
                    inside(left, s->stride_x, s->width, s->out_width, &begin, &end);
                    for (; row < last_row; row++)
                        for (int col = begin; col < end; col++)
                            to[(row * s->stride_y + top) * s->width + col * s->stride_x + left] +=
                                w * dy[row * s->out_width + col];
                }
}

/* The gradient dweight of the loss by weight of conv2d_batch, from the gradient dy by y. */
static void conv2d_weight_grad(const struct conv *s, int images, const float *x, const float *dy,
                               float *restrict dweight) {
    const int inputs = s->channels / s->groups, outputs = s->filters / s->groups;
    const int taps = s->kernel_height * s->kernel_width;
    for (int i = 0; i < s->filters * inputs * taps; i++) dweight[i] = 0;
    for (int image = 0; image < images; image++)
        for (int f = 0; f < s->filters; f++, dy += s->out_height * s->out_width)
            for (int c = 0; c < inputs; c++)
                for (int tap = 0; tap < taps; tap++) {
                    const int top = tap / s->kernel_width * s->dilation_y - s->padding_y;
                    const int left = tap % s->kernel_width * s->dilation_x - s->padding_x;
                    const float *from = x + (image * s->channels + f / outputs * inputs + c) * s->height * s->width;
                    float sum = 0;
                    int row, last_row, begin, end;
                    inside(top, s->stride_y, s->height, s->out_height, &row, &last_row);
                    inside(left, s->stride_x, s->width, s->out_width, &begin, &end);
                    for (; row < last_row; row++)
                        for (int col = begin; col < end; col++)
                            sum += dy[row * s->out_width + col] *
                                   from[(row * s->stride_y + top) * s->width + col * s->stride_x + left];
                    dweight[(f * inputs + c) * taps + tap] += sum;
                }
}

/* The maximum of each window, and its position in the window, for `planes` images of one channel: the first maximum, or
   the last NaN if there is one. */
static void max_pool2d_where(const struct pool *s, int planes, const float *x, float *y, int32_t *where) {
    for (int plane = 0; plane < planes; plane++, x += s->height * s->width)
        for (int i = 0; i < s->out_height * s->out_width; i++, y++, where++) {
            const int top = i / s->out_width * s->stride_y - s->padding_y;
            const int left = i % s->out_width * s->stride_x - s->padding_x;
            *where = -1;
            for (int tap = 0; tap < s->kernel_height * s->kernel_width; tap++) {
                const int row = top + tap / s->kernel_width, col = left + tap % s->kernel_width;
                if (row < 0 || row >= s->height || col < 0 || col >= s->width) continue;
                const float found = x[row * s->width + col];
                if (*where >= 0 && !(found > *y || found != found)) continue;
                *y = found;
                *where = tap;
            }
        }
}

/* The gradient dx of the loss by x of max_pool2d_where, from the gradient dy by y. */
static void max_pool2d_put(const struct pool *s, int planes, const float *dy, const int32_t *where, float *dx) {
    for (int i = 0; i < planes * s->height * s->width; i++) dx[i] = 0;
    for (int plane = 0; plane < planes; plane++, dx += s->height * s->width)
        for (int i = 0; i < s->out_height * s->out_width; i++, dy++, where++) {
            const int row = i / s->out_width * s->stride_y - s->padding_y + *where / s->kernel_width;
            const int col = i % s->out_width * s->stride_x - s->padding_x + *where % s->kernel_width;
            dx[row * s->width + col] += *dy;
        }
}

/* The gradient dx of the loss by x of avg_pool2d, from the gradient dy by y. */
static void avg_pool2d_put(const struct pool *s, int planes, const float *dy, float *dx) {
    for (int i = 0; i < planes * s->height * s->width; i++) dx[i] = 0;
    for (int plane = 0; plane < planes; plane++, dx += s->height * s->width)
        for (int i = 0; i < s->out_height * s->out_width; i++, dy++)
            for (int tap = 0; tap < s->kernel_height * s->kernel_width; tap++) {
                const int row = i / s->out_width * s->stride_y - s->padding_y + tap / s->kernel_width;
                const int col = i % s->out_width * s->stride_x - s->padding_x + tap % s->kernel_width;
                if (row >= 0 && row < s->height && col >= 0 && col < s->width)
                    dx[row * s->width + col] += *dy / (float)(s->kernel_height * s->kernel_width);
            }
}

/* The density of the normal distribution. */
static float normal_pdf(float x) {
    return expf(x * x * -0.5f) * 0.39894228f;
}
