"""Views: primitives whose output shares the memory of an argument, or has its arguments in its memory."""

from __future__ import annotations

from math import prod

import numpy as np

from adtrain.core.primitive import Primitive, Trait, no_flops
from adtrain.core.types import ArrayType, Shape


def _part_reference(x: np.ndarray, start: int, shape: Shape) -> np.ndarray:
    return x.reshape(-1)[start : start + prod(shape)].reshape(shape)


part_p: Primitive = Primitive(
    "part",
    lambda x, start, shape: ArrayType(shape, x.dtype),
    _part_reference,
    flops=no_flops,
    view=True,
    traits=(Trait.PART,),
)
"""``part(x, start, shape)``: the elements of ``x`` from number ``start`` on, as an array of ``shape``. It has no
derivative."""

joined_p: Primitive = Primitive(
    "joined",
    lambda *xs: ArrayType((sum(x.shape[0] for x in xs), *xs[0].shape[1:]), xs[0].dtype),
    lambda *xs: np.concatenate(xs),
    flops=no_flops,
    view=True,
    traits=(Trait.JOIN,),
)
"""``joined(*xs)``: the arguments one after another along axis 0. The equations that compute them write into its memory;
`passes.place_views` makes it where they can."""
