/* Reductions x[a][b][c][d][e][f] to y[a][c][e], over b, d and f; axes of length 1 stand for those that are not there.

   A file that includes this says what is done with the elements, and gets the functions FN(NAME), serial, and
   FN(NAME_team), which needs FEW * PARTS * 8 bytes of scratch:
     NAME   the function's name,
     PART   the type of the partial result of a block of elements,
     TOTAL  that of the result of blocks, where rounding errors add up,
     START  the result of no elements,
     FOLD(result, x)  the result with one element, or one more result, taken in.

   Elements are taken in LANES at a time (along f), or COLUMNS at a time (along e, where f is 1): both are vector
   instructions. What is summed up in which order depends on the lengths alone, never on the number of threads. */

#include "common.h"

enum {
    LANES = 32,
    FEW_LANES = 8, /* for lines shorter than */
    SHORT = 256,
    BLOCK = 64 * LANES, /* elements of a line that make one partial result */
    BLOCK_ROWS = 64,    /* and elements of a column */
    COLUMNS = 256,
    ROWS_AHEAD = 4,  /* how many rows before its own an element of a column is asked for */
    FEW = 64,        /* with at most so many outputs, the elements are divided among the threads instead of them, */
    PARTS = 64,      /* into this many parts, */
    MANY = 64 * 1024 /* where there are at least this many elements */
};

typedef struct {
    int64_t a, b, c, d, e, f;
} Lengths;

/* Asks for n elements of a row: the processor itself does not look beyond the end of a page. */
static inline void fetch(const T *x, int64_t n) {
    for (int64_t i = 0; i < n; i += CACHE_LINE / sizeof(T)) __builtin_prefetch(x + i);
}

/* At most BLOCK elements; `lanes` is a constant, a power of two. */
static inline TOTAL fold_block(const T *x, int64_t n, const int64_t lanes) {
    PART lane[LANES];
    const bool filled = n >= lanes; /* by the first elements, which takes less than by START */
    for (int64_t k = 0; k < lanes; k++) lane[k] = filled ? FOLD(START, x[k]) : START;
    int64_t i = filled ? lanes : 0;
    for (; i + lanes <= n; i += lanes)
        for (int64_t k = 0; k < lanes; k++) lane[k] = FOLD(lane[k], x[i + k]);
    for (int64_t k = 0; i < n; i++, k++) lane[k] = FOLD(lane[k], x[i]);
    UNROLL for (int64_t half = lanes / 2; half > 0; half /= 2)
        for (int64_t k = 0; k < half; k++) lane[k] = FOLD(lane[k], lane[k + half]);
    return lane[0];
}

static TOTAL fold_line(const T *x, int64_t n) {
    if (n < SHORT)
        return fold_block(x, n, FEW_LANES);
    TOTAL total = START;
    for (int64_t i = 0; i < n; i += BLOCK) total = FOLD(total, fold_block(x + i, min_i64(BLOCK, n - i), LANES));
    return total;
}

/* Columns first to first + columns of x[b][c][d][e], at most COLUMNS of them, for one index of c. */
static void fold_columns(const T *x, Lengths n, int64_t columns, TOTAL *total) {
    PART part[COLUMNS];
    for (int64_t j = 0; j < columns; j++) total[j] = START, part[j] = START;
    int64_t rows = 0;
    for (int64_t b = 0; b < n.b; b++)
        for (int64_t d = 0; d < n.d; d++) {
            const T *row = x + (b * n.c * n.d + d) * n.e;
            if (d + ROWS_AHEAD < n.d)
                fetch(row + ROWS_AHEAD * n.e, columns);
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) part[j] = FOLD(part[j], row[j]);
            if (++rows % BLOCK_ROWS == 0)
                for (int64_t j = 0; j < columns; j++) total[j] = FOLD(total[j], part[j]), part[j] = START;
        }
    for (int64_t j = 0; j < columns; j++) total[j] = FOLD(total[j], part[j]);
}

/* The outputs come in units, computed by one thread each: one output, or those of COLUMNS columns. */
static int64_t units_across(Lengths n) { return n.f == 1 ? (n.e + COLUMNS - 1) / COLUMNS : n.e; }

static int64_t count_units(Lengths n) { return n.a * n.c * units_across(n); }

/* The results of a unit; returns how many there are, and in `first` the index in y of the first one. */
static int64_t fold_unit(const T *x, Lengths n, int64_t unit, TOTAL *total, int64_t *first) {
    const int64_t across = units_across(n), ac = unit / across, a = ac / n.c, c = ac % n.c;
    const int64_t e = unit % across * (n.f == 1 ? COLUMNS : 1), columns = n.f == 1 ? min_i64(COLUMNS, n.e - e) : 1;
    x += ((a * n.b * n.c + c) * n.d * n.e + e) * n.f;
    *first = ac * n.e + e;
    if (n.f == 1) {
        fold_columns(x, n, columns, total);
        return columns;
    }
    *total = START;
    for (int64_t b = 0; b < n.b; b++)
        for (int64_t d = 0; d < n.d; d++)
            *total = FOLD(*total, fold_line(x + (b * n.c * n.d + d) * n.e * n.f, n.f));
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

/* Part p of PARTS of x[d][e][f]: of the rows d, or of the one line f where there are not as many rows. */
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

/* All threads: few outputs of many elements. The parts' results meet in the scratch of one of the threads. */
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
        for (int64_t p = 0; p < PARTS; p++) total = FOLD(total, parts[p * n.e + e]);
        y[e] = (U)total;
    }
}

void FN(NAME)(const T *x, U *y, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f) {
    const Lengths n = {a, b, c, d, e, f};
    reduce_units(x, y, n, 0, count_units(n));
}

void FN(PASTE(NAME, _team))(const Team *team, const T *x, U *y, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e,
                            int64_t f) {
    const Lengths n = {a, b, c, d, e, f};
    const bool divisible = n.a * n.b * n.c == 1 && (n.d >= PARTS || n.d * n.e == 1);
    if (divisible && n.e <= FEW && n.d * n.e * n.f >= MANY) {
        reduce_parts(team, x, y, n);
        return;
    }
    int64_t begin, end;
    my_share(team, count_units(n), &begin, &end);
    reduce_units(x, y, n, begin, end);
}
