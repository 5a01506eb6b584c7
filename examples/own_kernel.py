"""A kernel of one's own, in C for the CPU and in CUDA for a GPU: the sum of squares of each row."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import adtrain as ad
from adtrain import ops
from adtrain.extend import CKernel, CudaKernel, CudaLaunch, Primitive, bind, register

C = """
#include "common.h" /* of kernels/cpu: T is the element type, FN(name) the name with its suffix */
void FN(row_squares)(const T *x, T *out, int64_t length) { /* one row; another thread may run the next one */
    *out = 0;
    for (int64_t i = 0; i < length; i++) *out += x[i] * x[i];
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
row_squares_p = Primitive(
    "row_squares",
    lambda x: ad.ArrayType(x.shape[:1], x.dtype),  # shape rule
    lambda x: np.sum(x * x, axis=1),  # reference
    [lambda out, x: lambda ct: 2.0 * x * ops.expand_dims(ct, 1)],  # derivative, of public operations
)


def register_kernels(folder: Path) -> None:
    c_file, cuda_file = folder / "row_squares.c", folder / "row_squares.cu"
    c_file.write_text(C)
    cuda_file.write_text(CUDA)

    register("row_squares", "cpu", CKernel(str(c_file), "row_squares", lambda x: x.shape[1:], items=(True,)))
    launch = partial(CudaLaunch, str(cuda_file), "row_squares")
    register("row_squares", "cuda", lambda target, x: [CudaKernel((launch(x.shape, (x.dtype,), x.shape[0]),))])


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        register_kernels(Path(name))
        loss = ad.jit(ad.value_and_grad(lambda x: bind(row_squares_p, x).sum()))
        print(*(value.numpy().tolist() for value in loss(ad.array([[1.0, 2.0], [3.0, 4.0]]))))
