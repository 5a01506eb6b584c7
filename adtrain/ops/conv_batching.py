"""Batching rules of the convolution and its gradients.

If members share the weights, their images become one batch. If they share the images, their filters become output
channels of one convolution. Otherwise members are groups of channels: an image is (members x channels, H, W).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from adtrain.core.array import Value
from adtrain.core.batching_rules import all_mapped, fold, move_axes, unfold
from adtrain.ops.broadcasting import reshape

Op = Callable[..., Value]


def conv2d_batch(op: Op, mapped: Sequence[bool], x: Value, w: Value, window: Any, **params: Any) -> Value:
    if not mapped[1]:
        return unfold(op(fold(x), w, window=window, **params), x.shape[0])
    members = w.shape[0]
    if not mapped[0] and window.groups == 1:
        out = op(x, fold(w), window=window, **params)
    else:
        x, w = all_mapped(mapped, (x, w))
        out = op(_as_channels(x), fold(w), window=_grouped(window, members), **params)
    return _from_channels(out, members)


def input_grad_batch(op: Op, mapped: Sequence[bool], g: Value, w: Value, window: Any, **params: Any) -> Value:
    if not mapped[1]:
        return unfold(op(fold(g), w, window=window, **params), g.shape[0])
    g, w = all_mapped(mapped, (g, w))
    members = w.shape[0]
    return _from_channels(op(_as_channels(g), fold(w), window=_grouped(window, members), **params), members)


def weight_grad_batch(
    op: Op, mapped: Sequence[bool], x: Value, g: Value, window: Any, by_image: Op, **params: Any
) -> Value:
    """`by_image` computes the weight gradient of each image, for members of one image."""
    if not mapped[0] and window.groups == 1:
        return unfold(op(x, _as_channels(g), window=window, **params), g.shape[0])
    x, g = all_mapped(mapped, (x, g))
    members = x.shape[0]
    if x.shape[1] == 1:
        return by_image(fold(x), fold(g), window=window, **params)
    return unfold(op(_as_channels(x), _as_channels(g), window=_grouped(window, members), **params), members)


def _grouped(window: Any, members: int) -> Any:
    return window._replace(groups=window.groups * members)


def _as_channels(x: Value) -> Value:
    """(members, N, C, H, W) to (N, members x C, H, W)."""
    members, n, c, *image = x.shape
    return reshape(move_axes(x, 0, 1), (n, members * c, *image))


def _from_channels(x: Value, members: int) -> Value:
    """(N, members x C, H, W) to (members, N, C, H, W)."""
    n, channels, *image = x.shape
    return move_axes(reshape(x, (n, members, channels // members, *image)), 1, 0)
