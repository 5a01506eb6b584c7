"""What the families of C functions share: the two forms of a function, and how a primitive divides into items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from adtrain.core.kernel import CKernel
from adtrain.core.precision import FULL


def item_and_team(
    file: str,
    name: str,
    numbers: Callable[..., Sequence[int | float]],
    items: Callable[..., tuple[bool, ...] | None],
    dtypes: Callable[..., tuple[np.dtype, ...]] | None = None,
    scratch: int = 0,
    checked: bool = False,
) -> tuple[CKernel, CKernel]:
    """The function ``name`` for items, and ``name_team``, which all threads call. ``scratch`` is for the latter."""
    return (
        CKernel(file, name, numbers, dtypes, items, several_items=True, checked=checked),
        CKernel(file, f"{name}_team", numbers, dtypes, team=True, scratch=scratch, checked=checked),
    )


def items_outside_axes(x: Any, axes: Sequence[int], **params: Any) -> tuple[bool, ...] | None:
    """Items of a function of one array that works along ``axes``."""
    return (True,) if x.shape and 0 not in axes else None


def items_outside_axis(x: Any, axis: int, **params: Any) -> tuple[bool, ...] | None:
    """Items of a function of one array that works along ``axis``."""
    return (True,) if axis > 0 else None


def in_full(name: str, precision: str) -> None:
    """Check that a product is in full precision, the only one the C functions compute in.

    Raises:
        NotImplementedError: it is in another.
    """
    if precision != FULL:
        raise NotImplementedError(f"{name} in {precision}")
