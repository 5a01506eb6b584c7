"""Normalisation: `norm.c`."""

from __future__ import annotations

from typing import Any

from adtrain.core.registry import register
from adtrain.lowering.cpu.shapes import item_and_team
from adtrain.lowering.shapes import alternating


def _numbers(x: Any, axes: tuple[int, ...], eps: float) -> tuple[int | float, ...]:
    return *alternating(x.shape, axes, 4), float(eps)


register("standardize", "cpu", item_and_team("norm.c", "standardize", _numbers))
