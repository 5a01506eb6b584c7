"""argsort: `sort.c`."""

from __future__ import annotations

import math
from typing import Any

from adtrain.core.kernel import CKernel
from adtrain.core.registry import register

INDEX_BYTES = 8


def _numbers(x: Any, descending: bool) -> tuple[int, ...]:
    return math.prod(x.shape[:-1]), x.shape[-1], int(descending)


def _scratch(x: Any, descending: bool) -> int:
    """The positions of a row, for each thread."""
    return INDEX_BYTES * int(x.shape[-1])


register("argsort", "cpu", CKernel("sort.c", "argsort_team", _numbers, team=True, scratch=_scratch))
