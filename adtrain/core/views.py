"""Views: primitives whose output shares memory with an argument."""

from __future__ import annotations

from math import prod

import numpy as np

from adtrain.core.array import Value
from adtrain.core.axes import along, whole
from adtrain.core.primitive import Primitive, Trait, no_flops
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, Shape


def _subview_reference(x: np.ndarray, start: int, shape: Shape) -> np.ndarray:
    return x.reshape(-1)[start : start + prod(shape)].reshape(shape)


subview_p: Primitive = Primitive(
    "subview",
    lambda x, start, shape: ArrayType(shape, x.dtype),
    _subview_reference,
    flops=no_flops,
    view=True,
    traits=(Trait.SUBVIEW,),
    axes=lambda x, start, shape: whole([x.ndim], [len(shape)]),
)

concat_view_p: Primitive = Primitive(
    "concat_view",
    lambda *xs: ArrayType((sum(x.shape[0] for x in xs), *xs[0].shape[1:]), xs[0].dtype),
    lambda *xs: np.concatenate(xs),
    flops=no_flops,
    view=True,
    traits=(Trait.CONCAT_VIEW,),
    axes=lambda *xs: along(xs[0].ndim, (0,), arguments=len(xs)),
)
"""``concat_view(*xs)``: the concatenation of the arguments along axis 0. The equations that compute them write into its
memory. Only the pass `place_views` makes this equation, where no copy is needed. It has no derivative."""


def subview(x: Value, start: int, shape: Shape) -> Value:
    """The consecutive elements of ``x`` from flat index ``start`` on, as an array of ``shape``.

    In a Program it shares the memory of ``x``. It has no derivative.
    """
    return bind(subview_p, x, start=start, shape=shape)
