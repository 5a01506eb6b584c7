/* standardize: x[a][b][c][d] to mean 0 and variance 1 over b and d, for each index of a and c, whose mean and variance
   go to mean[a][c] and variance[a][c]. Layer norm is (a, 1, 1, d), batch norm (1, b, c, d).

   The variance is the mean squared deviation from the mean, in a second pass, so that no digits cancel. */

#include "common.h"
#include "elementary.h"

enum {
    COLUMNS = 64,
    BLOCK = 1024 /* elements summed in T; the sums of blocks are added in double */
};

typedef struct {
    int64_t a, b, c, d;
} Lengths;

static double sum_row(const T *x, int64_t n) {
    double total = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = start; i < min_i64(start + BLOCK, n); i++) sum += x[i];
        total += sum;
    }
    return total;
}

static double sum_squares(const T *x, int64_t n, T centre) {
    double total = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = start; i < min_i64(start + BLOCK, n); i++) sum += (x[i] - centre) * (x[i] - centre);
        total += sum;
    }
    return total;
}

/* b rows of d elements, `step` apart. */
static void standardize_rows(const T *x, T *y, T *mean, T *variance, Lengths n, T eps) {
    const int64_t step = n.c * n.d;
    double sum = 0, squares = 0;
    for (int64_t b = 0; b < n.b; b++) sum += sum_row(x + b * step, n.d);
    const T centre = *mean = (T)(sum / (double)(n.b * n.d));
    for (int64_t b = 0; b < n.b; b++) squares += sum_squares(x + b * step, n.d, centre);
    *variance = (T)(squares / (double)(n.b * n.d));
    const T scale = 1 / sqrt(*variance + eps);
    for (int64_t b = 0; b < n.b; b++)
#pragma omp simd
        for (int64_t i = b * step; i < b * step + n.d; i++) y[i] = (x[i] - centre) * scale;
}

/* At most COLUMNS columns of b elements, where d is 1. */
static void standardize_columns(const T *x, T *y, T *mean, T *variance, Lengths n, int64_t columns, T eps) {
    double sum[COLUMNS] = {0}, squares[COLUMNS] = {0};
    T scale[COLUMNS];
    for (int64_t b = 0; b < n.b; b++)
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) sum[j] += x[b * n.c + j];
    for (int64_t j = 0; j < columns; j++) mean[j] = (T)(sum[j] / (double)n.b);
    for (int64_t b = 0; b < n.b; b++)
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) {
            const T deviation = x[b * n.c + j] - mean[j];
            squares[j] += deviation * deviation;
        }
    for (int64_t j = 0; j < columns; j++) {
        variance[j] = (T)(squares[j] / (double)n.b);
        scale[j] = 1 / sqrt(variance[j] + eps);
    }
    for (int64_t b = 0; b < n.b; b++)
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) y[b * n.c + j] = (x[b * n.c + j] - mean[j]) * scale[j];
}

/* Units of work: one (a, c), or COLUMNS columns of one a. */
static int64_t units_across(Lengths n) { return n.d == 1 ? (n.c + COLUMNS - 1) / COLUMNS : n.c; }

static void standardize_units(const T *x, T *y, T *mean, T *variance, Lengths n, T eps, int64_t begin, int64_t end) {
    const int64_t across = units_across(n);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t a = unit / across, c = unit % across * (n.d == 1 ? COLUMNS : 1);
        const int64_t offset = (a * n.b * n.c + c) * n.d, statistic = a * n.c + c;
        if (n.d == 1)
            standardize_columns(x + offset, y + offset, mean + statistic, variance + statistic, n,
                                min_i64(COLUMNS, n.c - c), eps);
        else
            standardize_rows(x + offset, y + offset, mean + statistic, variance + statistic, n, eps);
    }
}

void FN(standardize)(const T *x, T *y, T *mean, T *variance, int64_t a, int64_t b, int64_t c, int64_t d, double eps) {
    const Lengths n = {a, b, c, d};
    standardize_units(x, y, mean, variance, n, (T)eps, 0, a * units_across(n));
}

void FN(standardize_team)(const Team *team, const T *x, T *y, T *mean, T *variance, int64_t a, int64_t b, int64_t c,
                          int64_t d, double eps) {
    const Lengths n = {a, b, c, d};
    int64_t begin, end;
    my_share(team, a * units_across(n), &begin, &end);
    standardize_units(x, y, mean, variance, n, (T)eps, begin, end);
}
