"""Random numbers: `random.c`."""

from __future__ import annotations

import math

from adtrain.core.kernel import CKernel
from adtrain.core.registry import register

register(
    "random_uniform",
    "cpu",
    CKernel(
        "random.c",
        "random_uniform_team",
        lambda rng, shape, stream, dtype: (math.prod(rng.shape[:-1]), math.prod(shape), stream),
        lambda rng, shape, stream, dtype: (dtype,),
        team=True,
    ),
)
