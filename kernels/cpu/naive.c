/* Naive implementations: the loops of the definitions, one thread, nothing blocked, packed or unrolled.

   Only benchmarks use them, to compare with the kernels of this folder. Arrays are float32 and C-contiguous. */

#include <math.h>
#include <stdint.h>

/* out (m, n) = op(a) op(b); op(a) is (m, k) and op(b) (k, n), stored transposed where ta or tb is not 0. */
void naive_matmul(const float *a, const float *b, float *out, int64_t m, int64_t k, int64_t n, int64_t ta, int64_t tb) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            float sum = 0;
            for (int64_t p = 0; p < k; p++)
                sum += (ta ? a[p * m + i] : a[i * k + p]) * (tb ? b[j * k + p] : b[p * n + j]);
            out[i * n + j] = sum;
        }
}

/* Where window element (i, j) of output (y, x) lies in an image, or -1 in the padding. */
#define AT(y, x) ((y) < 0 || (y) >= height || (x) < 0 || (x) >= width ? -1 : (y) * width + (x))

/* All loops of a convolution: images (n, c, height, width), kernels (o, c, kh, kw), outputs (n, o, oh, ow). */
#define EVERY_PRODUCT(statement)                                                                    \
    for (int64_t b = 0; b < n; b++)                                                                 \
        for (int64_t f = 0; f < o; f++)                                                             \
            for (int64_t y = 0; y < oh; y++)                                                        \
                for (int64_t x = 0; x < ow; x++)                                                    \
                    for (int64_t ch = 0; ch < c; ch++)                                              \
                        for (int64_t i = 0; i < kh; i++)                                            \
                            for (int64_t j = 0; j < kw; j++) {                                      \
                                int64_t at = AT(y * sh - ph + i, x * sw - pw + j);                  \
                                if (at < 0) continue;                                               \
                                int64_t in = (b * c + ch) * height * width + at;                    \
                                int64_t kernel = ((f * c + ch) * kh + i) * kw + j;                  \
                                int64_t to = ((b * o + f) * oh + y) * ow + x;                       \
                                statement;                                                          \
                            }

#define SIZES                                                                                          \
    int64_t n, int64_t c, int64_t height, int64_t width, int64_t o, int64_t kh, int64_t kw, int64_t oh, \
        int64_t ow, int64_t sh, int64_t sw, int64_t ph, int64_t pw

/* Each adds to its last array. */
void naive_conv2d(const float *image, const float *weight, float *out, SIZES) {
    EVERY_PRODUCT(out[to] += image[in] * weight[kernel])
}

void naive_conv2d_input_grad(const float *ct, const float *weight, float *by_image, SIZES) {
    EVERY_PRODUCT(by_image[in] += ct[to] * weight[kernel])
}

void naive_conv2d_weight_grad(const float *image, const float *ct, float *by_weight, SIZES) {
    EVERY_PRODUCT(by_weight[kernel] += image[in] * ct[to])
}

void naive_add(const float *a, const float *b, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

void naive_exp(const float *x, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = expf(x[i]);
}

void naive_sum(const float *x, float *out, int64_t n) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    out[0] = sum;
}

/* Of m rows of n elements. */
void naive_softmax(const float *x, float *out, int64_t m, int64_t n) {
    for (int64_t i = 0; i < m; i++) {
        const float *row = x + i * n;
        float largest = row[0], sum = 0;
        for (int64_t j = 1; j < n; j++)
            if (row[j] > largest) largest = row[j];
        for (int64_t j = 0; j < n; j++) sum += out[i * n + j] = expf(row[j] - largest);
        for (int64_t j = 0; j < n; j++) out[i * n + j] /= sum;
    }
}

void naive_transpose(const float *x, float *out, int64_t m, int64_t n) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) out[j * m + i] = x[i * n + j];
}

/* Disjoint windows of 2x2, of n images (2 oh, 2 ow). */
void naive_max_pool2d(const float *x, float *out, int64_t n, int64_t oh, int64_t ow) {
    for (int64_t b = 0; b < n; b++)
        for (int64_t i = 0; i < oh; i++)
            for (int64_t j = 0; j < ow; j++) {
                float largest = -INFINITY;
                for (int64_t k = 0; k < 4; k++) {
                    float value = x[(b * 2 * oh + 2 * i + k / 2) * 2 * ow + 2 * j + k % 2];
                    if (value > largest) largest = value;
                }
                out[(b * oh + i) * ow + j] = largest;
            }
}
