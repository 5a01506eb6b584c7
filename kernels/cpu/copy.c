/* Strided copies: transpose, flip, slice, pad and concatenate. Element (i0, ..., i7) goes from x[source + sum of i_k *
   from_k] to y[target + sum of i_k * to_k]. The last two axes are a plane; the caller orders the axes so that x and y
   are contiguous along one of these two axes, if they are along any axis. */

#include "vectors.h"

enum {
    AXES = 8,
    TILE_ROWS = 8,
    TILE_COLUMNS = 16,
    LINE = CACHE_LINE / sizeof(T)
};

typedef struct {
    int64_t length[AXES], from[AXES], to[AXES];
} Copy;

#define EIGHT(n) int64_t n##0, int64_t n##1, int64_t n##2, int64_t n##3, int64_t n##4, int64_t n##5, int64_t n##6, \
                 int64_t n##7
#define ARRAY(n) {n##0, n##1, n##2, n##3, n##4, n##5, n##6, n##7}

/* A tile at a time, so that cache lines of x and y stay in the cache until all their elements are copied. */
static inline void copy_tiles(const T *x, T *y, int64_t rows, int64_t columns, int64_t from_row, int64_t from_column,
                              int64_t to_row, int64_t to_column) {
    for (int64_t i = 0; i < rows; i += TILE_ROWS)
        for (int64_t j = 0; j < columns; j += TILE_COLUMNS)
            for (int64_t r = i; r < min_i64(i + TILE_ROWS, rows); r++)
                for (int64_t c = j; c < min_i64(j + TILE_COLUMNS, columns); c++)
                    y[r * to_row + c * to_column] = x[r * from_row + c * from_column];
}

/* Copies a row. Short ones are copied in pieces of a constant size, the last of which may overlap the one before: a call
   of memcpy takes longer. */
static inline void copy_row(const T *x, T *y, int64_t columns) {
    enum { PIECE = 32, SHORT = 256 };
    const int64_t bytes = columns * sizeof(T);
    if (bytes < PIECE || bytes > SHORT) {
        memcpy(y, x, bytes);
        return;
    }
    for (int64_t i = 0; i < bytes; i += PIECE) {
        const int64_t at = min_i64(i, bytes - PIECE);
        memcpy((char *)y + at, (const char *)x + at, PIECE);
    }
}

/* Whether rows of x are columns of y. */
static bool transposes(const Copy *copy) { return copy->from[AXES - 2] == 1 && copy->to[AXES - 1] == 1; }

static void copy_plane(const T *x, T *y, int64_t rows, int64_t columns, const Copy *copy) {
    const int64_t from_row = copy->from[AXES - 2], from_column = copy->from[AXES - 1];
    const int64_t to_row = copy->to[AXES - 2], to_column = copy->to[AXES - 1];
    if (from_column == 1 && to_column == 1)
        for (int64_t r = 0; r < rows; r++) copy_row(x + r * from_row, y + r * to_row, columns);
    else if (transposes(copy))
#if SIZE
        transpose(x, columns, rows, from_column, y, to_row, columns);
#else
        copy_tiles(x, y, rows, columns, 1, from_column, to_row, 1);
#endif
    else
        copy_tiles(x, y, rows, columns, from_row, from_column, to_row, to_column);
}

/* A unit of work is some rows of a plane. In a transpose they are one cache line of each row of x, read once. */
static int64_t unit_rows(const Copy *copy) { return transposes(copy) ? LINE : TILE_ROWS; }

static int64_t units_across(const Copy *copy) {
    return (copy->length[AXES - 2] + unit_rows(copy) - 1) / unit_rows(copy);
}

static int64_t count_units(const Copy *copy) {
    int64_t planes = copy->length[AXES - 1] > 0;
    for (int k = 0; k < AXES - 2; k++) planes *= copy->length[k];
    return planes * units_across(copy);
}

static void copy_units(const T *x, T *y, const Copy *copy, int64_t begin, int64_t end) {
    const int64_t across = units_across(copy), rows = copy->length[AXES - 2], most = unit_rows(copy);
    if (begin >= end) return;
    int64_t at[AXES - 2], row = begin % across * most, plane = begin / across; /* of the next unit */
    for (int k = AXES - 3; k >= 0; plane /= copy->length[k], k--) {
        at[k] = plane % copy->length[k];
        x += at[k] * copy->from[k];
        y += at[k] * copy->to[k];
    }
    for (int64_t unit = begin; unit < end; unit++) {
        copy_plane(x + row * copy->from[AXES - 2], y + row * copy->to[AXES - 2], min_i64(most, rows - row),
                   copy->length[AXES - 1], copy);
        row += most;
        if (row < rows) continue;
        row = 0;
        for (int k = AXES - 3; k >= 0; k--) { /* the next plane */
            x += copy->from[k];
            y += copy->to[k];
            if (++at[k] < copy->length[k]) break;
            at[k] = 0;
            x -= copy->length[k] * copy->from[k];
            y -= copy->length[k] * copy->to[k];
        }
    }
}

void FN(copy)(const T *x, T *y, EIGHT(length), EIGHT(from), EIGHT(to), int64_t source, int64_t target) {
    const Copy copy = {ARRAY(length), ARRAY(from), ARRAY(to)};
    copy_units(x + source, y + target, &copy, 0, count_units(&copy));
}

void FN(copy_team)(const Team *team, const T *x, T *y, EIGHT(length), EIGHT(from), EIGHT(to), int64_t source,
                   int64_t target) {
    const Copy copy = {ARRAY(length), ARRAY(from), ARRAY(to)};
    int64_t begin, end;
    my_share(team, count_units(&copy), &begin, &end);
    copy_units(x + source, y + target, &copy, begin, end);
}

static void fill(T *y, int64_t n, T value) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = value;
}

/* The type in which a constant is passed: double for floating-point elements, else int64_t; double is not exact for all
   integers. */
typedef __typeof__(_Generic((T)0, float: 0.0, double: 0.0, default: (int64_t)0)) Number;

/* Fills an array of `size` elements with `value`, then copies into it. */
void FN(pad)(const T *x, T *y, EIGHT(length), EIGHT(from), EIGHT(to), int64_t source, int64_t target, int64_t size,
             Number value) {
    const Copy copy = {ARRAY(length), ARRAY(from), ARRAY(to)};
    fill(y, size, (T)value);
    copy_units(x + source, y + target, &copy, 0, count_units(&copy));
}

void FN(pad_team)(const Team *team, const T *x, T *y, EIGHT(length), EIGHT(from), EIGHT(to), int64_t source,
                  int64_t target, int64_t size, Number value) {
    const Copy copy = {ARRAY(length), ARRAY(from), ARRAY(to)};
    int64_t begin, end;
    my_cache_lines(team, size, &begin, &end);
    fill(y + begin, end - begin, (T)value);
#pragma omp barrier /* a thread may copy to where another one fills */
    my_share(team, count_units(&copy), &begin, &end);
    copy_units(x + source, y + target, &copy, begin, end);
}
