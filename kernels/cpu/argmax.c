/* Position of the largest element along `length` of x[outer][length][inner]. */

#include "common.h"

/* Of `lines` lines, line i is that of column i % inner of block i / inner. */
static const T *line_of(const T *x, int64_t line, int64_t length, int64_t inner) {
    return x + line / inner * length * inner + line % inner;
}

/* The first of the largest, or of the NaNs if there are any. */
static int64_t position_of_largest(const T *x, int64_t length, int64_t step) {
    int64_t best = 0;
    for (int64_t i = 1; i < length; i++) {
        const T value = x[i * step], top = x[best * step];
        if (value > top || (value != value && top == top))
            best = i;
    }
    return best;
}

/* The same where neighbours are compared: the largest first, which is vector instructions, then where it stands. */
static int64_t position_in_line(const T *x, int64_t length) {
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

static void argmax_lines(const T *x, int64_t *y, int64_t length, int64_t inner, int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; line++) {
        const T *start = line_of(x, line, length, inner);
        y[line] = inner == 1 ? position_in_line(start, length) : position_of_largest(start, length, inner);
    }
}

void FN(argmax)(const T *x, int64_t *y, int64_t outer, int64_t length, int64_t inner) {
    argmax_lines(x, y, length, inner, 0, outer * inner);
}

void FN(argmax_team)(const Team *team, const T *x, int64_t *y, int64_t outer, int64_t length, int64_t inner) {
    int64_t begin, end;
    my_share(team, outer * inner, &begin, &end);
    argmax_lines(x, y, length, inner, begin, end);
}
