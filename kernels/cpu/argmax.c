/* Position of the largest element along `length` of x[outer][length][inner]. */

#include "common.h"

/* Slice i is column i % inner of block i / inner. */
static const T *slice_of(const T *x, int64_t slice, int64_t length, int64_t inner) {
    return x + slice / inner * length * inner + slice % inner;
}

/* The first of the largest elements, or the first NaN. */
static int64_t position_of_largest(const T *x, int64_t length, int64_t step) {
    int64_t best = 0;
    for (int64_t i = 1; i < length; i++) {
        const T value = x[i * step], top = x[best * step];
        if (value > top || (value != value && top == top))
            best = i;
    }
    return best;
}

/* The same for contiguous elements: first the largest, by vector instructions, then its position. */
static int64_t position_in_row(const T *x, int64_t length) {
    T top = x[0];
#pragma omp simd reduction(max : top)
    for (int64_t i = 1; i < length; i++) top = x[i] > top ? x[i] : top;
    int nan = 0;
#pragma omp simd reduction(| : nan)
    for (int64_t i = 0; i < length; i++) nan |= x[i] != x[i];
    if (nan)
        return position_of_largest(x, length, 1);
    int64_t i = 0;
    while (x[i] != top) i++;
    return i;
}

static void argmax_slices(const T *x, int64_t *y, int64_t length, int64_t inner, int64_t begin, int64_t end) {
    for (int64_t slice = begin; slice < end; slice++) {
        const T *start = slice_of(x, slice, length, inner);
        y[slice] = inner == 1 ? position_in_row(start, length) : position_of_largest(start, length, inner);
    }
}

void FN(argmax)(const T *x, int64_t *y, int64_t outer, int64_t length, int64_t inner) {
    argmax_slices(x, y, length, inner, 0, outer * inner);
}

void FN(argmax_team)(const Team *team, const T *x, int64_t *y, int64_t outer, int64_t length, int64_t inner) {
    int64_t begin, end;
    my_share(team, outer * inner, &begin, &end);
    argmax_slices(x, y, length, inner, begin, end);
}
