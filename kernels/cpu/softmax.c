/* softmax, its logarithm, and the logarithm of sums of exponentials, all shifted by the maximum: e^x never overflows.

   softmax works on x[outer][length][inner] along `length`: along contiguous rows where inner is 1, otherwise down
   COLUMNS neighbouring columns at once. Both are vectorised. The maximum may ignore a NaN, the sum does not. */

#include "common.h"
#include "elementary.h"

enum {
    COLUMNS = 64,
    BLOCK = 1024 /* elements summed in T; the sums of blocks are added in double */
};

static T largest(const T *x, int64_t n) {
    T top = x[0];
#pragma omp simd reduction(max : top)
    for (int64_t i = 1; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* The sum of e^(x - top). The summands are stored in y unless it is NULL. */
static double sum_exponentials(const T *x, T *y, int64_t n, T top) {
    double total = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = min_i64(start + BLOCK, n);
        T sum = 0;
        if (y) {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = start; i < end; i++) {
                const T power = exp(x[i] - top);
                y[i] = power;
                sum += power;
            }
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = start; i < end; i++) sum += exp(x[i] - top);
        }
        total += sum;
    }
    return total;
}

static void softmax_row(const T *x, T *y, int64_t n, bool logarithm) {
    const T top = largest(x, n), sum = (T)sum_exponentials(x, logarithm ? NULL : y, n, top);
    if (logarithm) {
        const T shift = log(sum);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) y[i] = (x[i] - top) - shift;
    } else
#pragma omp simd
        for (int64_t i = 0; i < n; i++) y[i] /= sum;
}

static void raise_columns(T *top, const T *row, int64_t columns) {
#pragma omp simd
    for (int64_t j = 0; j < columns; j++) top[j] = row[j] > top[j] ? row[j] : top[j];
}

/* Not inlined: gcc 12 would hoist the loop's guard out of the caller's loop and then not vectorise. */
static __attribute__((noinline)) void add_exponentials(double *sum, const T *row, const T *top, int64_t columns) {
#pragma omp simd
    for (int64_t j = 0; j < columns; j++) sum[j] += exp(row[j] - top[j]);
}

static void largest_of_columns(const T *x, T *top, int64_t rows, int64_t step, int64_t columns) {
    memcpy(top, x, columns * sizeof(T));
    for (int64_t r = 1; r < rows; r++) raise_columns(top, x + r * step, columns);
}

/* Columns `step` apart, at most COLUMNS of them. */
static void softmax_columns(const T *x, T *y, int64_t rows, int64_t step, int64_t columns) {
    T top[COLUMNS];
    double sum[COLUMNS] = {0};
    largest_of_columns(x, top, rows, step, columns);
    for (int64_t r = 0; r < rows; r++)
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) {
            const T power = exp(x[r * step + j] - top[j]);
            y[r * step + j] = power;
            sum[j] += power;
        }
    for (int64_t r = 0; r < rows; r++)
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) y[r * step + j] /= (T)sum[j];
}

static void log_softmax_columns(const T *x, T *y, int64_t rows, int64_t step, int64_t columns) {
    T top[COLUMNS], shift[COLUMNS];
    double sum[COLUMNS] = {0};
    largest_of_columns(x, top, rows, step, columns);
    for (int64_t r = 0; r < rows; r++) add_exponentials(sum, x + r * step, top, columns);
#pragma omp simd
    for (int64_t j = 0; j < columns; j++) shift[j] = log((T)sum[j]);
    for (int64_t r = 0; r < rows; r++)
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) y[r * step + j] = (x[r * step + j] - top[j]) - shift[j];
}

/* A unit of work, whatever the number of threads, is a row, or COLUMNS columns. */
static int64_t count_units(int64_t outer, int64_t inner) { return outer * ((inner + COLUMNS - 1) / COLUMNS); }

static void softmax_units(const T *x, T *y, int64_t length, int64_t inner, bool logarithm, int64_t begin, int64_t end) {
    const int64_t across = (inner + COLUMNS - 1) / COLUMNS;
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t first = unit % across * COLUMNS, offset = unit / across * length * inner + first;
        const int64_t columns = min_i64(COLUMNS, inner - first);
        if (inner == 1)
            softmax_row(x + offset, y + offset, length, logarithm);
        else
            (logarithm ? log_softmax_columns : softmax_columns)(x + offset, y + offset, length, inner, columns);
    }
}

void FN(softmax)(const T *x, T *y, int64_t outer, int64_t length, int64_t inner, int64_t logarithm) {
    softmax_units(x, y, length, inner, logarithm, 0, count_units(outer, inner));
}

void FN(softmax_team)(const Team *team, const T *x, T *y, int64_t outer, int64_t length, int64_t inner,
                      int64_t logarithm) {
    int64_t begin, end;
    my_share(team, count_units(outer, inner), &begin, &end);
    softmax_units(x, y, length, inner, logarithm, begin, end);
}

/* logsumexp: x[a][b][c][d][e][f] to y[a][c][e]. An output combines b * d rows of f elements. */
typedef struct {
    int64_t a, b, c, d, e, f;
} Lengths;

static const T *row_of(const T *x, Lengths n, int64_t line) {
    return x + (line / n.d * n.c * n.d + line % n.d) * n.e * n.f;
}

/* Where all elements are -inf the sum is 0, and not e^(inf - inf) = NaN. */
static T finite_or_zero(T top) { return top - top == 0 ? top : 0; }

static T logsumexp_rows(const T *x, Lengths n) {
    T top = -INFINITY;
    double sum = 0;
    for (int64_t i = 0; i < n.b * n.d; i++) {
        const T next = largest(row_of(x, n, i), n.f);
        top = next > top ? next : top;
    }
    top = finite_or_zero(top);
    for (int64_t i = 0; i < n.b * n.d; i++) sum += sum_exponentials(row_of(x, n, i), NULL, n.f, top);
    return log((T)sum) + top;
}

/* At most COLUMNS neighbouring outputs, where f is 1. */
static void logsumexp_columns(const T *x, T *y, Lengths n, int64_t columns) {
    T top[COLUMNS];
    double sum[COLUMNS] = {0};
    memcpy(top, x, columns * sizeof(T));
    for (int64_t i = 1; i < n.b * n.d; i++) raise_columns(top, row_of(x, n, i), columns);
    for (int64_t j = 0; j < columns; j++) top[j] = finite_or_zero(top[j]);
    for (int64_t i = 0; i < n.b * n.d; i++) add_exponentials(sum, row_of(x, n, i), top, columns);
#pragma omp simd
    for (int64_t j = 0; j < columns; j++) y[j] = log((T)sum[j]) + top[j];
}

/* Units of work: an output, or COLUMNS outputs. */
static int64_t logsumexp_across(Lengths n) { return n.f == 1 ? (n.e + COLUMNS - 1) / COLUMNS : n.e; }

static void logsumexp_units(const T *x, T *y, Lengths n, int64_t begin, int64_t end) {
    const int64_t across = logsumexp_across(n);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t ac = unit / across, e = unit % across * (n.f == 1 ? COLUMNS : 1);
        const T *start = x + ((ac / n.c * n.b * n.c + ac % n.c) * n.d * n.e + e) * n.f;
        if (n.f == 1)
            logsumexp_columns(start, y + ac * n.e + e, n, min_i64(COLUMNS, n.e - e));
        else
            y[ac * n.e + e] = logsumexp_rows(start, n);
    }
}

void FN(logsumexp)(const T *x, T *y, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f) {
    const Lengths n = {a, b, c, d, e, f};
    logsumexp_units(x, y, n, 0, a * c * logsumexp_across(n));
}

void FN(logsumexp_team)(const Team *team, const T *x, T *y, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e,
                        int64_t f) {
    const Lengths n = {a, b, c, d, e, f};
    int64_t begin, end;
    my_share(team, a * c * logsumexp_across(n), &begin, &end);
    logsumexp_units(x, y, n, begin, end);
}
