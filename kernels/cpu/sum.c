/* Sums of T as U, the same type or int64_t. Blocks are summed in U, and their sums in double (or int64_t), so that the
   error of a float sum hardly grows with its length. NumPy's pairwise summation has as small an error. */

#define NAME sum
#define PART U
#define TOTAL TOTAL_OF(U)
#define START 0
#define FOLD(result, x) ((result) + (x))
#define COMBINE FOLD
#define LOSES_NAN false
#include "reduce.h"

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
