"""An operation with kernels of one's own, in C for the CPU and in CUDA C++ for a GPU: the sum of squares of each row.

Check it with ``adtrain gradcheck --plugin own_kernel.py``. `trilinear/` has sources in files, and kernels for its
derivative.
"""

from __future__ import annotations

import numpy as np

import adtrain as ad
from adtrain import ops

C = """
#include "common.h" /* of kernels/cpu: T is the element type, FN(name) the name with its suffix */
void FN(row_squares)(const Team *team, const T *x, T *out, int64_t rows, int64_t length) {
    int64_t begin, end;
    my_share(team, rows, &begin, &end); /* of this thread */
    for (int64_t row = begin; row < end; row++) {
        out[row] = 0;
        for (int64_t i = 0; i < length; i++) out[row] += x[row * length + i] * x[row * length + i];
    }
}
"""
CUDA = """
#include "common/common.cuh" // of kernels/cuda
KERNEL row_squares(const T *x, T *out, int64_t rows, int64_t length) {
    wait_for_inputs();
    for (int64_t row = grid_index(); row < rows; row += grid_size()) {
        T sum = 0;
        for (int64_t i = 0; i < length; i++) sum += x[row * length + i] * x[row * length + i];
        out[row] = sum;
    }
}
"""
row_squares = ad.custom_op(
    "row_squares",
    shape=lambda x: ad.ArrayType(x.shape[:1], x.dtype),
    numpy=lambda x: np.sum(x * x, axis=1),
    c=C,
    cuda=CUDA,
    numbers=lambda x: x.shape,
    vjp=lambda ct, out, x: (2.0 * x * ops.expand_dims(ct, 1),),
    samples=lambda rng: (rng.normal(size=(3, 5)),),
)

if __name__ == "__main__":
    loss = ad.jit(ad.value_and_grad(lambda x: row_squares(x).sum()))
    print(*(value.numpy().tolist() for value in loss(ad.array([[1.0, 2.0], [3.0, 4.0]]))))
