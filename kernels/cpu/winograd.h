/* The transforms of Winograd's convolution with 3x3 kernels, F(4x4, 3x3), and of its weight gradient.
   (S. Winograd: "Arithmetic Complexity of Computations", 1980; A. Lavin, S. Gray: "Fast Algorithms for Convolutional
   Neural Networks", 2016.)

   Four neighbouring outputs of a convolution with 3 weights take 6 products in place of 12. The convolution is a product
   of polynomials, by their values at 0, +-A, +-B and infinity. With rows and columns both transformed, a tile of 4x4
   outputs takes 36 products of a transformed patch of the image with the transformed kernel, in place of 144. Sums over
   channels commute with the transforms, so between the transforms there is one matrix product for each position k in the
   patch:

     m[k] = v[k] u[k]      v[k]: tiles x channels      u[k]: channels x out channels, once for all images

   The weight gradient applies the transposed transforms: a sum over tiles of the products of transformed patches with
   transformed tiles of the output's gradient, and the transpose of the kernel's transform at the end.

   Rounding errors are about twice those of the plain sum (six times with the usual points +-1 and +-2), if the elements
   of a patch are of similar size. */

#pragma once

#include "conv.h"

enum { SIZE_OF_TILE = 4, SPAN = SIZE_OF_TILE + 2, POSITIONS = SPAN * SPAN };

/* The points besides 0 and infinity are +-A and +-B. All constants made of them are exact in floating point, except the
   scales of the weights. */
#define A ((T)0.75)
#define B ((T)1.5)
#define AA (A * A)
#define BB (B * B)
#define SCALE_0 (1 / (AA * BB))
#define SCALE_A (1 / (2 * AA * (AA - BB)))
#define SCALE_B (1 / (2 * BB * (BB - AA)))

/* The transforms of one row or column. */
static inline void transform_weights(const Vector *w, Vector *u) {
    const Vector at_a = w[0] + AA * w[2], at_b = w[0] + BB * w[2];
    u[0] = w[0] * SCALE_0;
    u[1] = (at_a + A * w[1]) * SCALE_A;
    u[2] = (at_a - A * w[1]) * SCALE_A;
    u[3] = (at_b + B * w[1]) * SCALE_B;
    u[4] = (at_b - B * w[1]) * SCALE_B;
    u[5] = w[2];
}

static inline void transform_patch(const Vector *x, Vector *v) {
    const Vector even_a = x[4] - BB * x[2], odd_a = A * (x[3] - BB * x[1]);
    const Vector even_b = x[4] - AA * x[2], odd_b = B * (x[3] - AA * x[1]);
    v[0] = AA * BB * x[0] - (AA + BB) * x[2] + x[4];
    v[1] = even_a + odd_a;
    v[2] = even_a - odd_a;
    v[3] = even_b + odd_b;
    v[4] = even_b - odd_b;
    v[5] = AA * BB * x[1] - (AA + BB) * x[3] + x[5];
}

static inline void transform_products(const Vector *m, Vector *y) {
    const Vector even_a = m[1] + m[2], odd_a = A * (m[1] - m[2]), even_b = m[3] + m[4], odd_b = B * (m[3] - m[4]);
    y[0] = m[0] + even_a + even_b;
    y[1] = odd_a + odd_b;
    y[2] = AA * even_a + BB * even_b;
    y[3] = AA * odd_a + BB * odd_b + m[5];
}

/* The transposes of transform_products and transform_weights. */
static inline void transform_gradient(const Vector *g, Vector *h) {
    const Vector even_a = g[0] + AA * g[2], odd_a = A * (g[1] + AA * g[3]);
    const Vector even_b = g[0] + BB * g[2], odd_b = B * (g[1] + BB * g[3]);
    h[0] = g[0];
    h[1] = even_a + odd_a;
    h[2] = even_a - odd_a;
    h[3] = even_b + odd_b;
    h[4] = even_b - odd_b;
    h[5] = g[3];
}

static inline void transform_weight_gradient(const Vector *m, Vector *dw) {
    const Vector even_a = SCALE_A * (m[1] + m[2]), odd_a = SCALE_A * (m[1] - m[2]);
    const Vector even_b = SCALE_B * (m[3] + m[4]), odd_b = SCALE_B * (m[3] - m[4]);
    dw[0] = SCALE_0 * m[0] + even_a + even_b;
    dw[1] = A * odd_a + B * odd_b;
    dw[2] = AA * even_a + BB * even_b + m[5];
}

/* Applies a transform of `from` to `to` numbers to the columns, then to the rows, of from x from vectors at
   x[i * x_row + j * x_column]. Vector (i, j) of the result goes to y[i * y_row + j * y_column]. */
SPECIALISED void transform_both(void (*transform)(const Vector *, Vector *), const int from, const int to, const T *x,
                                int64_t x_row, int64_t x_column, T *y, int64_t y_row, int64_t y_column) {
    Vector rows[SPAN][SPAN];
    UNROLL for (int j = 0; j < from; j++) {
        Vector column[SPAN], transformed[SPAN];
        UNROLL for (int i = 0; i < from; i++) column[i] = load(x + i * x_row + j * x_column);
        transform(column, transformed);
        UNROLL for (int i = 0; i < to; i++) rows[i][j] = transformed[i];
    }
    UNROLL for (int i = 0; i < to; i++) {
        Vector row[SPAN];
        transform(rows[i], row);
        UNROLL for (int j = 0; j < to; j++) store(y + i * y_row + j * y_column, row[j]);
    }
}
