/* Running sums of T as U along `length` of x[outer][length][inner], from the end with `reverse`. */

#include "common.h"

typedef TOTAL_OF(U) Total;

enum {
    COLUMNS = 64,
    ROWS = 4
};

/* At most ROWS rows at once: their sums are independent, so that the additions overlap. */
SPECIALISED void cumsum_rows(const T *x, U *y, int64_t length, bool reverse, const int rows) {
    Total sum[ROWS] = {0};
    for (int64_t i = 0; i < length; i++) {
        const int64_t at = reverse ? length - 1 - i : i;
        for (int k = 0; k < rows; k++) y[k * length + at] = (U)(sum[k] += x[k * length + at]);
    }
}

/* At most COLUMNS neighbouring columns at once. */
static void cumsum_columns(const T *x, U *y, int64_t length, int64_t inner, int64_t columns, bool reverse) {
    const int64_t step = reverse ? -inner : inner, start = reverse ? (length - 1) * inner : 0;
    Total total[COLUMNS] = {0};
    for (int64_t i = 0; i < length; i++) {
        const T *row = x + start + i * step;
        U *sum = y + start + i * step;
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) sum[j] = (U)(total[j] += row[j]);
    }
}

/* Units of work: ROWS rows, or COLUMNS columns. */
static int64_t count_units(int64_t outer, int64_t inner) {
    return inner == 1 ? (outer + ROWS - 1) / ROWS : outer * ((inner + COLUMNS - 1) / COLUMNS);
}

static void rows_unit(const T *x, U *y, int64_t outer, int64_t length, bool reverse, int64_t unit) {
    const int64_t first = unit * ROWS, last = min_i64(first + ROWS, outer);
    if (last - first == ROWS)
        cumsum_rows(x + first * length, y + first * length, length, reverse, ROWS);
    else
        for (int64_t line = first; line < last; line++)
            cumsum_rows(x + line * length, y + line * length, length, reverse, 1);
}

static void columns_unit(const T *x, U *y, int64_t length, int64_t inner, bool reverse, int64_t unit) {
    const int64_t across = (inner + COLUMNS - 1) / COLUMNS, first = unit % across * COLUMNS;
    const int64_t offset = unit / across * length * inner + first;
    cumsum_columns(x + offset, y + offset, length, inner, min_i64(COLUMNS, inner - first), reverse);
}

static void cumsum_units(const T *x, U *y, int64_t outer, int64_t length, int64_t inner, bool reverse, int64_t begin,
                         int64_t end) {
    for (int64_t unit = begin; unit < end; unit++)
        if (inner == 1)
            rows_unit(x, y, outer, length, reverse, unit);
        else
            columns_unit(x, y, length, inner, reverse, unit);
}

void FN(cumsum)(const T *x, U *y, int64_t outer, int64_t length, int64_t inner, int64_t reverse) {
    cumsum_units(x, y, outer, length, inner, reverse, 0, count_units(outer, inner));
}

void FN(cumsum_team)(const Team *team, const T *x, U *y, int64_t outer, int64_t length, int64_t inner,
                     int64_t reverse) {
    int64_t begin, end;
    my_share(team, count_units(outer, inner), &begin, &end);
    cumsum_units(x, y, outer, length, inner, reverse, begin, end);
}
