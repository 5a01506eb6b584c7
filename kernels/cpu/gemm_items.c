/* Matrix products in a batchwise loop, by one thread: products of rows with a matrix that is small enough to stay in the
   cache, such as weights; small matrices that are sums over rows, such as gradients of weights; and products of many
   small matrices. An element of the first and the last has the bits that gemm.c gives it: it is the same sum over k. */

#include "tile.h"

/* The products of rows with panels of b that follow each other: c[rows][n], with `ld` elements in a row of c. */
static void product(int64_t rows, int64_t n, int64_t k, const T *a, int64_t row_step, int64_t step, const T *panels,
                    T *c, int64_t ld, bool add) {
    const int64_t strips = ceil_div(rows, TILE_ROWS);
    for (int64_t j = 0; j < n; j += TILE_COLUMNS)
        for (int64_t t = 0; t < strips; t++) {
            const int64_t i = part_begin(rows, strips, t), height = part_begin(rows, strips, t + 1) - i;
            any_tile(height, min_i64(TILE_COLUMNS, n - j), k, a + i * row_step, row_step, step, panels + j * k,
                     c + i * ld + j, ld, add);
        }
}

/* The memory that b needs as panels, in elements, is (n rounded up to panels) * k. */
void FN(gemm_rows_prepare)(const T *b, int64_t rows, int64_t n, int64_t k, int64_t transpose_b, char *prepared) {
    (void)rows;
    pack_b(b, transpose_b ? k : n, transpose_b, n, k, (T *)prepared);
}

/* c[rows][n] = a[rows][k] op(b). */
void FN(gemm_rows)(const T *a, const T *b, T *c, int64_t rows, int64_t n, int64_t k, int64_t transpose_b,
                   char *prepared) {
    (void)b, (void)transpose_b;
    product(rows, n, k, a, k, 1, (const T *)prepared, c, n, false);
}

/* Adds a[rows][m]^T b[rows][n] to `collected`, whose rows fill whole vectors. Scratch takes b as panels. */
void FN(gemm_sum)(const T *a, const T *b, T *c, int64_t rows, int64_t m, int64_t n, char *scratch, char *collected) {
    (void)c;
    const int64_t ld = ceil_div(n, LANES) * LANES;
    pack_b(b, n, false, n, rows, (T *)scratch);
    product(m, ld, rows, a, 1, m, (const T *)scratch, (T *)collected, ld, true);
}

void FN(gemm_sum_finish)(T *c, int64_t rows, int64_t m, int64_t n, char *collected) {
    (void)rows;
    const T *sum = (const T *)collected;
    const int64_t ld = ceil_div(n, LANES) * LANES;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) c[i * n + j] += sum[i * ld + j];
}

/* Matrices with at most as many columns as a vector of four or eight numbers, V, has. The rows of op(b) are in `rows`. */
#define NARROW(name, V)                                                                                            \
    SPECIALISED void name(const int n, int64_t m, int64_t k, const T *a, int64_t row_step, int64_t step, const T *b, \
                          bool transpose_b, T *c, V *rows) {                                                       \
        for (int64_t p = 0; p < k; p++) {                                                                          \
            T row[sizeof(V) / sizeof(T)] = {0};                                                                    \
            UNROLL                                                                                                 \
            for (int j = 0; j < n; j++) row[j] = transpose_b ? b[j * k + p] : b[p * n + j];                        \
            memcpy(rows + p, row, sizeof row);                                                                     \
        }                                                                                                          \
        for (int64_t i = 0; i < m; i++, a += row_step, c += n) {                                                   \
            V sum = {0};                                                                                           \
            for (int64_t p = 0; p < k; p++) sum += a[p * step] * rows[p];                                          \
            T row[sizeof(V) / sizeof(T)];                                                                          \
            memcpy(row, &sum, sizeof row);                                                                         \
            UNROLL                                                                                                 \
            for (int j = 0; j < n; j++) c[j] = row[j];                                                             \
        }                                                                                                          \
    }
NARROW(narrow_four, four)
NARROW(narrow_eight, eight)

/* c[batch][m][n] = op(a) op(b), as in gemm.c. Scratch takes op(b) as panels. */
void FN(gemm_matrices)(const T *a, const T *b, T *c, int64_t batch, int64_t m, int64_t n, int64_t k,
                       int64_t transpose_a, int64_t transpose_b, char *scratch) {
    const int64_t row_step = transpose_a ? 1 : k, step = transpose_a ? m : 1;
    for (int64_t z = 0; z < batch; z++, a += m * k, b += k * n, c += m * n) {
#define CASE(n, name)                                                                   \
    case n:                                                                             \
        name(n, m, k, a, row_step, step, b, transpose_b, c, (void *)scratch); \
        break;
        switch (n) {
            CASE(1, narrow_four)
            CASE(2, narrow_four)
            CASE(3, narrow_four)
            CASE(4, narrow_four)
            CASE(5, narrow_eight)
            CASE(6, narrow_eight)
            CASE(7, narrow_eight)
            CASE(8, narrow_eight)
            default:
                pack_b(b, transpose_b ? k : n, transpose_b, n, k, (T *)scratch);
                product(m, n, k, a, row_step, step, (const T *)scratch, c, n, false);
        }
    }
}
