/* Gathers and scatters. T is the type of the elements, U that of the indices.

   All functions return 1 if an index is negative or not below `length`, else 0. They skip such an index. */

#include "common.h"

static inline bool inside(U index, int64_t length) { return index >= 0 && (int64_t)index < length; }

/* take: y[o][i] = x[o][indices[i]] for x[outer][length][inner]; rows begin to end of y's outer * count. */
static int take_rows(const T *x, const U *indices, T *y, int64_t length, int64_t inner, int64_t count, int64_t begin,
                     int64_t end) {
    int wrong = 0;
    for (int64_t i = 0; i < count; i++) wrong |= !inside(indices[i], length);
    for (int64_t row = begin; row < end;) {
        const int64_t first = row % count, last = min_i64(count, first + end - row);
        const T *source = x + row / count * length * inner;
        T *to = y + (row - first) * inner;
        if (inner == 1 && !wrong)
            for (int64_t i = first; i < last; i++) to[i] = source[(int64_t)indices[i]];
        else
            for (int64_t i = first; i < last; i++)
                if (inside(indices[i], length))
                    memcpy(to + i * inner, source + (int64_t)indices[i] * inner, inner * sizeof(T));
        row += last - first;
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

/* scatter_add, the transpose of take: y[o][indices[i]] += x[o][i]. The summands of an element are added in the order of
   i, more than FEW of them in Total. */
typedef TOTAL_OF(T) Total;

enum {
    FEW = 64,     /* maximum of summands of an element that are added in T */
    COLUMNS = 64, /* columns that are summed at once */
    LINES = 4,    /* arrays y[o] that are summed side by side */
    SMALL = 4096  /* maximum of elements of y whose sums are all on the stack */
};

/* The sum of the rows order[0] to order[count - 1] of x, in Total. */
static void sum_rows(const T *x, T *y, int64_t inner, const int64_t *order, int64_t count) {
    for (int64_t first = 0; first < inner; first += COLUMNS) {
        const int64_t columns = min_i64(COLUMNS, inner - first);
        Total total[COLUMNS] = {0};
        for (int64_t k = 0; k < count; k++)
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) total[j] += x[order[k] * inner + first + j];
        for (int64_t j = 0; j < columns; j++) y[first + j] = (T)total[j];
    }
}

/* Rows low to high of y, summed in T. */
static void scatter_add_few(const T *x, const U *indices, T *y, int64_t inner, int64_t count, int64_t low,
                            int64_t high) {
    memset(y + low * inner, 0, (high - low) * inner * sizeof(T));
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = (int64_t)indices[i];
        if (low <= index && index < high)
#pragma omp simd
            for (int64_t j = 0; j < inner; j++) y[index * inner + j] += x[i * inner + j];
    }
}

/* Rows low to high of y, at most SMALL elements, summed in Total. */
static void scatter_add_small(const T *x, const U *indices, T *y, int64_t inner, int64_t count, int64_t low,
                              int64_t high) {
    Total total[SMALL];
    for (int64_t j = 0; j < (high - low) * inner; j++) total[j] = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = (int64_t)indices[i];
        if (index < low || index >= high) continue;
        if (inner == 1) {
            total[index - low] += x[i];
            continue;
        }
#pragma omp simd
        for (int64_t j = 0; j < inner; j++) total[(index - low) * inner + j] += x[i * inner + j];
    }
    for (int64_t j = 0; j < (high - low) * inner; j++) y[low * inner + j] = (T)total[j];
}

/* LINES arrays y[o], for inner = 1, summed in Total side by side: an index is read once for all of them. */
static void scatter_add_lines(const T *x, const U *indices, T *y, int64_t length, int64_t count) {
    Total total[SMALL];
    for (int64_t j = 0; j < length * LINES; j++) total[j] = 0;
    for (int64_t i = 0; i < count; i++) {
        Total *line = total + (int64_t)indices[i] * LINES;
        for (int r = 0; r < LINES; r++) line[r] += x[r * count + i];
    }
    for (int r = 0; r < LINES; r++)
        for (int64_t j = 0; j < length; j++) y[r * length + j] = (T)total[j * LINES + r];
}

/* Rows low to high of each y[o]. Each thread reads all indices. A counting sort orders the positions i by index: the
   positions of row low + r are order[ends[r - 1]] to order[ends[r] - 1]. */
static int scatter_add_rows(const T *x, const U *indices, T *y, int64_t outer, int64_t length, int64_t inner,
                            int64_t count, int64_t low, int64_t high, char *scratch) {
    int64_t *ends = (int64_t *)scratch, *order = ends + length + 1;
    for (int64_t i = 0; i < count; i++)
        if (!inside(indices[i], length)) return 1;
    if ((high - low) * inner <= SMALL) {
        int64_t o = 0;
        if (inner == 1 && high - low == length && length * LINES <= SMALL)
            for (; o + LINES <= outer; o += LINES)
                scatter_add_lines(x + o * count, indices, y + o * length, length, count);
        for (; o < outer; o++)
            scatter_add_small(x + o * count * inner, indices, y + o * length * inner, inner, count, low, high);
        return 0;
    }
    memset(ends, 0, (high - low + 1) * sizeof *ends);
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = (int64_t)indices[i];
        if (low <= index && index < high) ends[index - low + 1]++;
    }
    int64_t most = 0;
    for (int64_t r = 1; r <= high - low; r++) {
        most = max_i64(most, ends[r]);
        ends[r] += ends[r - 1];
    }
    if (most <= FEW) {
        for (int64_t o = 0; o < outer; o++)
            scatter_add_few(x + o * count * inner, indices, y + o * length * inner, inner, count, low, high);
        return 0;
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = (int64_t)indices[i];
        if (low <= index && index < high) order[ends[index - low]++] = i;
    }
    for (int64_t o = 0; o < outer; o++, x += count * inner, y += length * inner)
        for (int64_t r = 0; r < high - low; r++) {
            const int64_t begin = r ? ends[r - 1] : 0;
            sum_rows(x, y + (low + r) * inner, inner, order + begin, ends[r] - begin);
        }
    return 0;
}

int FN(scatter_add)(const T *x, const U *indices, T *y, int64_t outer, int64_t length, int64_t inner, int64_t count,
                    char *scratch) {
    return scatter_add_rows(x, indices, y, outer, length, inner, count, 0, length, scratch);
}

/* Threads divide the arrays o or, where there are few, the rows of y. */
int FN(scatter_add_team)(const Team *team, const T *x, const U *indices, T *y, int64_t outer, int64_t length,
                         int64_t inner, int64_t count) {
    int64_t begin, end;
    if (outer >= team->threads) {
        my_share(team, outer, &begin, &end);
        return FN(scatter_add)(x + begin * count * inner, indices, y + begin * length * inner, end - begin, length,
                               inner, count, team->scratch);
    }
    my_share(team, length, &begin, &end);
    return scatter_add_rows(x, indices, y, outer, length, inner, count, begin, end, team->scratch);
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

/* put_rows: y is x[outer][before][length][inner], but y[o][i][positions[o]] = rows[o][i]. y may be x. Computes the parts
   begin to end - 1 of the outer * before. */
static int put_parts(const T *x, const T *rows, const U *positions, T *y, int64_t before, int64_t length, int64_t inner,
                     int64_t begin, int64_t end) {
    int wrong = 0;
    for (int64_t part = begin; part < end; part++) {
        const U position = positions[part / before];
        T *to = y + part * length * inner;
        if (x != y) memcpy(to, x + part * length * inner, length * inner * sizeof(T));
        if (inside(position, length))
            memcpy(to + (int64_t)position * inner, rows + part * inner, inner * sizeof(T));
        else
            wrong = 1;
    }
    return wrong;
}

int FN(put_rows)(const T *x, const T *rows, const U *positions, T *y, int64_t outer, int64_t before, int64_t length,
                 int64_t inner) {
    return put_parts(x, rows, positions, y, before, length, inner, 0, outer * before);
}

int FN(put_rows_team)(const Team *team, const T *x, const T *rows, const U *positions, T *y, int64_t outer,
                      int64_t before, int64_t length, int64_t inner) {
    int64_t begin, end;
    my_share(team, outer * before, &begin, &end);
    return put_parts(x, rows, positions, y, before, length, inner, begin, end);
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
