"""Trilinear interpolation: an operation with its own kernels in C and CUDA C++, forward and backward.

feats (N, 8, F) are the features at the corners of N cubes, points (N, 3) in [-1, 1] the places in them. The result
(N, F) has a gradient by the features; points have none. Check it with ``adtrain gradcheck --plugin trilinear.py``.
`trilinear.yaml` trains a network with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import adtrain as ad
from adtrain import ops
from adtrain.option_types import Size


def corner_weights(points: np.ndarray) -> np.ndarray:
    """(N, 8): corner 4 i + 2 j + k is at the end (1) or start (0) of axes 0, 1, 2."""
    end = (points[:, :, None] + 1) / 2  # (N, 3, 1)
    x, y, z = (np.concatenate([1 - end[:, i], end[:, i]], axis=1) for i in range(3))
    return (x[:, :, None, None] * y[:, None, :, None] * z[:, None, None, :]).reshape(-1, 8)


def definitions(x: Any) -> dict[str, int]:
    return {"WIDE": 4 if x.shape[-1] % 4 == 0 else 1}


def launch(feats: Any, points: Any) -> dict[str, Any]:
    """A thread for every WIDE features of a point."""
    wide = definitions(feats)
    return {"elements": points.shape[0] * feats.shape[-1] // wide["WIDE"], "definitions": wide}


def launch_grad(ct: Any, points: Any) -> dict[str, Any]:
    """A block for every point."""
    return {"blocks": points.shape[0], "threads": 256, "definitions": definitions(ct)}


def numbers(x: Any, points: Any) -> tuple[int, int]:
    return points.shape[0], x.shape[-1]


def trilinear_vjp(ct: ad.Value, out: ad.Value, feats: ad.Value, points: ad.Value) -> tuple[ad.Value, None]:
    return trilinear_grad(ct, points), None


trilinear = ad.custom_op(
    "trilinear",
    shape=lambda feats, points: ad.ArrayType((feats.shape[0], feats.shape[2]), feats.dtype),
    numpy=lambda feats, points: np.einsum("nc,ncf->nf", corner_weights(points), feats),
    c="trilinear.c",
    cuda="trilinear.cu",
    vjp=trilinear_vjp,
    numbers=numbers,
    launch=launch,
    samples=lambda rng: (rng.normal(size=(5, 8, 12)), rng.uniform(-1, 1, (5, 3))),
)

trilinear_grad = ad.custom_op(
    "trilinear_grad",
    shape=lambda ct, points: ad.ArrayType((ct.shape[0], 8, ct.shape[1]), ct.dtype),
    numpy=lambda ct, points: np.einsum("nc,nf->ncf", corner_weights(points), ct),
    c="trilinear.c",
    cuda="trilinear.cu",
    vjp=lambda ct, out, cotangent, points: (trilinear(ct, points), None),
    numbers=numbers,
    launch=launch_grad,
    samples=lambda rng: (rng.normal(size=(5, 12)), rng.uniform(-1, 1, (5, 3))),
)


@ad.register.layer("trilinear")
class Trilinear(ad.nn.Module):
    """Points (3) to features: a cube has trained features at its corners, which are interpolated at each point."""

    features: Size

    def output_shape(self, shape: ad.nn.Shape) -> ad.nn.Shape:
        if shape != (3,):
            raise ad.ShapeError(f"trilinear: expected an input of shape (3,), found {shape}")
        return (self.features,)

    def parameter_shapes(self, shape: ad.nn.Shape) -> dict[str, ad.nn.Shape]:
        return {"weight": (8, self.features)}

    def new_arrays(
        self, shape: ad.nn.Shape, rng: np.random.Generator, dtype: np.dtype[Any]
    ) -> tuple[ad.nn.Params, ad.nn.State]:
        return {"weight": ad.array(rng.normal(size=(8, self.features)).astype(dtype))}, {}

    def forward(
        self, params: ad.nn.Params, state: ad.nn.State, x: ad.Value, mode: ad.nn.Mode
    ) -> tuple[ad.Value, ad.nn.State]:
        corners = ops.broadcast_to(params["weight"], (x.shape[0], 8, self.features))
        return trilinear(corners, x), state


def composed(feats: ad.Value, points: ad.Value) -> ad.Value:
    """The same by public operations, which passes fuse."""
    end = (points + 1.0) * 0.5
    x, y, z = (ops.stack([1.0 - end[:, i], end[:, i]], axis=1) for i in range(3))
    weights = x[:, :, None, None] * y[:, None, :, None] * z[:, None, None, :]
    return (weights.reshape(-1, 8, 1) * feats).sum(axis=1)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    feats, points = ad.array(rng.normal(size=(4, 8, 8))), ad.array(rng.uniform(-1, 1, (4, 3)))
    for name, f in (("own kernels", trilinear), ("composed", composed)):
        loss, gradient = ad.value_and_grad(lambda feats, f=f: ops.square(f(feats, points)).sum())(feats)
        print(f"{name:11}  loss {loss.item():.6f}, gradient {ops.abs(gradient).sum().item():.6f}")
