"""Runs a primitive on the GPU with a certain kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain.core import kernel as registry
from adtrain.core.kernel import CudaKernel
from adtrain.core.primitive import Primitive
from adtrain.core.types import ArrayType


def run_twice(
    gpu: Any, primitive: Primitive, kernel: CudaKernel, arrays: list[np.ndarray], **params: Any
) -> list[np.ndarray]:
    """The results of the primitive with this kernel, which are the same bytes in two runs."""
    types = [ArrayType(v.shape, v.dtype) for v in arrays]
    name = params.get("form", primitive.name)
    outs = primitive.output_types(types, params)
    before = registry._CUDA_RULES.get(name)
    registry._CUDA_RULES[name] = lambda *_, **__: [kernel]
    gpu.known.clear()
    try:
        buffers = [gpu.from_numpy(v) for v in arrays]
        runs = [gpu.run(primitive, buffers, params, outs) for _ in range(2)]
        first, second = ([gpu.to_numpy(b) for b in run] for run in runs)
    finally:
        del registry._CUDA_RULES[name]
        if before is not None:
            registry._CUDA_RULES[name] = before
        gpu.known.clear()
    assert [v.tobytes() for v in first] == [v.tobytes() for v in second]
    return first
