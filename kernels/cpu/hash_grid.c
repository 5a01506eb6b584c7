/* Multiresolution hash encoding: see adtrain/ops/hash_grid.py. There are n points of d coordinates, and `count` levels. A
   level is {resolution, first row, mask}. Each bit of `along` is a coordinate by which the weights of the corners are
   differentiated. */

#include "common.h"

enum { MOST_COORDINATES = 4 };

static const uint32_t PRIMES[MOST_COORDINATES] = {1u, 2654435761u, 805459861u, 3674653429u};

/* The rows and weights of the 2^d corners of a point's cell. Bit i of a corner's number is its end of coordinate i. */
SPECIALISED void corners(const T *point, int64_t d, const int64_t *level, int64_t along, int64_t *rows, T *weights) {
    const int64_t resolution = level[0], mask = level[2];
    int64_t stride = 1;
    rows[0] = 0, weights[0] = 1;
    UNROLL for (int64_t i = 0; i < d; i++) {
        const T position = point[i] * (T)resolution;
        const int below = position < 0, above = position > (T)resolution;
        const T within = below ? 0 : above ? (T)resolution : position; /* NaN stays */
        const int64_t cell = within >= 0 ? min_i64((int64_t)within, resolution - 1) : 0;
        const T fraction = within - (T)cell, slope = !below && !above;
        const T high = along >> i & 1 ? slope : fraction, low = along >> i & 1 ? -slope : 1 - fraction;
        const int64_t factor = mask ? (int64_t)PRIMES[i] : stride, at = cell * factor, next = at + factor;
        UNROLL for (int64_t k = 0, count = (int64_t)1 << i; k < count; k++) {
            rows[count + k] = mask ? rows[k] ^ next : rows[k] + next;
            rows[k] = mask ? rows[k] ^ at : rows[k] + at;
            weights[count + k] = weights[k] * high;
            weights[k] *= low;
        }
        stride *= resolution + 1;
    }
    for (int64_t k = 0; k < (int64_t)1 << d; k++) rows[k] = level[1] + (mask ? rows[k] & mask : rows[k]);
}

/* out[n][l] = sum of weight * table[row] over the corners of point n in level l, for points begin to end. */
SPECIALISED void encode_points(int64_t d, const T *points, const T *table, const int64_t *levels, T *out, int64_t count,
                           int64_t features, int64_t along, int64_t begin, int64_t end) {
    int64_t rows[1 << MOST_COORDINATES];
    T weights[1 << MOST_COORDINATES];
    for (int64_t l = 0; l < count; l++) /* the outer loop, so that the rows of a level stay in the cache */
        for (int64_t n = begin; n < end; n++) {
            T *to = out + (n * count + l) * features;
            corners(points + n * d, d, levels + 3 * l, along, rows, weights);
            for (int64_t f = 0; f < features; f++) to[f] = 0;
            for (int64_t c = 0; c < (int64_t)1 << d; c++)
                for (int64_t f = 0; f < features; f++) to[f] += weights[c] * table[rows[c] * features + f];
        }
}

/* Calls f(d, ...) with a constant number of coordinates. */
#define BY_COORDINATES(f, d, ...)                                                                                      \
    switch (d) {                                                                                                       \
    case 1: f(1, __VA_ARGS__); break;                                                                                  \
    case 2: f(2, __VA_ARGS__); break;                                                                                  \
    case 3: f(3, __VA_ARGS__); break;                                                                                  \
    default: f(4, __VA_ARGS__);                                                                                        \
    }

static void encode(const T *points, const T *table, const int64_t *levels, T *out, int64_t d, int64_t count,
                   int64_t features, int64_t along, int64_t begin, int64_t end) {
    BY_COORDINATES(encode_points, d, points, table, levels, out, count, features, along, begin, end)
}

void FN(hash_grid)(const T *points, const T *table, const int64_t *levels, T *out, int64_t n, int64_t d, int64_t count,
                   int64_t features, int64_t along) {
    encode(points, table, levels, out, d, count, features, along, 0, n);
}

void FN(hash_grid_team)(const Team *team, const T *points, const T *table, const int64_t *levels, T *out, int64_t n,
                        int64_t d, int64_t count, int64_t features, int64_t along) {
    int64_t begin, end;
    my_share(team, n, &begin, &end);
    encode(points, table, levels, out, d, count, features, along, begin, end);
}

/* The transpose: out[row] = sum of weight * ct[n][l], in the order of n. A thread adds whole levels, which have rows of
   their own. */
SPECIALISED void add_points(int64_t d, const Team *team, const T *ct, const T *points, const int64_t *levels, T *out,
                        int64_t n, int64_t count, int64_t features, int64_t along, int64_t table_rows) {
    int64_t rows[1 << MOST_COORDINATES];
    T weights[1 << MOST_COORDINATES];
    for (int64_t l = team->thread; l < count; l += team->threads) {
        const int64_t first = levels[3 * l + 1], end = l + 1 < count ? levels[3 * l + 4] : table_rows;
        memset(out + first * features, 0, (end - first) * features * sizeof(T));
        for (int64_t i = 0; i < n; i++) {
            const T *from = ct + (i * count + l) * features;
            corners(points + i * d, d, levels + 3 * l, along, rows, weights);
            for (int64_t c = 0; c < (int64_t)1 << d; c++)
                for (int64_t f = 0; f < features; f++) out[rows[c] * features + f] += weights[c] * from[f];
        }
    }
}

void FN(hash_grid_add_team)(const Team *team, const T *ct, const T *points, const int64_t *levels, T *out, int64_t n,
                            int64_t d, int64_t count, int64_t features, int64_t along, int64_t table_rows) {
    BY_COORDINATES(add_points, d, team, ct, points, levels, out, n, count, features, along, table_rows)
}
