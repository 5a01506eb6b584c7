/* Gathers and scatters. T is the type of the elements, U that of the indices.

   All functions return 1 if an index is negative or not below `length`, else 0. They skip such an index. */

#include "common.h"

static inline bool inside(U index, int64_t length) { return index >= 0 && (int64_t)index < length; }

static inline void copy_elements(const T *x, T *y, int64_t n) {
    if (n == 1) /* a gather of single elements is common, and too small for a call */
        *y = *x;
    else
        memcpy(y, x, n * sizeof(T));
}

/* take: y[o][i] = x[o][indices[i]] for x[outer][length][inner]; rows begin to end of y's outer * count. */
static int take_rows(const T *x, const U *indices, T *y, int64_t length, int64_t inner, int64_t count, int64_t begin,
                     int64_t end) {
    int wrong = 0;
    for (int64_t row = begin; row < end; row++) {
        const U index = indices[row % count];
        if (inside(index, length))
            copy_elements(x + (row / count * length + (int64_t)index) * inner, y + row * inner, inner);
        else
            wrong = 1;
    }
    return wrong;
}

int FN(take)(const T *x, const U *indices, T *y, int64_t outer, int64_t length, int64_t inner, int64_t count) {
    return take_rows(x, indices, y, length, inner, count, 0, outer * count);
}

int FN(take_team)(const Team *team, const T *x, const U *indices, T *y, int64_t outer, int64_t length, int64_t inner,
                  int64_t count) {
    int64_t begin, end;
    my_share(team, outer * count, &begin, &end);
    return take_rows(x, indices, y, length, inner, count, begin, end);
}

/* scatter_add, the transpose of take: y[o][indices[i]] += x[o][i]. Rows `low` to `high` of each y[o] are written, so
   that threads can divide them; each reads all indices. The summands of an element are added in the order of i. */
static int scatter_add_rows(const T *x, const U *indices, T *y, int64_t outer, int64_t length, int64_t inner,
                            int64_t count, int64_t low, int64_t high) {
    int wrong = 0;
    for (int64_t o = 0; o < outer; o++, x += count * inner, y += length * inner) {
        memset(y + low * inner, 0, (high - low) * inner * sizeof(T));
        for (int64_t i = 0; i < count; i++) {
            const int64_t index = (int64_t)indices[i];
            if (!inside(indices[i], length))
                wrong = 1;
            else if (low <= index && index < high)
#pragma omp simd
                for (int64_t j = 0; j < inner; j++) y[index * inner + j] += x[i * inner + j];
        }
    }
    return wrong;
}

int FN(scatter_add)(const T *x, const U *indices, T *y, int64_t outer, int64_t length, int64_t inner, int64_t count) {
    return scatter_add_rows(x, indices, y, outer, length, inner, count, 0, length);
}

int FN(scatter_add_team)(const Team *team, const T *x, const U *indices, T *y, int64_t outer, int64_t length,
                         int64_t inner, int64_t count) {
    int64_t begin, end;
    my_share(team, length, &begin, &end);
    return scatter_add_rows(x, indices, y, outer, length, inner, count, begin, end);
}

/* take_along_axis: y[o][i][j] = x[o][indices[o][i][j]][j] for x[outer][length][inner]; rows of y's outer * count. */
static int take_along_rows(const T *x, const U *indices, T *y, int64_t length, int64_t inner, int64_t count,
                           int64_t begin, int64_t end) {
    int wrong = 0;
    for (int64_t row = begin; row < end; row++) {
        const T *source = x + row / count * length * inner;
        for (int64_t j = 0; j < inner; j++) {
            const U index = indices[row * inner + j];
            if (inside(index, length))
                y[row * inner + j] = source[(int64_t)index * inner + j];
            else
                wrong = 1;
        }
    }
    return wrong;
}

int FN(take_along_axis)(const T *x, const U *indices, T *y, int64_t outer, int64_t length, int64_t inner,
                        int64_t count) {
    return take_along_rows(x, indices, y, length, inner, count, 0, outer * count);
}

int FN(take_along_axis_team)(const Team *team, const T *x, const U *indices, T *y, int64_t outer, int64_t length,
                             int64_t inner, int64_t count) {
    int64_t begin, end;
    my_share(team, outer * count, &begin, &end);
    return take_along_rows(x, indices, y, length, inner, count, begin, end);
}

/* scatter_along_axis, its transpose: y[o][indices[o][i][j]][j] += x[o][i][j], in columns j from first to last. */
static int scatter_along_columns(const T *x, const U *indices, T *y, int64_t length, int64_t inner, int64_t count,
                                 int64_t first, int64_t last) {
    int wrong = 0;
    if (last - first == inner) /* all columns: the rows are contiguous */
        memset(y, 0, length * inner * sizeof(T));
    else
        for (int64_t i = 0; i < length; i++) memset(y + i * inner + first, 0, (last - first) * sizeof(T));
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = first; j < last; j++) {
            const U index = indices[i * inner + j];
            if (inside(index, length))
                y[(int64_t)index * inner + j] += x[i * inner + j];
            else
                wrong = 1;
        }
    return wrong;
}

int FN(scatter_along_axis)(const T *x, const U *indices, T *y, int64_t outer, int64_t length, int64_t inner,
                           int64_t count) {
    int wrong = 0;
    for (int64_t o = 0; o < outer; o++)
        wrong |= scatter_along_columns(x + o * count * inner, indices + o * count * inner, y + o * length * inner,
                                       length, inner, count, 0, inner);
    return wrong;
}

/* Threads divide the blocks, or the columns of a single block. */
int FN(scatter_along_axis_team)(const Team *team, const T *x, const U *indices, T *y, int64_t outer, int64_t length,
                                int64_t inner, int64_t count) {
    int64_t begin, end;
    if (outer == 1) {
        my_cache_lines(team, inner, &begin, &end);
        return scatter_along_columns(x, indices, y, length, inner, count, begin, end);
    }
    my_share(team, outer, &begin, &end);
    return FN(scatter_along_axis)(x + begin * count * inner, indices + begin * count * inner,
                                  y + begin * length * inner, end - begin, length, inner, count);
}

/* one_hot: y[i][indices[i]] = 1 and 0 elsewhere in y[count][length]. */
int FN(one_hot)(const U *indices, T *y, int64_t count, int64_t length) {
    int wrong = 0;
    memset(y, 0, count * length * sizeof(T));
    for (int64_t i = 0; i < count; i++)
        if (inside(indices[i], length))
            y[i * length + (int64_t)indices[i]] = 1;
        else
            wrong = 1;
    return wrong;
}

int FN(one_hot_team)(const Team *team, const U *indices, T *y, int64_t count, int64_t length) {
    int64_t begin, end;
    my_share(team, count, &begin, &end);
    return FN(one_hot)(indices + begin, y + begin * length, end - begin, length);
}
