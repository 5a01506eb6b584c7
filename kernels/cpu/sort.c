/* Positions of the elements of each row of x[rows][length] in a stable order. NaN is larger than every number. A merge
   sort of positions, from runs that an insertion sort has sorted. */

#include "common.h"

enum { RUN = 16 }; /* elements that the insertion sort sorts */

SPECIALISED bool goes_before(T a, T b, const bool descending) {
    const T low = descending ? b : a, high = descending ? a : b;
    return low < high || (high != high && low == low);
}

SPECIALISED void sort_run(const T *x, int64_t *order, int64_t begin, int64_t end, const bool descending) {
    for (int64_t i = begin; i < end; i++) {
        int64_t k = i;
        for (; k > begin && goes_before(x[i], x[order[k - 1]], descending); k--) order[k] = order[k - 1];
        order[k] = i;
    }
}

/* Two sorted runs, from begin to middle and from middle to end, become one. */
SPECIALISED void merge(const T *x, const int64_t *from, int64_t *to, int64_t begin, int64_t middle, int64_t end,
                       const bool descending) {
    int64_t left = begin, right = middle;
    for (int64_t k = begin; k < end; k++) {
        const bool take_right =
            left == middle || (right < end && goes_before(x[from[right]], x[from[left]], descending));
        to[k] = take_right ? from[right++] : from[left++];
    }
}

SPECIALISED void sort_row(const T *x, int64_t *y, int64_t *buffer, int64_t length, const bool descending) {
    for (int64_t i = 0; i < length; i += RUN) sort_run(x, y, i, min_i64(i + RUN, length), descending);
    int64_t *from = y, *to = buffer;
    for (int64_t run = RUN; run < length; run *= 2) {
        for (int64_t i = 0; i < length; i += 2 * run)
            merge(x, from, to, i, min_i64(i + run, length), min_i64(i + 2 * run, length), descending);
        int64_t *const merged = to;
        to = from, from = merged;
    }
    if (from != y)
        memcpy(y, from, length * sizeof(int64_t));
}

/* Threads divide the rows. The scratch memory of each takes the positions of one row. */
void FN(argsort_team)(const Team *team, const T *x, int64_t *y, int64_t rows, int64_t length, int64_t descending) {
    int64_t begin, end;
    my_share(team, rows, &begin, &end);
    for (int64_t row = begin; row < end; row++)
        if (descending)
            sort_row(x + row * length, y + row * length, (int64_t *)team->scratch, length, true);
        else
            sort_row(x + row * length, y + row * length, (int64_t *)team->scratch, length, false);
}
