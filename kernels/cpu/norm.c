/* standardize: x[a][b][c][d] to mean 0 and variance 1 over b and d, for each index of a and c, whose mean and variance
   go to mean[a][c] and variance[a][c]. Layer norm is (a, 1, 1, d), batch norm (1, b, c, d).

   The mean is that of the differences to the first element, and the variance is the mean squared deviation from it, in
   a second pass. So no digits cancel, and numbers that are all alike become 0. */

#include "elementary.h"
#include "vectors.h"

enum {
    COLUMNS = 64,
    BLOCK = 1024, /* elements summed in T; the sums of blocks are added in double */
    ROWS = 8      /* short rows that are computed together, so that their sums overlap */
};

typedef struct {
    int64_t a, b, c, d;
} Lengths;

/* The sum of y = x - first, or with `squared` of (y - mean)^2, over `rows` rows of d elements. Rows are `step` apart.
   The sum is in T; there are at most BLOCK elements. */
SPECIALISED double sum_block(const T *x, int64_t rows, int64_t d, int64_t step, T first, T mean, const bool squared) {
    Vector sums[4] = {};
    T rest = 0;
    for (int64_t b = 0; b < rows; b++, x += step) {
        int64_t i = 0;
        for (; i + 4 * LANES <= d; i += 4 * LANES)
            UNROLL for (int j = 0; j < 4; j++) {
                const Vector y = load(x + i + j * LANES) - first;
                sums[j] += squared ? (y - mean) * (y - mean) : y;
            }
        for (; i + LANES <= d; i += LANES) {
            const Vector y = load(x + i) - first;
            sums[0] += squared ? (y - mean) * (y - mean) : y;
        }
        for (; i < d; i++) {
            const T y = x[i] - first;
            rest += squared ? (y - mean) * (y - mean) : y;
        }
    }
    T lane[LANES];
    store(lane, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    UNROLL for (int half = LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++) lane[j] += lane[j + half];
    return rest + lane[0];
}

/* The same for any number of elements: the sums of blocks are added in double. */
SPECIALISED double sum_rows(const T *x, int64_t rows, int64_t d, int64_t step, T first, T mean, const bool squared) {
    const int64_t group = max_i64(BLOCK / max_i64(d, 1), 1);
    double total = 0;
    for (int64_t b = 0; b < rows; b += group)
        for (int64_t i = 0; i < d; i += BLOCK)
            total += sum_block(x + b * step + i, min_i64(group, rows - b), min_i64(BLOCK, d - i), step, first, mean,
                               squared);
    return total;
}

/* `count` neighbouring indices of c, of one a. Each has b rows of d elements. */
static void standardize_rows(const T *x, T *y, T *mean, T *variance, Lengths n, int64_t count, T eps) {
    const int64_t step = n.c * n.d;
    const double elements = (double)(n.b * n.d);
    for (int64_t c = 0; c < count; c++)
        mean[c] = (T)(sum_rows(x + c * n.d, n.b, n.d, step, x[c * n.d], 0, false) / elements);
    for (int64_t c = 0; c < count; c++)
        variance[c] = (T)(sum_rows(x + c * n.d, n.b, n.d, step, x[c * n.d], mean[c], true) / elements);
    for (int64_t c = 0; c < count; c++) {
        const T first = x[c * n.d], centre = mean[c], scale = 1 / sqrt(variance[c] + eps);
        for (int64_t b = 0; b < n.b; b++)
#pragma omp simd
            for (int64_t i = b * step + c * n.d; i < b * step + (c + 1) * n.d; i++)
                y[i] = ((x[i] - first) - centre) * scale;
        mean[c] += first;
    }
}

/* At most COLUMNS columns of b elements, where d is 1. */
static void standardize_columns(const T *x, T *y, T *mean, T *variance, Lengths n, int64_t columns, T eps) {
    double sum[COLUMNS] = {0}, squares[COLUMNS] = {0};
    T first[COLUMNS], scale[COLUMNS]; /* y may be x */
    memcpy(first, x, columns * sizeof(T));
    for (int64_t b = 0; b < n.b; b++)
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) sum[j] += x[b * n.c + j] - first[j];
    for (int64_t j = 0; j < columns; j++) mean[j] = (T)(sum[j] / (double)n.b);
    for (int64_t b = 0; b < n.b; b++)
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) {
            const T deviation = (x[b * n.c + j] - first[j]) - mean[j];
            squares[j] += deviation * deviation;
        }
    for (int64_t j = 0; j < columns; j++) {
        variance[j] = (T)(squares[j] / (double)n.b);
        scale[j] = 1 / sqrt(variance[j] + eps);
    }
    for (int64_t b = 0; b < n.b; b++)
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) y[b * n.c + j] = ((x[b * n.c + j] - first[j]) - mean[j]) * scale[j];
    for (int64_t j = 0; j < columns; j++) mean[j] += first[j];
}

/* Units of work: one (a, c), or COLUMNS columns of one a. */
static int64_t units_across(Lengths n) { return n.d == 1 ? (n.c + COLUMNS - 1) / COLUMNS : n.c; }

static void standardize_units(const T *x, T *y, T *mean, T *variance, Lengths n, T eps, int64_t begin, int64_t end) {
    const int64_t across = units_across(n), most = n.d > 1 && n.b * n.d <= BLOCK ? ROWS : 1;
    for (int64_t unit = begin, count; unit < end; unit += count) {
        const int64_t a = unit / across, c = unit % across * (n.d == 1 ? COLUMNS : 1);
        const int64_t offset = (a * n.b * n.c + c) * n.d, statistic = a * n.c + c;
        count = min_i64(most, min_i64(end - unit, across - unit % across));
        if (n.d == 1)
            standardize_columns(x + offset, y + offset, mean + statistic, variance + statistic, n,
                                min_i64(COLUMNS, n.c - c), eps);
        else
            standardize_rows(x + offset, y + offset, mean + statistic, variance + statistic, n, count, eps);
    }
}

/* With b of 1, a and c are one axis. */
static Lengths lengths(int64_t a, int64_t b, int64_t c, int64_t d) {
    return b == 1 ? (Lengths){1, 1, a * c, d} : (Lengths){a, b, c, d};
}

void FN(standardize)(const T *x, T *y, T *mean, T *variance, int64_t a, int64_t b, int64_t c, int64_t d, double eps) {
    const Lengths n = lengths(a, b, c, d);
    standardize_units(x, y, mean, variance, n, (T)eps, 0, n.a * units_across(n));
}

void FN(standardize_team)(const Team *team, const T *x, T *y, T *mean, T *variance, int64_t a, int64_t b, int64_t c,
                          int64_t d, double eps) {
    const Lengths n = lengths(a, b, c, d);
    int64_t begin, end;
    my_share(team, n.a * units_across(n), &begin, &end);
    standardize_units(x, y, mean, variance, n, (T)eps, begin, end);
}
