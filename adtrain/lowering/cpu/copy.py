"""Transpose, flip, concatenate, slice and pad: strided copies by `copy.c`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adtrain.core.registry import register
from adtrain.lowering import layouts
from adtrain.lowering.cpu.shapes import item_and_team
from adtrain.lowering.layouts import Layout
from adtrain.lowering.shapes import output_type

MAX_AXES = 8
"""Axes that `kernels/cpu/copy.c` iterates over."""


def copy_numbers(layout: Layout) -> tuple[int, ...]:
    """The numbers that `kernels/cpu/copy.c` takes. Axes are in the target's order.

    Raises:
        NotImplementedError: more than MAX_AXES axes are left after neighbouring ones are merged.
    """
    axes: list[tuple[int, int, int]] = []
    for length, source, target in zip(layout.lengths, layout.source_strides, layout.target_strides, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1:] == (source * length, target * length):
            length *= axes.pop()[0]
        axes.append((length, source, target))
    if len(axes) > MAX_AXES:
        raise NotImplementedError(f"a copy of shape {tuple(layout.lengths)}")
    rows = [axis for axis in axes[:-1] if axis[1] == 1]  # contiguous in the source, and not in the target
    if rows:
        axes.remove(rows[0])
        axes.insert(-1, rows[0])
    axes = [(1, 0, 0)] * (MAX_AXES - len(axes)) + axes
    if axes[-1] == (1, 0, 0):  # one element
        axes[-1] = (1, 1, 1)
    return (*(axis[k] for k in range(3) for axis in axes), layout.source_offset, layout.target_offset)


def _numbers(layout: Callable[..., Layout]) -> Callable[..., tuple[int, ...]]:
    return lambda *args, **params: copy_numbers(layout(*args, **params))


def _pad_numbers(x: Any, **params: Any) -> tuple[int | float, ...]:
    return *copy_numbers(layouts.pad(x, **params)), output_type("pad", x, **params).size, params["value"]


register("transpose", "cpu", item_and_team("copy.c", "copy", _numbers(layouts.transpose)))
register("flip", "cpu", item_and_team("copy.c", "copy", _numbers(layouts.flip)))
register("concatenate", "cpu", item_and_team("copy.c", "copy", _numbers(layouts.concatenate), each=True))
register("slice", "cpu", item_and_team("copy.c", "copy", _numbers(layouts.slice)))
register("pad", "cpu", item_and_team("copy.c", "pad", _pad_numbers))
