"""The C function for `argsort` (`kernels/cpu/sort.c`)."""

from __future__ import annotations

import math
from typing import Any

from adtrain.core.kernel import CKernel
from adtrain.core.registry import register

INDEX_BYTES = 8


def _numbers(x: Any, count: int, descending: bool) -> tuple[int, ...]:
    return math.prod(x.shape[:-1]), x.shape[-1], count, int(descending)


def _scratch(x: Any, count: int, descending: bool) -> int:
    """Bytes for each thread: two lists of the positions of a row."""
    return 2 * INDEX_BYTES * int(x.shape[-1])


register("argsort", "cpu", CKernel("sort.c", "argsort_team", _numbers, team=True, scratch=_scratch))
