"""Pooling of images that are channels last, (N, H, W, C). Positions of maxima are bytes where windows are small.

The pass `channels_last` replaces the operations of `ops.pool` by these. It runs after differentiation, so they have no
derivatives.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from adtrain.core.primitive import CHANNELS_LAST, Primitive
from adtrain.core.types import NCHW, NHWC, ArrayType, permuted
from adtrain.ops.pool import Windows, avg_pool2d_p, avg_pool2d_put_p, max_pool2d_p, max_pool2d_pick_p, max_pool2d_put_p


def _positions_type(windows: Windows) -> np.dtype:
    """The type of positions in windows: bytes count up to 256 elements."""
    return np.dtype(np.uint8 if prod(windows.kernel) <= 256 else np.int32)


def _channels_first(params: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**params, "shape": permuted(params["shape"], NCHW)} if "shape" in params else params


def _of_images(of: Primitive, axes: str) -> Primitive:
    """`of`, a pooling or gradient of one, for arrays that are channels last; for ``axes`` see `Primitive`."""

    def types(*inputs: Any, **params: Any) -> tuple[ArrayType, ...]:
        images = [ArrayType(permuted(x.shape, NCHW), x.dtype) for x in inputs]
        first, *positions = of.output_types(images, _channels_first(params))
        found = [ArrayType(x.shape, _positions_type(params["windows"])) for x in positions]
        return tuple(ArrayType(permuted(x.shape, NHWC), x.dtype) for x in (first, *found))

    def reference(*inputs: np.ndarray, **params: Any) -> Any:
        found = of.reference(*(x.transpose(NCHW) for x in inputs), **_channels_first(params))
        first, *positions = found if isinstance(found, tuple) else (found,)
        values = [first, *(x.astype(_positions_type(params["windows"])) for x in positions)]
        results = tuple(np.ascontiguousarray(x.transpose(NHWC)) for x in values)
        return results if positions else results[0]

    def flops(*inputs: Any, **params: Any) -> int:
        images = [ArrayType(permuted(x.shape, NCHW), x.dtype) for x in inputs]
        return of.cost(images, _channels_first(params)).flops

    return Primitive(of.name + CHANNELS_LAST, types, reference, flops=flops, axes=axes)


max_pool2d_last_p = _of_images(max_pool2d_p, "n..c->n..c,n..c")
"""(x: (N, H, W, C); windows) to the maxima and their positions, (N, OH, OW, C)."""
max_pool2d_put_last_p = _of_images(max_pool2d_put_p, "n..c,n..c->n..c")
"""(ct, where: (N, OH, OW, C); windows, shape) to (N, H, W, C), which is the shape."""
max_pool2d_pick_last_p = _of_images(max_pool2d_pick_p, "n..c,n..c->n..c")
"""(x: (N, H, W, C), where: (N, OH, OW, C); windows) to (N, OH, OW, C)."""
avg_pool2d_last_p = _of_images(avg_pool2d_p, "n..c->n..c")
"""(x: (N, H, W, C); windows) to (N, OH, OW, C)."""
avg_pool2d_put_last_p = _of_images(avg_pool2d_put_p, "n..c->n..c")
"""(ct: (N, OH, OW, C); windows, shape) to (N, H, W, C), which is the shape."""
