/* Functions of layers.c for networks in int8, by integer arithmetic alone.

   A value x stands for the number x * scale, with a scale for each array. Products of bytes are added in 32 bits. The
   sums are brought to the scale of the result by a multiplier and a shift: round(sum * multiplier / 2^shift). They
   rely on >> of a negative number being an arithmetic shift, as in gcc and clang. */

#include <stdint.h>
#include <string.h>

/* round(x multiplier / 2^shift), from `least` to 127. */
static int8_t requantize(int64_t x, int32_t multiplier, int shift, int least) {
    const int64_t y = (x * multiplier + ((int64_t)1 << (shift - 1))) >> shift;
    return (int8_t)(y < least ? least : y > 127 ? 127 : y);
}

/* An image, normalised and quantized: y = table[c][x] for each byte x of channel c; table is (channels, 256). */
static void look_up_image(const uint8_t *x, int channels, int n, const int8_t *table, int8_t *y) {
    for (int c = 0; c < channels; c++)
        for (int i = 0; i < n; i++) y[c * n + i] = table[c * 256 + x[c * n + i]];
}

/* y = x weight + bias for each row of x: (rows, inputs) to (rows, outputs); the weight is (outputs, inputs). */
static void linear(const int8_t *x, int rows, int inputs, int outputs, const int8_t *weight, const int32_t *bias,
                   const int32_t *multiplier, const int8_t *shift, int least, int8_t *y) {
    for (int row = 0; row < rows; row++, x += inputs)
        for (int o = 0; o < outputs; o++) {
            int32_t sum = bias[o];
            for (int i = 0; i < inputs; i++) sum += x[i] * weight[o * inputs + i];
            *y++ = requantize(sum, multiplier[o], shift[o], least);
        }
}

/* linear for one row, with results of 32 bits: the logits. */
static void linear_32(const int8_t *x, int inputs, int outputs, const int8_t *weight, const int32_t *bias,
                      const int32_t *multiplier, const int8_t *shift, int32_t *y) {
    for (int o = 0; o < outputs; o++) {
        int64_t sum = bias[o];
        for (int i = 0; i < inputs; i++) sum += x[i] * weight[o * inputs + i];
        y[o] = (int32_t)((sum * multiplier[o] + ((int64_t)1 << (shift[o] - 1))) >> shift[o]);
    }
}

/* round(x multiplier / 2^shift) for n bytes, with results of 32 bits. */
static void rescale_32(const int8_t *x, int n, int32_t multiplier, int shift, int32_t *y) {
    for (int i = 0; i < n; i++) y[i] = (int32_t)((x[i] * (int64_t)multiplier + ((int64_t)1 << (shift - 1))) >> shift);
}

/* Images with borders of zeros. */
static void pad(const int8_t *x, int channels, int height, int width, int top, int left, int bottom, int right,
                int8_t *y) {
    const int wide = left + width + right;
    memset(y, 0, (size_t)(channels * (top + height + bottom) * wide));
    for (int c = 0; c < channels; c++, y += (top + height + bottom) * wide)
        for (int row = 0; row < height; row++, x += width)
            memcpy(y + (top + row) * wide + left, x, (size_t)width);
}

/* Each weight is multiplied with the part of a channel that it meets, and the products are added to the sums of a
   filter. The weight is (filters, channels / groups, kernel_height, kernel_width). sums: memory for one image. */
static void conv2d(const struct conv *s, const int8_t *x, const int8_t *weight, const int32_t *bias,
                   const int32_t *multiplier, const int8_t *shift, int least, int32_t *restrict sums, int8_t *y) {
    const int inputs = s->channels / s->groups, outputs = s->filters / s->groups;
    const int pixels = s->out_height * s->out_width;
    for (int filter = 0; filter < s->filters; filter++, y += pixels) {
        const int8_t *image = x + filter / outputs * inputs * s->height * s->width;
        for (int i = 0; i < pixels; i++) sums[i] = bias[filter];
        for (int c = 0; c < inputs; c++)
            for (int i = 0; i < s->kernel_height; i++)
                for (int j = 0; j < s->kernel_width; j++, weight++) {
                    const int8_t *part = image + (c * s->height + i * s->dilation_y) * s->width + j * s->dilation_x;
                    for (int row = 0; row < s->out_height; row++)
                        for (int col = 0; col < s->out_width; col++)
                            sums[row * s->out_width + col] +=
                                *weight * part[row * s->stride_y * s->width + col * s->stride_x];
                }
        for (int i = 0; i < pixels; i++) y[i] = requantize(sums[i], multiplier[filter], shift[filter], least);
    }
}

/* The maximum of each window; what lies outside of the image does not count. */
static void max_pool2d(const struct pool *s, const int8_t *x, int8_t *y) {
    for (int c = 0; c < s->channels; c++, x += s->height * s->width)
        for (int row = 0; row < s->out_height; row++)
            for (int col = 0; col < s->out_width; col++) {
                const int top = row * s->stride_y - s->padding_y, left = col * s->stride_x - s->padding_x;
                const int bottom = smaller(top + s->kernel_height, s->height);
                const int right = smaller(left + s->kernel_width, s->width);
                int8_t most = -128;
                for (int i = larger(top, 0); i < bottom; i++)
                    for (int j = larger(left, 0); j < right; j++)
                        most = x[i * s->width + j] > most ? x[i * s->width + j] : most;
                *y++ = most;
            }
}

/* The mean of each window, rescaled; what lies outside of the image counts as 0. */
static void avg_pool2d(const struct pool *s, const int8_t *x, int32_t multiplier, int shift, int8_t *y) {
    for (int c = 0; c < s->channels; c++, x += s->height * s->width)
        for (int row = 0; row < s->out_height; row++)
            for (int col = 0; col < s->out_width; col++) {
                const int top = row * s->stride_y - s->padding_y, left = col * s->stride_x - s->padding_x;
                const int bottom = smaller(top + s->kernel_height, s->height);
                const int right = smaller(left + s->kernel_width, s->width);
                int32_t sum = 0;
                for (int i = larger(top, 0); i < bottom; i++)
                    for (int j = larger(left, 0); j < right; j++) sum += x[i * s->width + j];
                *y++ = requantize(sum, multiplier / (s->kernel_height * s->kernel_width), shift, -127);
            }
}

/* Means of windows that cover the image, rescaled: row r of the output is the mean of rows r height / rows to
   (r + 1) height / rows, rounded outwards; the same for columns. */
static void adaptive_avg_pool2d(const int8_t *x, int channels, int height, int width, int rows, int columns,
                                int32_t multiplier, int shift, int8_t *y) {
    for (int c = 0; c < channels; c++, x += height * width)
        for (int row = 0; row < rows; row++)
            for (int col = 0; col < columns; col++) {
                const int top = row * height / rows, bottom = ((row + 1) * height + rows - 1) / rows;
                const int left = col * width / columns, right = ((col + 1) * width + columns - 1) / columns;
                int32_t sum = 0;
                for (int i = top; i < bottom; i++)
                    for (int j = left; j < right; j++) sum += x[i * width + j];
                *y++ = requantize(sum, multiplier / ((bottom - top) * (right - left)), shift, -127);
            }
}

/* y = a + b, each with a scale of its own. y may be a or b. */
static void add(const int8_t *a, const int8_t *b, int n, int32_t multiplier_a, int32_t multiplier_b, int shift,
                int least, int8_t *y) {
    for (int i = 0; i < n; i++)
        y[i] = requantize((int64_t)a[i] * multiplier_a + (int64_t)b[i] * multiplier_b, 1, shift, least);
}

/* The same numbers, brought to another scale. */
static void rescale(const int8_t *x, int n, int32_t multiplier, int shift, int8_t *y) {
    for (int i = 0; i < n; i++) y[i] = requantize(x[i], multiplier, shift, -127);
}

/* A function of each number as a table of its values for -128 to 127. y may be x. */
static void look_up(const int8_t *x, int n, const int8_t *table, int8_t *y) {
    for (int i = 0; i < n; i++) y[i] = table[x[i] + 128];
}

/* The channels at `count` indices; each channel has n numbers. */
static void take_channels(const int8_t *x, const int32_t *indices, int count, int n, int8_t *y) {
    for (int i = 0; i < count; i++) memcpy(y + i * n, x + indices[i] * n, (size_t)n);
}

/* Softmax of logits in units of ln(2) / 256, as e^-d = 2^(-d / 256); probabilities in units of 1 / 65536. powers has
   2^(-k / 256) * 2^16 for k = 0 to 255. */
static void softmax_16(const int32_t *x, int n, const int32_t *powers, uint16_t *y) {
    int32_t most = x[0];
    uint64_t sum = 0;
    for (int i = 1; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int i = 0; i < n; i++) {
        const int64_t d = (int64_t)most - x[i];
        sum += d < 8192 ? (uint64_t)powers[d % 256] >> (d / 256) : 0;
    }
    for (int i = 0; i < n; i++) {
        const int64_t d = (int64_t)most - x[i];
        const uint64_t p = (d < 8192 ? (uint64_t)powers[d % 256] >> (d / 256) : 0) * 65536 / sum;
        y[i] = (uint16_t)(p > 65535 ? 65535 : p);
    }
}

/* The index of the first of the largest numbers. */
static int argmax(const int32_t *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++) best = x[i] > x[best] ? i : best;
    return best;
}
