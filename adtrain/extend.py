"""What a user's own operation or kernel needs, outside the package.

An operation is a `Primitive`: shape rule, NumPy reference, derivative. `bind` applies it. Without a kernel it runs on
the CPU, by its reference. `register` adds kernels, whose sources may lie anywhere:

    from adtrain import ArrayType
    from adtrain.extend import CKernel, CudaKernel, CudaLaunch, Primitive, Target, bind, register

    triple_p = Primitive(
        "triple",
        lambda x: ArrayType(x.shape, x.dtype),  # shape rule
        lambda x: 3 * x,  # NumPy reference
        [lambda out, x: lambda ct: bind(triple_p, ct)],  # derivative by x: cotangent of out to cotangent of x
        axes="*->*",  # all axes of out move with those of x: vmap and passes ask for this
    )

    # /path/to/triple.c:
    #     #include "common.h"  /* of kernels/cpu: T is the element type, FN adds it to the name */
    #     void FN(triple)(const T *x, T *out, int64_t size) {
    #         for (int64_t i = 0; i < size; i++) out[i] = 3 * x[i];
    #     }
    register("triple", "cpu", CKernel("/path/to/triple.c", "triple", numbers=lambda x: (x.size,)))

    # /path/to/triple.cu:
    #     #include "common/common.cuh"  // of kernels/cuda
    #     KERNEL triple(const T *x, T *out, int64_t size) {
    #         wait_for_inputs();
    #         for (int64_t i = grid_index(); i < size; i += grid_size()) out[i] = 3 * x[i];
    #     }
    def triple_kernels(target: Target, x: ArrayType) -> list[CudaKernel]:
        return [CudaKernel((CudaLaunch("/path/to/triple.cu", "triple", (x.size,), (x.dtype,), elements=x.size),))]

    register("triple", "cuda", triple_kernels)

A `Fusion` says which equations a kernel computes together; `register_fusion` lets a device use it.

`custom_op` does all this in one call, for operations that need one kernel on each device.
"""

from __future__ import annotations

from adtrain.core.kernel import CKernel, CudaKernel, CudaLaunch, Target, register
from adtrain.core.primitive import Primitive
from adtrain.core.trace import bind
from adtrain.passes.fusion import Fusion, register_fusion

__all__ = [
    "CKernel",
    "CudaKernel",
    "CudaLaunch",
    "Fusion",
    "Primitive",
    "Target",
    "bind",
    "register",
    "register_fusion",
]
