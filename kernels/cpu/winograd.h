/* The transforms of Winograd's convolutions with 3x3 kernels, F(2x2, 3x3) and F(4x4, 3x3).
   (S. Winograd: "Arithmetic Complexity of Computations", 1980; A. Lavin, S. Gray: "Fast Algorithms for Convolutional
   Neural Networks", 2016.)

   Two neighbouring outputs of a convolution with 3 weights take 4 products in place of 6: with

     v = (x0 - x2, x1 + x2, x2 - x1, x1 - x3)      u = (w0, (w0 + w1 + w2) / 2, (w0 - w1 + w2) / 2, w2)      m = u v

   they are m0 + m1 + m2 and m1 - m2 - m3. This is a product of polynomials by their values at 0, 1, -1 and infinity.
   With two more points, 4 outputs take 6 products in place of 12. With rows and columns both transformed, a tile of
   `size` x `size` outputs takes (size + 2)^2 products of a transformed patch of the image with the transformed kernel:
   16 in place of 36, or 36 in place of 144. Sums over channels commute with the transforms, so between the transforms
   there is one matrix product for each position k in the patch:

     m[k] = u[k] v[k]      u[k]: out channels x channels, once for all images      v[k]: channels x tiles

   Rounding errors: no larger than those of the plain sum, which has more terms, with size 2; about twice as large with
   size 4 and the points +-3/4 and +-3/2 (six times with the usual +-1 and +-2). Differences of infinities are NaN: an
   infinity or NaN in the image may make NaN of all outputs of the tiles whose patches it is in. */

#pragma once

#include "conv.h"

enum { MAX_SIZE = 4, MAX_SPAN = MAX_SIZE + 2 };

/* The points of size 4 besides 0 and infinity are +-A and +-B. All constants made of them are exact in floating point,
   except the scales of the weights. */
#define A ((T)0.75)
#define B ((T)1.5)
#define AA (A * A)
#define BB (B * B)

/* The three transforms of one row or column. */
SPECIALISED void transform_weights(const T *w, T *u, const int size) {
    if (size == 2) {
        u[0] = w[0];
        u[1] = (w[0] + w[2] + w[1]) / 2;
        u[2] = (w[0] + w[2] - w[1]) / 2;
        u[3] = w[2];
    } else {
        const T at_a = w[0] + AA * w[2], at_b = w[0] + BB * w[2];
        const T scale_a = 1 / (2 * AA * (AA - BB)), scale_b = 1 / (2 * BB * (BB - AA));
        u[0] = w[0] * (1 / (AA * BB));
        u[1] = (at_a + A * w[1]) * scale_a;
        u[2] = (at_a - A * w[1]) * scale_a;
        u[3] = (at_b + B * w[1]) * scale_b;
        u[4] = (at_b - B * w[1]) * scale_b;
        u[5] = w[2];
    }
}

SPECIALISED void transform_patch(const Vector *x, Vector *v, const int size) {
    if (size == 2) {
        v[0] = x[0] - x[2];
        v[1] = x[1] + x[2];
        v[2] = x[2] - x[1];
        v[3] = x[1] - x[3];
    } else {
        const Vector even_a = x[4] - BB * x[2], odd_a = A * (x[3] - BB * x[1]);
        const Vector even_b = x[4] - AA * x[2], odd_b = B * (x[3] - AA * x[1]);
        v[0] = AA * BB * x[0] - (AA + BB) * x[2] + x[4];
        v[1] = even_a + odd_a;
        v[2] = even_a - odd_a;
        v[3] = even_b + odd_b;
        v[4] = even_b - odd_b;
        v[5] = AA * BB * x[1] - (AA + BB) * x[3] + x[5];
    }
}

SPECIALISED void transform_products(const Vector *m, Vector *y, const int size) {
    if (size == 2) {
        y[0] = m[0] + m[1] + m[2];
        y[1] = m[1] - m[2] - m[3];
    } else {
        const Vector even_a = m[1] + m[2], odd_a = A * (m[1] - m[2]), even_b = m[3] + m[4], odd_b = B * (m[3] - m[4]);
        y[0] = m[0] + even_a + even_b;
        y[1] = odd_a + odd_b;
        y[2] = AA * even_a + BB * even_b;
        y[3] = AA * odd_a + BB * odd_b + m[5];
    }
}
