"""Random numbers: `index/random.cu`. A thread computes the four numbers of one Philox block."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.registry import register
from adtrain.core.target import Target


def random_uniform(target: Target, rng: Any, shape: tuple[int, ...], stream: int, dtype: np.dtype) -> list[CudaKernel]:
    states, count = math.prod(rng.shape[:-1]), math.prod(shape)
    numbers, threads = (states, count, stream), states * -(-count // 4)
    return [CudaKernel((CudaLaunch("index/random.cu", "random_uniform", numbers, (dtype,), threads),))]


register("random_uniform", "cuda", random_uniform)
