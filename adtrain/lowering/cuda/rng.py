"""Random numbers: `index/random.cu`."""

from __future__ import annotations

import math

from adtrain.core.kernel import LegacyKernel, legacy
from adtrain.core.registry import register

RANDOM_UNIFORM = LegacyKernel(
    "index/random.cu",
    "random_uniform",
    lambda rng, shape, stream, dtype: (math.prod(shape), stream),
    lambda rng, shape, stream, dtype: (dtype,),
    elements=lambda rng, shape, stream, dtype: -(-math.prod(shape) // 4),
)


register("random_uniform", "cuda", legacy(RANDOM_UNIFORM))
