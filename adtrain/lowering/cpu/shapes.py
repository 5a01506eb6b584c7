"""What the families of C functions share: the two kinds of functions, and how a primitive divides into items."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from adtrain.core.kernel import CKernel
from adtrain.core.precision import FULL


def item_and_team(
    file: str,
    name: str,
    numbers: Callable[..., Sequence[int | float]],
    dtypes: Callable[..., tuple[np.dtype, ...]] | None = None,
    scratch: int = 0,
    checked: bool = False,
    each: bool = False,
) -> tuple[CKernel, CKernel]:
    """The function ``name`` for items, and ``name_team``, which all threads call. ``scratch`` is for the latter."""
    return (
        CKernel(file, name, numbers, dtypes, items=True, several_items=True, each=each, checked=checked),
        CKernel(file, f"{name}_team", numbers, dtypes, team=True, scratch=scratch, each=each, checked=checked),
    )


def in_full(name: str, precision: str) -> None:
    """Check that a product is in full precision, the only one the C functions compute in.

    Raises:
        NotImplementedError: it is in another.
    """
    if precision != FULL:
        raise NotImplementedError(f"{name} in {precision}")
