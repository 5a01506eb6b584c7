/* Pooling of one image: (channels, height, width) to (channels, rows, columns) windows. Max pooling also returns the
   position of each maximum in its window, counted row by row. put scatters to these positions, pick gathers from them.

   The windows of a row are computed together, one position of the window after another: the elements at one position
   are stride_x apart, so the loop over them has no branches and becomes vector instructions. It leaves out positions in
   the padding by its bounds. Disjoint windows of 2x2, the common case, take a single loop. */

#include <math.h>

#include "common.h"

/* Windows of 2x2 that are computed at once. Vectors of 16 bytes suit short rows, and one instruction takes every other
   element of two of them. */
enum { LANES = 16 / sizeof(T) };
typedef T Lanes __attribute__((vector_size(16)));
typedef T UnalignedLanes __attribute__((vector_size(16), aligned(sizeof(T)), may_alias));
typedef int32_t Positions __attribute__((vector_size(LANES * sizeof(int32_t))));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Mask){__VA_ARGS__})
#endif
#define SIZE_float 4
#define SIZE_double 8
#if PASTE(SIZE_, T) == 4
typedef int32_t Mask __attribute__((vector_size(16)));
#define EVEN(a, b) SHUFFLE(a, b, 0, 2, 4, 6)
#define ODD(a, b) SHUFFLE(a, b, 1, 3, 5, 7)
#define INTERLEAVE_FIRST(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define INTERLEAVE_SECOND(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#else
typedef int64_t Mask __attribute__((vector_size(16)));
#define EVEN(a, b) SHUFFLE(a, b, 0, 2)
#define ODD(a, b) SHUFFLE(a, b, 1, 3)
#define INTERLEAVE_FIRST EVEN
#define INTERLEAVE_SECOND ODD
#endif

typedef struct {
    int64_t channels, height, width, rows, columns, kernel_y, kernel_x, stride_y, stride_x, padding_y, padding_x;
} Pool;

#define POOL_NUMBERS                                                                                                   \
    int64_t channels, int64_t height, int64_t width, int64_t rows, int64_t columns, int64_t kernel_y,                  \
        int64_t kernel_x, int64_t stride_y, int64_t stride_x, int64_t padding_y, int64_t padding_x
#define POOL {channels, height, width, rows, columns, kernel_y, kernel_x, stride_y, stride_x, padding_y, padding_x}

static inline bool is_2x2(const Pool *p) {
    return p->kernel_y == 2 && p->kernel_x == 2 && p->stride_y == 2 && p->stride_x == 2 && p->padding_y == 0 &&
           p->padding_x == 0;
}

/* The elements at one position in the windows of a row: windows [begin, end) have them at first + i stride_x. */
typedef struct {
    int64_t begin, end, first;
} Elements;

static inline Elements elements(const Pool *p, int64_t row, int64_t position) {
    const int64_t y = row * p->stride_y - p->padding_y + position / p->kernel_x;
    const int64_t x = position % p->kernel_x - p->padding_x;
    if (y < 0 || y >= p->height || x >= p->width) return (Elements){0, 0, 0};
    const int64_t begin = x < 0 ? (p->stride_x - 1 - x) / p->stride_x : 0;
    const int64_t end = (p->width - 1 - x) / p->stride_x + 1;
    return (Elements){begin, min_i64(end, p->columns), y * p->width + x};
}

static inline Mask is_larger(Lanes b, Lanes a) {
    return (b > a) | (b != b);
}

static inline Mask select_mask(Mask second, Mask a, Mask b) {
    return (b & second) | (a & ~second);
}

/* Maxima of LANES neighbouring windows of 2x2; the upper row of the first is at x. */
static inline void maxima_2x2(const T *x, int64_t width, T *y, int32_t *where) {
    const UnalignedLanes *upper = (const UnalignedLanes *)x, *lower = (const UnalignedLanes *)(x + width);
    const Lanes v0 = EVEN(upper[0], upper[1]), v1 = ODD(upper[0], upper[1]);
    const Lanes v2 = EVEN(lower[0], lower[1]), v3 = ODD(lower[0], lower[1]);
    const Mask right_above = is_larger(v1, v0), right_below = is_larger(v3, v2);
    const Lanes above = (Lanes)select_mask(right_above, (Mask)v0, (Mask)v1);
    const Lanes under = (Lanes)select_mask(right_below, (Mask)v2, (Mask)v3);
    const Mask below = is_larger(under, above);
    const Mask negative = select_mask(below, right_above, right_below - 2); /* minus the position: true is -1 */
    const Positions position = -__builtin_convertvector(negative, Positions);
    *(UnalignedLanes *)y = (Lanes)select_mask(below, (Mask)above, (Mask)under);
    memcpy(where, &position, sizeof position);
}

/* The position is that of the first maximum, or of the last NaN if there is one. It is never in the padding: if all
   elements are -infinity, it is the first one inside the image. */
void FN(max_pool2d)(const T *restrict x, T *restrict y, int32_t *restrict where, POOL_NUMBERS) {
    const Pool pool = POOL;
    const bool fast = is_2x2(&pool) && columns >= LANES;
    const int32_t area = kernel_y * kernel_x;
    for (int64_t c = 0; c < channels; c++, x += height * width)
        for (int64_t row = 0; row < rows; row++, y += columns, where += columns) {
            if (fast) {
                /* The last vector of windows may overlap the one before. */
                for (int64_t i = 0; i < columns; i += LANES) {
                    const int64_t first = min_i64(i, columns - LANES);
                    maxima_2x2(x + 2 * row * width + 2 * first, width, y + first, where + first);
                }
                continue;
            }
            const int64_t above = max_i64(padding_y - row * stride_y, 0);
            for (int64_t i = 0; i < columns; i++)
                y[i] = -(T)INFINITY, where[i] = above * kernel_x + max_i64(padding_x - i * stride_x, 0);
            for (int32_t position = 0; position < area; position++) {
                const Elements e = elements(&pool, row, position);
                for (int64_t i = e.begin; i < e.end; i++) {
                    const T value = x[e.first + i * stride_x];
                    const bool larger = (value > y[i]) | (value != value);
                    y[i] = larger ? value : y[i];
                    where[i] = larger ? position : where[i];
                }
            }
        }
}

/* Puts g into LANES neighbouring windows of 2x2, and zeros beside it; the upper row of the first is at x. */
static inline void put_2x2(const T *g, const int32_t *where, T *x, int64_t width) {
    UnalignedLanes *upper = (UnalignedLanes *)x, *lower = (UnalignedLanes *)(x + width);
    const Mask bits = (Mask) * (const UnalignedLanes *)g;
    Positions positions;
    memcpy(&positions, where, sizeof positions);
    const Mask position = __builtin_convertvector(positions, Mask);
    const Lanes v0 = (Lanes)(bits & (position == 0)), v1 = (Lanes)(bits & (position == 1));
    const Lanes v2 = (Lanes)(bits & (position == 2)), v3 = (Lanes)(bits & (position == 3));
    upper[0] = INTERLEAVE_FIRST(v0, v1), upper[1] = INTERLEAVE_SECOND(v0, v1);
    lower[0] = INTERLEAVE_FIRST(v2, v3), lower[1] = INTERLEAVE_SECOND(v2, v3);
}

void FN(max_pool2d_put)(const T *restrict g, const int32_t *restrict where, T *restrict x, POOL_NUMBERS) {
    const Pool pool = POOL;
    const bool fast = is_2x2(&pool) && columns >= LANES;
    const bool covered = fast && height == 2 * rows && width == 2 * columns;
    for (int64_t c = 0; c < channels; c++, x += height * width) {
        if (!covered) memset(x, 0, height * width * sizeof(T));
        for (int64_t row = 0; row < rows; row++, g += columns, where += columns) {
            if (fast) {
                /* The last vector of windows may overlap the one before. */
                for (int64_t i = 0; i < columns; i += LANES) {
                    const int64_t first = min_i64(i, columns - LANES);
                    put_2x2(g + first, where + first, x + 2 * row * width + 2 * first, width);
                }
                continue;
            }
            for (int32_t position = 0; position < kernel_y * kernel_x; position++) {
                const Elements e = elements(&pool, row, position);
                for (int64_t i = e.begin; i < e.end; i++)
                    x[e.first + i * stride_x] += where[i] == position ? g[i] : 0;
            }
        }
    }
}

void FN(max_pool2d_pick)(const T *restrict x, const int32_t *restrict where, T *restrict y, POOL_NUMBERS) {
    const Pool pool = POOL;
    for (int64_t c = 0; c < channels; c++, x += height * width)
        for (int64_t row = 0; row < rows; row++, y += columns, where += columns) {
            for (int64_t i = 0; i < columns; i++) y[i] = 0;
            for (int32_t position = 0; position < kernel_y * kernel_x; position++) {
                const Elements e = elements(&pool, row, position);
                for (int64_t i = e.begin; i < e.end; i++)
                    y[i] = where[i] == position ? x[e.first + i * stride_x] : y[i];
            }
        }
}

enum {
    FEW = 64,    /* maximum of elements of a window that are added in T; more are added in double */
    COLUMNS = 64 /* windows that are summed at once */
};

/* The means of a row of large windows. */

static void means_of_large_windows(const Pool *p, const T *restrict x, T *restrict y, int64_t row) {
    const int64_t area = p->kernel_y * p->kernel_x;
    for (int64_t first = 0; first < p->columns; first += COLUMNS) {
        const int64_t last = min_i64(first + COLUMNS, p->columns);
        double total[COLUMNS] = {0};
        for (int64_t position = 0; position < area; position++) {
            const Elements e = elements(p, row, position);
            for (int64_t i = max_i64(e.begin, first); i < min_i64(e.end, last); i++)
                total[i - first] += x[e.first + i * p->stride_x];
        }
        for (int64_t i = first; i < last; i++) y[i] = (T)(total[i - first] / (double)area);
    }
}

void FN(avg_pool2d)(const T *restrict x, T *restrict y, POOL_NUMBERS) {
    const Pool pool = POOL;
    const bool large = kernel_y * kernel_x > FEW;
    for (int64_t c = 0; c < channels; c++, x += height * width)
        for (int64_t row = 0; row < rows; row++, y += columns) {
            if (large) {
                means_of_large_windows(&pool, x, y, row);
                continue;
            }
            for (int64_t i = 0; i < columns; i++) y[i] = 0;
            for (int64_t position = 0; position < kernel_y * kernel_x; position++) {
                const Elements e = elements(&pool, row, position);
                for (int64_t i = e.begin; i < e.end; i++) y[i] += x[e.first + i * stride_x];
            }
            for (int64_t i = 0; i < columns; i++) y[i] /= (T)(kernel_y * kernel_x);
        }
}

void FN(avg_pool2d_put)(const T *restrict g, T *restrict x, POOL_NUMBERS) {
    const Pool pool = POOL;
    const T area = kernel_y * kernel_x;
    for (int64_t c = 0; c < channels; c++, x += height * width) {
        memset(x, 0, height * width * sizeof(T));
        for (int64_t row = 0; row < rows; row++, g += columns)
            for (int64_t position = 0; position < kernel_y * kernel_x; position++) {
                const Elements e = elements(&pool, row, position);
                for (int64_t i = e.begin; i < e.end; i++) x[e.first + i * stride_x] += g[i] / area;
            }
    }
}
