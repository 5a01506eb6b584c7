/* Running sums of T as U along `length` of x[outer][length][inner], from the end with `reverse`. */

#include "common.h"

enum { COLUMNS = 64 };

static void cumsum_line(const T *x, U *y, int64_t length, bool reverse) {
    U sum = 0;
    for (int64_t i = 0; i < length; i++) {
        const int64_t at = reverse ? length - 1 - i : i;
        y[at] = sum += (U)x[at];
    }
}

/* Neighbouring columns at once, each row being the one before it plus the elements. */
static void cumsum_columns(const T *x, U *y, int64_t length, int64_t inner, int64_t columns, int64_t reverse) {
    const int64_t step = reverse ? -inner : inner, start = reverse ? (length - 1) * inner : 0;
    if (length == 0)
        return;
    x += start;
    y += start;
    for (int64_t j = 0; j < columns; j++) y[j] = (U)x[j];
    for (int64_t i = 1; i < length; i++) {
        const T *row = x + i * step;
        U *sum = y + i * step;
        const U *before = sum - step;
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) sum[j] = before[j] + (U)row[j];
    }
}

static int64_t count_units(int64_t outer, int64_t inner) { return outer * ((inner + COLUMNS - 1) / COLUMNS); }

static void cumsum_units(const T *x, U *y, int64_t length, int64_t inner, int64_t reverse, int64_t begin, int64_t end) {
    const int64_t across = (inner + COLUMNS - 1) / COLUMNS;
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t first = unit % across * COLUMNS, offset = unit / across * length * inner + first;
        if (inner == 1)
            cumsum_line(x + offset, y + offset, length, reverse);
        else
            cumsum_columns(x + offset, y + offset, length, inner, min_i64(COLUMNS, inner - first), reverse);
    }
}

void FN(cumsum)(const T *x, U *y, int64_t outer, int64_t length, int64_t inner, int64_t reverse) {
    cumsum_units(x, y, length, inner, reverse, 0, count_units(outer, inner));
}

void FN(cumsum_team)(const Team *team, const T *x, U *y, int64_t outer, int64_t length, int64_t inner,
                     int64_t reverse) {
    int64_t begin, end;
    my_share(team, count_units(outer, inner), &begin, &end);
    cumsum_units(x, y, length, inner, reverse, begin, end);
}
