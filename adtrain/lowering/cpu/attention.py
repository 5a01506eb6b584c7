"""Attention and its gradient: `attention.c`."""

from __future__ import annotations

import math
from typing import Any

from adtrain.core.kernel import CKernel
from adtrain.core.registry import register
from adtrain.lowering.cpu.shapes import in_full
from adtrain.lowering.shapes import optional_arguments

BLOCK = 64
"""QUERIES and KEYS in `attention.c`."""
LARGEST_VECTOR = 64
"""Bytes of the largest vector register."""


def _numbers(q: Any, k: Any, *others: Any, **params: Any) -> tuple[int | float, ...]:
    """NUMBERS in `attention.c`."""
    in_full("attention", params["precision"])
    options = params["causal"], params["scale"], params["dropout"], params["stream"]
    return math.prod(q.shape[:-2]), q.shape[-2], k.shape[-2], q.shape[-1], *options


def _scratch(q: Any, *others: Any, **params: Any) -> int:
    """Bytes for each thread: its Scratch, two blocks of scores, and six packed blocks."""
    packed = 6 * BLOCK * (q.shape[-1] + 2 * LARGEST_VECTOR // q.dtype.itemsize)
    return 4096 + q.dtype.itemsize * (2 * BLOCK * BLOCK + packed)


for _name in ("attention", "attention_grad"):
    register(
        _name,
        "cpu",
        CKernel(
            "attention.c",
            lambda *types, name=_name, **params: "_".join([name, *optional_arguments(*types)]),
            _numbers,
            team=True,
            scratch=_scratch,
        ),
    )
