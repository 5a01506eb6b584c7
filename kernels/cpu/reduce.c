/* Sums, and largest or smallest elements: reductions x[a][b][c][d][e][f] to y[a][c][e], over b, d and f. Absent axes have
   length 1. The macro SUM, MAX or MIN chooses the reduction, whose name is NAME: FN(NAME) is for one thread; FN(NAME_team)
   needs MAX_SPLIT_OUTPUTS * PARTS * 8 bytes of scratch.

   Sums of T have the type U: T or int64_t. Blocks are summed in U, and their sums in double (or int64_t), so that the
   error of a float sum hardly grows with its length. NumPy's pairwise summation has as small an error.

   The largest and smallest elements are NaN if an element is: no comparison replaces it.

   Rows (along f) are combined LANES elements at a time, columns (along e, where f is 1) COLUMNS at a time; both become
   vector instructions. The order of summation depends on the lengths alone, never on the number of threads. */

#include "common.h"

/* PART: the type of the partial result of a block of elements. TOTAL: that of the result of blocks, in which rounding
   errors add up. START: the result of no elements. FOLD combines a result with an element, COMBINE two results.
   LOSES_NAN: whether FOLD may lose a NaN that COMBINE keeps. Elements are then also added, and those whose sum is NaN are
   combined once more, by COMBINE. */
#ifdef SUM
#define NAME sum
#define PART U
#define TOTAL TOTAL_OF(U)
#define START 0
#define FOLD(result, x) ((result) + (x))
#define COMBINE FOLD
#define LOSES_NAN false
#else
#define U T
#define PART T
#define TOTAL T
#define LOSES_NAN _Generic((T)0, float: true, double: true, default: false)
#endif
#ifdef MAX
#define NAME max
#define START                                                                                              \
    _Generic((T)0, float: -__builtin_inff(), double: -__builtin_inf(), int64_t: INT64_MIN, int32_t: INT32_MIN, \
             default: (T)0)
#define FOLD(result, x) ((x) > (result) ? (x) : (result))
#define COMBINE(result, x) ((x) > (result) || (x) != (x) ? (x) : (result))
#endif
#ifdef MIN
#define NAME min
#define START                                                                                            \
    _Generic((T)0, float: __builtin_inff(), double: __builtin_inf(), int64_t: INT64_MAX, int32_t: INT32_MAX, \
             default: (T)UINT32_MAX)
#define FOLD(result, x) ((x) < (result) ? (x) : (result))
#define COMBINE(result, x) ((x) < (result) || (x) != (x) ? (x) : (result))
#endif

enum {
    LANES = 32,
    FEW_LANES = 4,      /* for the elements that fill no group of LANES */
    BLOCK = 64 * LANES, /* elements of a row that make one partial result */
    BLOCK_ROWS = 64,    /* elements of a column that make one */
    COLUMNS = 1024,     /* maximum of neighbouring columns of a unit of work */
    MIN_COLUMNS = 64,
    ROWS = 4, /* rows that are combined at once down columns */
    /* Where there are few outputs of many elements, threads divide the elements, in PARTS parts. */
    MAX_SPLIT_OUTPUTS = 64,
    PARTS = 64,
    MIN_SPLIT_ELEMENTS = 64 * 1024
};

typedef struct {
    int64_t a, b, c, d, e, f;
    int64_t columns; /* of a unit of work */
} Lengths;

/* Combines the elements from x[i] to x[n - 1] in groups of `lanes`, a constant power of two, and adds the result to
   `result` and `sum`. Returns the index of the first element that is in no group. */
SPECIALISED int64_t fold_groups(const T *x, int64_t i, int64_t n, const int64_t lanes, PART *result, T *sum) {
    if (i + lanes > n)
        return i;
    PART lane[LANES];
    T added[LANES]; /* only where LOSES_NAN */
    for (int64_t k = 0; k < lanes; k++) lane[k] = FOLD(START, x[i + k]), added[k] = x[i + k];
    for (i += lanes; i + lanes <= n; i += lanes)
        for (int64_t k = 0; k < lanes; k++) {
            lane[k] = FOLD(lane[k], x[i + k]);
            if (LOSES_NAN) added[k] += x[i + k];
        }
    UNROLL for (int64_t half = lanes / 2; half > 0; half /= 2)
        for (int64_t k = 0; k < half; k++) {
            lane[k] = FOLD(lane[k], lane[k + half]);
            if (LOSES_NAN) added[k] += added[k + half];
        }
    *result = FOLD(*result, lane[0]);
    *sum += added[0];
    return i;
}

/* At most BLOCK elements. */
static inline TOTAL fold_block(const T *x, int64_t n) {
    PART result = START;
    T sum = 0;
    int64_t i = fold_groups(x, 0, n, LANES, &result, &sum);
    i = fold_groups(x, i, n, FEW_LANES, &result, &sum);
    for (; i < n; i++) result = FOLD(result, x[i]), sum += x[i];
    if (LOSES_NAN && sum != sum)
        for (i = 0; i < n; i++) result = COMBINE(result, x[i]);
    return result;
}

static TOTAL fold_row(const T *x, int64_t n) {
    TOTAL total = START;
    for (int64_t i = 0; i < n; i += BLOCK) total = COMBINE(total, fold_block(x + i, min_i64(BLOCK, n - i)));
    return total;
}

/* The next `rows` rows, a constant up to ROWS, `step` apart. */
SPECIALISED void fold_rows(const T *x, const int rows, int64_t step, int64_t columns, PART *part, T *sum) {
#pragma omp simd
    for (int64_t j = 0; j < columns; j++) {
        PART result = part[j];
        T added = sum[j];
        UNROLL for (int r = 0; r < rows; r++) {
            result = FOLD(result, x[r * step + j]);
            added += x[r * step + j];
        }
        part[j] = result;
        if (LOSES_NAN) sum[j] = added;
    }
}

/* Columns first to first + columns of x[b][c][d][e], at most COLUMNS of them, for one index of c. */
static void fold_columns(const T *x, Lengths n, int64_t columns, TOTAL *total) {
    PART part[COLUMNS];
    T sum[COLUMNS];
    for (int64_t j = 0; j < columns; j++) total[j] = START, part[j] = START, sum[j] = 0;
    const int64_t step = n.e;
    int64_t rows = 0;
    for (int64_t b = 0; b < n.b; b++) {
        const T *row = x + b * n.c * n.d * step;
        for (int64_t d = 0; d < n.d;) {
            const int64_t count = n.d - d < ROWS ? 1 : ROWS;
            if (count == ROWS)
                fold_rows(row, ROWS, step, columns, part, sum);
            else
                fold_rows(row, 1, step, columns, part, sum);
            d += count, rows += count, row += count * step;
            if (rows >= BLOCK_ROWS) {
                for (int64_t j = 0; j < columns; j++) total[j] = COMBINE(total[j], part[j]), part[j] = START;
                rows = 0;
            }
        }
    }
    bool lost = false;
    for (int64_t j = 0; j < columns; j++) total[j] = COMBINE(total[j], part[j]), lost |= sum[j] != sum[j];
    if (LOSES_NAN && lost)
        for (int64_t i = 0; i < n.b * n.d; i++)
            for (int64_t j = 0; j < columns; j++)
                total[j] = COMBINE(total[j], x[(i / n.d * n.c * n.d + i % n.d) * step + j]);
}

/* The columns of a unit of work if `threads` divide the columns: many, so that long pieces of rows are read. */
static int64_t unit_columns(int64_t e, int64_t threads) {
    const int64_t units = max_i64((e + COLUMNS * threads - 1) / (COLUMNS * threads), 1) * threads;
    return max_i64((e + MIN_COLUMNS * units - 1) / (MIN_COLUMNS * units), 1) * MIN_COLUMNS;
}

/* A unit of work is one output, or the outputs of some columns. One thread computes it. */
static int64_t units_across(Lengths n) { return n.f == 1 ? (n.e + n.columns - 1) / n.columns : n.e; }

static int64_t count_units(Lengths n) { return n.a * n.c * units_across(n); }

/* Computes the results of a unit. Returns how many there are; `first` becomes the index in y of the first. */
static int64_t fold_unit(const T *x, Lengths n, int64_t unit, TOTAL *total, int64_t *first) {
    if (n.b * n.d == 1 && n.f > 1) { /* rows one after the other: no divisions */
        *first = unit;
        *total = fold_row(x + unit * n.f, n.f);
        return 1;
    }
    const int64_t across = units_across(n), ac = unit / across, a = ac / n.c, c = ac % n.c;
    const int64_t e = unit % across * (n.f == 1 ? n.columns : 1);
    const int64_t columns = n.f == 1 ? min_i64(n.columns, n.e - e) : 1;
    x += ((a * n.b * n.c + c) * n.d * n.e + e) * n.f;
    *first = ac * n.e + e;
    if (n.f == 1) {
        fold_columns(x, n, columns, total);
        return columns;
    }
    *total = START;
    for (int64_t b = 0; b < n.b; b++)
        for (int64_t d = 0; d < n.d; d++)
            *total = COMBINE(*total, fold_row(x + (b * n.c * n.d + d) * n.e * n.f, n.f));
    return 1;
}

static void reduce_units(const T *x, U *y, Lengths n, int64_t begin, int64_t end) {
    TOTAL total[COLUMNS];
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t first;
        const int64_t count = fold_unit(x, n, unit, total, &first);
        for (int64_t j = 0; j < count; j++) y[first + j] = (U)total[j];
    }
}

/* Part p of PARTS of x[d][e][f]: some of the rows d, or some elements of the only row f. */
static void fold_part(const T *x, Lengths n, int64_t p, TOTAL *total) {
    const int64_t count = n.d >= PARTS ? n.d : n.f;
    const int64_t begin = count * p / PARTS, end = count * (p + 1) / PARTS;
    Lengths part = n;
    *(n.d >= PARTS ? &part.d : &part.f) = end - begin;
    x += begin * (n.d >= PARTS ? n.e * n.f : 1);
    for (int64_t unit = 0; unit < count_units(part); unit++) {
        int64_t first;
        TOTAL found[COLUMNS];
        const int64_t outputs = fold_unit(x, part, unit, found, &first);
        memcpy(total + first, found, outputs * sizeof(TOTAL));
    }
}

/* Few outputs of many elements, by all threads. One thread's scratch takes the parts' results; it combines them. */
static void reduce_parts(const Team *team, const T *x, U *y, Lengths n) {
    TOTAL *parts;
#pragma omp single copyprivate(parts)
    parts = (TOTAL *)team->scratch;
    int64_t begin, end;
    my_share(team, PARTS, &begin, &end);
    for (int64_t p = begin; p < end; p++) fold_part(x, n, p, parts + p * n.e);
#pragma omp barrier
    if ((char *)parts != team->scratch)
        return;
    for (int64_t e = 0; e < n.e; e++) {
        TOTAL total = START;
        for (int64_t p = 0; p < PARTS; p++) total = COMBINE(total, parts[p * n.e + e]);
        y[e] = (U)total;
    }
}

void FN(NAME)(const T *x, U *y, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f) {
    const Lengths n = {a, b, c, d, e, f, COLUMNS};
    reduce_units(x, y, n, 0, count_units(n));
}

void FN(PASTE(NAME, _team))(const Team *team, const T *x, U *y, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e,
                            int64_t f) {
    const Lengths n = {a, b, c, d, e, f, unit_columns(e, a * c >= team->threads ? 1 : team->threads)};
    const bool divisible = n.a * n.b * n.c == 1 && (n.d >= PARTS || n.d * n.e == 1);
    if (divisible && n.e <= MAX_SPLIT_OUTPUTS && n.d * n.e * n.f >= MIN_SPLIT_ELEMENTS) {
        reduce_parts(team, x, y, n);
        return;
    }
    int64_t begin, end;
    my_share(team, count_units(n), &begin, &end);
    reduce_units(x, y, n, begin, end);
}

#ifdef SUM
/* Adds the sums to y. */
void FN(sum_into)(const T *x, U *y, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f) {
    if (b * d * f == 1) { /* one element per output: the common case of a sum over items */
#pragma omp simd
        for (int64_t i = 0; i < a * c * e; i++) y[i] += (U)x[i];
        return;
    }
    if (b * d == 1 && f > 1) { /* rows one after the other */
        for (int64_t i = 0; i < a * c * e; i++) y[i] += (U)fold_row(x + i * f, f);
        return;
    }
    const Lengths n = {a, b, c, d, e, f, COLUMNS};
    TOTAL total[COLUMNS];
    for (int64_t unit = 0; unit < count_units(n); unit++) {
        int64_t first;
        const int64_t count = fold_unit(x, n, unit, total, &first);
        for (int64_t j = 0; j < count; j++) y[first + j] += (U)total[j];
    }
}
#endif
