/* Positions of the first `count` elements of each row of x[rows][length] in a stable order. NaN is larger than every
   number. A merge sort of positions, which starts from runs sorted by insertion. For a small count, an insertion sort
   that keeps the first `count` positions so far. */

#include "common.h"

enum {
    RUN = 16, /* positions of a run that is sorted by insertion */
    FEW = 32  /* maximum of `count` without a merge sort */
};

SPECIALISED bool goes_before(T a, T b, const bool descending) {
    const T low = descending ? b : a, high = descending ? a : b;
    return low < high || (high != high && low == low);
}

/* Inserts position i into `count` sorted positions, which are less than i: equal elements stay before it. */
SPECIALISED void insert(const T *x, int64_t *order, int64_t count, int64_t i, const bool descending) {
    int64_t k = count;
    for (; k > 0 && goes_before(x[i], x[order[k - 1]], descending); k--) order[k] = order[k - 1];
    order[k] = i;
}

/* Merges two sorted runs, from begin to middle and from middle to end. */
SPECIALISED void merge(const T *x, const int64_t *from, int64_t *to, int64_t begin, int64_t middle, int64_t end,
                       const bool descending) {
    int64_t left = begin, right = middle;
    for (int64_t k = begin; k < end; k++) {
        const bool take_right =
            left == middle || (right < end && goes_before(x[from[right]], x[from[left]], descending));
        to[k] = take_right ? from[right++] : from[left++];
    }
}

/* Sorts the positions of a row; the result is in `from` or in `to`. */
SPECIALISED const int64_t *sorted(const T *x, int64_t *from, int64_t *to, int64_t length, const bool descending) {
    for (int64_t begin = 0; begin < length; begin += RUN)
        for (int64_t i = begin; i < min_i64(begin + RUN, length); i++)
            insert(x, from + begin, i - begin, i, descending);
    for (int64_t run = RUN; run < length; run *= 2) {
        for (int64_t i = 0; i < length; i += 2 * run)
            merge(x, from, to, i, min_i64(i + run, length), min_i64(i + 2 * run, length), descending);
        int64_t *const merged = to;
        to = from, from = merged;
    }
    return from;
}

SPECIALISED void first_of_row(const T *x, int64_t *y, int64_t *buffer, int64_t length, int64_t count,
                              const bool descending) {
    if (count > FEW) {
        memcpy(y, sorted(x, buffer, buffer + length, length, descending), count * sizeof(int64_t));
        return;
    }
    for (int64_t i = 0; i < count; i++) insert(x, y, i, i, descending);
    for (int64_t i = count; i < length && count > 0; i++)
        if (goes_before(x[i], x[y[count - 1]], descending))
            insert(x, y, count - 1, i, descending);
}

/* Threads divide the rows. A thread's scratch holds two lists of positions. */
void FN(argsort_team)(const Team *team, const T *x, int64_t *y, int64_t rows, int64_t length, int64_t count,
                      int64_t descending) {
    int64_t begin, end;
    my_share(team, rows, &begin, &end);
    for (int64_t row = begin; row < end; row++)
        if (descending)
            first_of_row(x + row * length, y + row * count, (int64_t *)team->scratch, length, count, true);
        else
            first_of_row(x + row * length, y + row * count, (int64_t *)team->scratch, length, count, false);
}
