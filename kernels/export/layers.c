/* The functions that exported C calls, for operations and whole layers. `adtrain export` copies those that it needs.

   All arrays are float and C-contiguous; a sample of an image is (channels, height, width). Weights of matrices are
   stored transposed, (inputs, outputs). A pointer `bias` may be NULL. x and y are different arrays, except in functions
   that say otherwise. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct conv {
    int channels, height, width; /* of the input; conv2d gets one that is padded already */
    int filters, groups, out_height, out_width;
    int kernel_height, kernel_width, stride_y, stride_x, dilation_y, dilation_x;
    int padding_y, padding_x; /* not read by conv2d */
};

struct pool {
    int channels, height, width, out_height, out_width;
    int kernel_height, kernel_width, stride_y, stride_x, padding_y, padding_x;
};

static int smaller(int a, int b) {
    return a < b ? a : b;
}

static int larger(int a, int b) {
    return a > b ? a : b;
}

/* y = x weight + bias for each row of x: (rows, inputs) to (rows, outputs). */
static void linear(const float *x, int rows, int inputs, int outputs, const float *weight, const float *bias,
                   float *restrict y) {
    for (int row = 0; row < rows; row++, x += inputs, y += outputs) {
        for (int o = 0; o < outputs; o++) y[o] = bias ? bias[o] : 0;
        for (int i = 0; i < inputs; i++)
            for (int o = 0; o < outputs; o++) y[o] += x[i] * weight[i * outputs + o];
    }
}

/* Images with borders of zeros. */
static void pad(const float *x, int channels, int height, int width, int top, int left, int bottom, int right,
                float *y) {
    const int wide = left + width + right;
    for (int c = 0; c < channels; c++) {
        for (int i = 0; i < top * wide; i++) *y++ = 0;
        for (int row = 0; row < height; row++) {
            for (int i = 0; i < left; i++) *y++ = 0;
            for (int i = 0; i < width; i++) *y++ = *x++;
            for (int i = 0; i < right; i++) *y++ = 0;
        }
        for (int i = 0; i < bottom * wide; i++) *y++ = 0;
    }
}

/* Each weight is multiplied with the part of a channel that it meets, and the products are added to a filter's image.
   The weight is (filters, channels / groups, kernel_height, kernel_width). */
static void conv2d(const struct conv *s, const float *x, const float *weight, const float *bias, float *restrict y) {
    const int inputs = s->channels / s->groups, outputs = s->filters / s->groups;
    for (int filter = 0; filter < s->filters; filter++, y += s->out_height * s->out_width) {
        const float *image = x + filter / outputs * inputs * s->height * s->width;
        for (int i = 0; i < s->out_height * s->out_width; i++) y[i] = bias ? bias[filter] : 0;
        for (int c = 0; c < inputs; c++)
            for (int i = 0; i < s->kernel_height; i++)
                for (int j = 0; j < s->kernel_width; j++, weight++) {
                    const float *part = image + (c * s->height + i * s->dilation_y) * s->width + j * s->dilation_x;
                    for (int row = 0; row < s->out_height; row++)
                        for (int col = 0; col < s->out_width; col++)
                            y[row * s->out_width + col] +=
                                *weight * part[row * s->stride_y * s->width + col * s->stride_x];
                }
    }
}

/* Each number of the input adds its multiple of a kernel to the output. The weight is (channels, filters / groups,
   kernel_height, kernel_width). */
static void conv_transpose2d(const struct conv *s, const float *x, const float *weight, const float *bias,
                             float *restrict y) {
    const int inputs = s->channels / s->groups, outputs = s->filters / s->groups;
    const int pixels = s->out_height * s->out_width;
    for (int filter = 0; filter < s->filters; filter++)
        for (int i = 0; i < pixels; i++) y[filter * pixels + i] = bias ? bias[filter] : 0;
    for (int c = 0; c < s->channels; c++)
        for (int o = 0; o < outputs; o++)
            for (int i = 0; i < s->kernel_height; i++)
                for (int j = 0; j < s->kernel_width; j++, weight++)
                    for (int row = 0; row < s->height; row++)
                        for (int col = 0; col < s->width; col++) {
                            const int to_row = row * s->stride_y + i * s->dilation_y - s->padding_y;
                            const int to_col = col * s->stride_x + j * s->dilation_x - s->padding_x;
                            if (to_row >= 0 && to_row < s->out_height && to_col >= 0 && to_col < s->out_width)
                                y[(c / inputs * outputs + o) * pixels + to_row * s->out_width + to_col] +=
                                    *weight * x[(c * s->height + row) * s->width + col];
                        }
}

/* The maximum of each window, NaN if there is one; what lies outside of the image does not count. */
static void max_pool2d(const struct pool *s, const float *x, float *y) {
    for (int c = 0; c < s->channels; c++, x += s->height * s->width)
        for (int row = 0; row < s->out_height; row++)
            for (int col = 0; col < s->out_width; col++) {
                const int top = row * s->stride_y - s->padding_y, left = col * s->stride_x - s->padding_x;
                const int bottom = smaller(top + s->kernel_height, s->height);
                const int right = smaller(left + s->kernel_width, s->width);
                float most = -INFINITY, sum = 0; /* NaN, which is rare, makes the sum NaN */
                for (int i = larger(top, 0); i < bottom; i++)
                    for (int j = larger(left, 0); j < right; j++) {
                        most = x[i * s->width + j] > most ? x[i * s->width + j] : most;
                        sum += x[i * s->width + j];
                    }
                if (sum != sum)
                    for (int i = larger(top, 0); i < bottom; i++)
                        for (int j = larger(left, 0); j < right; j++)
                            if (x[i * s->width + j] != x[i * s->width + j]) most = NAN;
                *y++ = most;
            }
}

/* The mean of each window; what lies outside of the image counts as 0. */
static void avg_pool2d(const struct pool *s, const float *x, float *y) {
    for (int c = 0; c < s->channels; c++, x += s->height * s->width)
        for (int row = 0; row < s->out_height; row++)
            for (int col = 0; col < s->out_width; col++) {
                const int top = row * s->stride_y - s->padding_y, left = col * s->stride_x - s->padding_x;
                const int bottom = smaller(top + s->kernel_height, s->height);
                const int right = smaller(left + s->kernel_width, s->width);
                float sum = 0;
                for (int i = larger(top, 0); i < bottom; i++)
                    for (int j = larger(left, 0); j < right; j++) sum += x[i * s->width + j];
                *y++ = sum / (float)(s->kernel_height * s->kernel_width);
            }
}

/* Means of windows that cover the image: row r of the output is the mean of rows r height / rows to
   (r + 1) height / rows, rounded outwards; the same for columns. */
static void adaptive_avg_pool2d(const float *x, int channels, int height, int width, int rows, int columns, float *y) {
    for (int c = 0; c < channels; c++, x += height * width)
        for (int row = 0; row < rows; row++)
            for (int col = 0; col < columns; col++) {
                const int top = row * height / rows, bottom = ((row + 1) * height + rows - 1) / rows;
                const int left = col * width / columns, right = ((col + 1) * width + columns - 1) / columns;
                float sum = 0;
                for (int i = top; i < bottom; i++)
                    for (int j = left; j < right; j++) sum += x[i * width + j];
                *y++ = sum / (float)((bottom - top) * (right - left));
            }
}

/* (x - mean) / sqrt(variance + eps) of n numbers. The first is subtracted before, so that numbers that are all alike
   become 0. y may be x. */
static void standardize(const float *x, int n, float eps, float *y) {
    const float first = x[0];
    float mean = 0, variance = 0;
    for (int i = 0; i < n; i++) mean += x[i] - first;
    mean /= (float)n;
    for (int i = 0; i < n; i++) variance += (x[i] - first - mean) * (x[i] - first - mean);
    const float scale = 1 / sqrtf(variance / (float)n + eps);
    for (int i = 0; i < n; i++) y[i] = (x[i] - first - mean) * scale;
}

/* Each row of n numbers is standardized, then multiplied by weight and added to bias, both (n) or NULL. y may be x. */
static void layer_norm(const float *x, int rows, int n, float eps, const float *weight, const float *bias, float *y) {
    for (int row = 0; row < rows; row++, x += n, y += n) {
        standardize(x, n, eps, y);
        for (int i = 0; i < n && weight; i++) y[i] = y[i] * weight[i] + bias[i];
    }
}

/* y[i] is the row of weight (rows, width) with the index x[i], without its fraction. Returns 0 if there is none. */
static int embedding(const float *x, int n, int rows, int width, const float *weight, float *y) {
    for (int i = 0; i < n; i++) {
        if (!(x[i] > -1 && x[i] < (float)rows)) return 0;
        memcpy(y + i * width, weight + (int)x[i] * width, sizeof(float) * (size_t)width);
    }
    return 1;
}

/* The features of points (n, coordinates) in a hash grid. A level is {resolution, first row of the table, mask}; a mask
   of 0 gives each corner of a cell a row of its own. Bit i of a corner's number is its end of coordinate i. */
static void hash_grid(const float *x, int n, int coordinates, const float *table, const int64_t *levels, int count,
                      int features, float *y) {
    static const uint32_t primes[] = {1u, 2654435761u, 805459861u, 3674653429u};
    for (int point = 0; point < n; point++, x += coordinates)
        for (int level = 0; level < count; level++, y += features) {
            const int64_t resolution = levels[3 * level], mask = levels[3 * level + 2];
            for (int f = 0; f < features; f++) y[f] = 0;
            for (int corner = 0; corner < 1 << coordinates; corner++) {
                float weight = 1;
                int64_t row = 0, stride = 1;
                for (int i = 0; i < coordinates; i++, stride *= resolution + 1) {
                    float position = x[i] * (float)resolution;
                    position = position < 0 ? 0 : position > (float)resolution ? (float)resolution : position;
                    int64_t cell = position > 0 ? (int64_t)position : 0;
                    cell = cell < resolution ? cell : resolution - 1;
                    const int end = corner >> i & 1;
                    weight *= end ? position - (float)cell : 1 - (position - (float)cell);
                    row = mask ? row ^ (uint32_t)((cell + end) * primes[i]) : row + (cell + end) * stride;
                }
                const float *from = table + (levels[3 * level + 1] + (mask ? row & mask : row)) * features;
                for (int f = 0; f < features; f++) y[f] += weight * from[f];
            }
        }
}

static float logistic(float x) {
    return 1 / (1 + expf(-x));
}

/* A recurrent layer in one direction; `reverse`: from the last step to the first. x is (length, inputs). The hidden
   states of all steps are written to y. gates: memory for `hidden` numbers. */
static void rnn_tanh(const float *x, int length, int inputs, int hidden, const float *weight_ih, const float *weight_hh,
                     const float *bias_ih, const float *bias_hh, int reverse, float *gates, float *y) {
    const float *h = NULL; /* the hidden state; none before the first step */
    for (int step = 0; step < length; step++) {
        const int t = reverse ? length - 1 - step : step;
        float *next = y + t * hidden;
        linear(x + t * inputs, 1, inputs, hidden, weight_ih, bias_ih, gates);
        linear(h ? h : x, 1, h ? hidden : 0, hidden, weight_hh, bias_hh, next);
        for (int i = 0; i < hidden; i++) next[i] = tanhf(gates[i] + next[i]);
        h = next;
    }
}

/* rnn_tanh with relu. */
static void rnn_relu(const float *x, int length, int inputs, int hidden, const float *weight_ih, const float *weight_hh,
                     const float *bias_ih, const float *bias_hh, int reverse, float *gates, float *y) {
    const float *h = NULL; /* the hidden state; none before the first step */
    for (int step = 0; step < length; step++) {
        const int t = reverse ? length - 1 - step : step;
        float *next = y + t * hidden;
        linear(x + t * inputs, 1, inputs, hidden, weight_ih, bias_ih, gates);
        linear(h ? h : x, 1, h ? hidden : 0, hidden, weight_hh, bias_hh, next);
        for (int i = 0; i < hidden; i++) next[i] = gates[i] + next[i] > 0 ? gates[i] + next[i] : 0;
        h = next;
    }
}

/* A long short-term memory in one direction, as rnn_tanh. gates: memory for 9 hidden numbers. */
static void lstm(const float *x, int length, int inputs, int hidden, const float *weight_ih, const float *weight_hh,
                 const float *bias_ih, const float *bias_hh, int reverse, float *gates, float *y) {
    float *from_x = gates, *from_h = gates + 4 * hidden, *cell = gates + 8 * hidden;
    const float *h = NULL; /* the hidden state; none before the first step */
    for (int i = 0; i < hidden; i++) cell[i] = 0;
    for (int step = 0; step < length; step++) {
        const int t = reverse ? length - 1 - step : step;
        linear(x + t * inputs, 1, inputs, 4 * hidden, weight_ih, bias_ih, from_x);
        linear(h ? h : x, 1, h ? hidden : 0, 4 * hidden, weight_hh, bias_hh, from_h);
        for (int i = 0; i < hidden; i++) {
            const float input = logistic(from_x[i] + from_h[i]);
            const float forget = logistic(from_x[hidden + i] + from_h[hidden + i]);
            const float candidate = tanhf(from_x[2 * hidden + i] + from_h[2 * hidden + i]);
            const float output = logistic(from_x[3 * hidden + i] + from_h[3 * hidden + i]);
            cell[i] = forget * cell[i] + input * candidate;
            y[t * hidden + i] = output * tanhf(cell[i]);
        }
        h = y + t * hidden;
    }
}

/* A gated recurrent unit in one direction, as rnn_tanh. gates: memory for 6 hidden numbers. */
static void gru(const float *x, int length, int inputs, int hidden, const float *weight_ih, const float *weight_hh,
                const float *bias_ih, const float *bias_hh, int reverse, float *gates, float *y) {
    float *from_x = gates, *from_h = gates + 3 * hidden;
    const float *h = NULL; /* the hidden state; none before the first step */
    for (int step = 0; step < length; step++) {
        const int t = reverse ? length - 1 - step : step;
        linear(x + t * inputs, 1, inputs, 3 * hidden, weight_ih, bias_ih, from_x);
        linear(h ? h : x, 1, h ? hidden : 0, 3 * hidden, weight_hh, bias_hh, from_h);
        for (int i = 0; i < hidden; i++) {
            const float reset = logistic(from_x[i] + from_h[i]);
            const float update = logistic(from_x[hidden + i] + from_h[hidden + i]);
            const float candidate = tanhf(from_x[2 * hidden + i] + reset * from_h[2 * hidden + i]);
            y[t * hidden + i] = candidate + update * ((h ? h[i] : 0) - candidate);
        }
        h = y + t * hidden;
    }
}

/* Softmax along the second axis of x (rows, n, columns). y may be x. */
static void softmax(const float *x, int rows, int n, int columns, float *y) {
    for (int line = 0; line < rows * columns; line++) {
        const int at = line / columns * n * columns + line % columns;
        float most = x[at], sum = 0;
        for (int i = 1; i < n; i++) most = x[at + i * columns] > most ? x[at + i * columns] : most;
        for (int i = 0; i < n; i++) sum += y[at + i * columns] = expf(x[at + i * columns] - most);
        for (int i = 0; i < n; i++) y[at + i * columns] /= sum;
    }
}

/* The logarithm of softmax along the second axis of x (rows, n, columns). y may be x. */
static void log_softmax(const float *x, int rows, int n, int columns, float *y) {
    for (int line = 0; line < rows * columns; line++) {
        const int at = line / columns * n * columns + line % columns;
        float most = x[at], sum = 0;
        for (int i = 1; i < n; i++) most = x[at + i * columns] > most ? x[at + i * columns] : most;
        for (int i = 0; i < n; i++) sum += expf(x[at + i * columns] - most);
        for (int i = 0; i < n; i++) y[at + i * columns] = x[at + i * columns] - most - logf(sum);
    }
}

struct heads {
    int count, queries, keys, size; /* size: numbers of a query */
    int causal;                     /* whether query i attends to keys 0 to i only */
    int query_row, query_head, key_row, key_head, row, head; /* steps in queries, in keys and values, in y */
};

/* Attention of each query to the keys, head by head. weights: memory for `keys` numbers. */
static void attention(const struct heads *s, float scale, const float *queries, const float *keys,
                      const float *values, float *weights, float *y) {
    for (int head = 0; head < s->count; head++)
        for (int i = 0; i < s->queries; i++) {
            const int seen = s->causal ? i + 1 : s->keys, size = s->size;
            const float *query = queries + head * s->query_head + i * s->query_row;
            float *out = y + head * s->head + i * s->row;
            for (int other = 0; other < seen; other++) {
                const float *key = keys + head * s->key_head + other * s->key_row;
                weights[other] = 0;
                for (int j = 0; j < size; j++) weights[other] += query[j] * scale * key[j];
            }
            softmax(weights, 1, seen, 1, weights);
            for (int j = 0; j < size; j++) out[j] = 0;
            for (int other = 0; other < seen; other++) {
                const float *value = values + head * s->key_head + other * s->key_row;
                for (int j = 0; j < size; j++) out[j] += weights[other] * value[j];
            }
        }
}

static void copy(const float *x, int n, float *y) {
    memcpy(y, x, sizeof(float) * (size_t)n);
}

/* The normal distribution function. */
static float normal_cdf(float x) {
    return 0.5f * (1 + erff(x * 0.70710678f));
}

/* Quotients and remainders of numbers as in Python and NumPy: rounded down, with the sign of b. */
static float floor_divide(float a, float b) {
    return floorf(a / b);
}

static float floor_remainder(float a, float b) {
    const float remainder = fmodf(a, b);
    return remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder;
}

/* The same of integers; 0 where b is 0. */
static int64_t floor_divide_integers(int64_t a, int64_t b) {
    if (b == 0 || b == -1) return a * b;
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

static int64_t floor_remainder_integers(int64_t a, int64_t b) {
    return b == 0 || b == -1 ? 0 : a - b * floor_divide_integers(a, b);
}

static int64_t integer_power(int64_t base, int64_t exponent) {
    int64_t power = 1;
    for (; exponent > 0; exponent--) power *= base;
    return power;
}

/* The index of the first of the largest numbers, or of the first NaN. */
static int argmax(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++) best = x[best] == x[best] && !(x[i] <= x[best]) ? i : best;
    return best;
}
