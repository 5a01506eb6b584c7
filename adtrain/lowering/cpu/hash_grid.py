"""The hash encoding of points: `hash_grid.c`."""

from __future__ import annotations

from typing import Any

from adtrain.core.kernel import CKernel, register
from adtrain.lowering.cpu.shapes import item_and_team
from adtrain.lowering.layouts import hash_grid, hash_grid_add


def _dtypes(x: Any, *others: Any, **params: Any) -> tuple[Any, ...]:
    return (x.dtype,)


register("hash_grid", "cpu", item_and_team("hash_grid.c", "hash_grid", hash_grid, _dtypes))
register("hash_grid_add", "cpu", CKernel("hash_grid.c", "hash_grid_add_team", hash_grid_add, _dtypes, team=True))
