"""Normalisation layers."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError, ShapeError
from adtrain.core.options import Expected
from adtrain.nn.module import IMAGE_AXES, Mode, Module, Params, Shape, State, check_inferred, check_ndim
from adtrain.option_types import Fraction, NonNegative, Size, SizeOrShape


class _NormLayer(Module):
    """A layer with a "weight" that starts at one and a "bias" that starts at zero; `affine` says which it has."""

    affine: Any

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {name: shape[:1] for name in ("weight", "bias") if self.affine in (True, name)}

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        sizes = self.parameter_shapes(shape)
        return {name: array(np.full(size, float(name == "weight"), dtype)) for name, size in sizes.items()}, {}


@dataclass(frozen=True)
class _BatchNorm(_NormLayer):
    num_features: Size | None = None
    _: KW_ONLY
    eps: NonNegative = 1e-5
    momentum: Fraction = 0.1
    affine: Annotated[Literal["weight", "bias"] | bool, Expected("weight, bias, true or false")] = True
    sync: bool = False

    def output_shape(self, shape: Shape) -> Shape:
        check_inferred(self, "num_features", shape[0], shape)
        return shape

    def new_arrays(self, shape: Shape, rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Params, State]:
        params, _ = super().new_arrays(shape, rng, dtype)
        channels = shape[0]
        return params, {
            "running_mean": array(np.zeros(channels, dtype)),
            "running_var": array(np.ones(channels, dtype)),
        }

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        training = mode.is_training(self)
        if "running_mean" not in state:
            raise AdtrainError(f"{self.kind()}: running_mean is not in the state, expected the state from init")
        y, running_mean, running_var = ops.batch_norm(
            x,
            state["running_mean"],
            state["running_var"],
            params.get("weight"),
            params.get("bias"),
            training=training,
            momentum=self.momentum,
            eps=self.eps,
            shards=mode.shards if self.sync else (),
        )
        return y, {"running_mean": running_mean, "running_var": running_var}


@dataclass(frozen=True)
class BatchNorm1d(_BatchNorm):
    """Batch normalisation of samples (channels,) or (channels, length); options as of `batch_norm2d`."""

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) not in (1, 2):
            raise ShapeError(
                f"batch_norm1d: expected an input of shape (channels,) or (channels, length), found {shape}"
            )
        return super().output_shape(shape)


@dataclass(frozen=True)
class BatchNorm2d(_BatchNorm):
    """Batch normalisation (Ioffe and Szegedy 2015) of images (channels, height, width).

    Training normalises by the batch's mean and biased variance, and moves the running mean and the running variance
    (unbiased) towards the batch's by the fraction `momentum`. Evaluation normalises by the running statistics.

    With `affine: weight` or `affine: bias` the layer has this parameter only: the bias is 0, or the weight 1.

    In a batch that is divided into shards, the mean and the variance are those of a shard; with `sync` those of the
    whole batch, as in PyTorch's SyncBatchNorm.
    """

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, IMAGE_AXES)
        return super().output_shape(shape)


@dataclass(frozen=True)
class _LastAxesNorm(_NormLayer):
    normalized_shape: SizeOrShape | None = None

    def output_shape(self, shape: Shape) -> Shape:
        normalized = self._normalized_shape(shape)
        if not shape or shape[-len(normalized) :] != normalized:
            raise ShapeError(
                f"{self.kind()}: normalized_shape {normalized} is not the end of the input's shape {shape}"
            )
        return shape

    def by_token(self, shape: Shape) -> bool:
        return len(self._normalized_shape(shape)) < len(shape)

    def _normalized_shape(self, shape: Shape) -> Shape:
        if self.normalized_shape is None:
            return shape[-1:]
        return self.normalized_shape if isinstance(self.normalized_shape, tuple) else (self.normalized_shape,)


@dataclass(frozen=True)
class LayerNorm(_LastAxesNorm):
    """Normalisation of each sample over its last axes (Ba et al. 2016).

    `normalized_shape` holds the sizes of these axes; by default it is the size of the last axis.
    """

    _: KW_ONLY
    eps: NonNegative = 1e-5
    elementwise_affine: bool = True

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        normalized = self._normalized_shape(shape)
        return {"weight": normalized, "bias": normalized} if self.elementwise_affine else {}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        normalized = self._normalized_shape(x.shape[1:])
        return ops.layer_norm(x, normalized, params.get("weight"), params.get("bias"), eps=self.eps), state


@dataclass(frozen=True)
class RMSNorm(_LastAxesNorm):
    """Division of each sample by the root mean square over its last axes (Zhang and Sennrich 2019).

    `normalized_shape` is as in `LayerNorm`. `eps` is added to the mean square; by default it is the epsilon of the
    numbers' type.
    """

    _: KW_ONLY
    eps: NonNegative | None = None
    elementwise_affine: bool = True

    @classmethod
    def kind(cls) -> str:
        return "rms_norm"

    def parameter_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"weight": self._normalized_shape(shape)} if self.elementwise_affine else {}

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        axes = tuple(range(x.ndim - len(self._normalized_shape(x.shape[1:])), x.ndim))
        eps = float(np.finfo(x.dtype).eps) if self.eps is None else self.eps
        y = x * ops.rsqrt(ops.mean(ops.square(x), axes, keepdims=True) + eps)
        return y * params["weight"] if self.elementwise_affine else y, state


@dataclass(frozen=True)
class GroupNorm(_NormLayer):
    """Normalisation of each sample over groups of its channels, the first axis (Wu and He 2018)."""

    num_groups: Size
    _: KW_ONLY
    num_channels: Size | None = None
    eps: NonNegative = 1e-5
    affine: bool = True

    def output_shape(self, shape: Shape) -> Shape:
        if not shape:
            raise ShapeError(f"group_norm: expected an input of shape (channels, ...), found {shape}")
        check_inferred(self, "num_channels", shape[0], shape)
        if shape[0] % self.num_groups:
            raise ShapeError(
                f"group_norm: the input's {shape[0]} channels are not a multiple of num_groups {self.num_groups}: "
                f"{shape}"
            )
        return shape

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return ops.group_norm(x, self.num_groups, params.get("weight"), params.get("bias"), eps=self.eps), state


@dataclass(frozen=True)
class InstanceNorm2d(_NormLayer):
    """Normalisation of each channel of each image (Ulyanov et al. 2016)."""

    num_features: Size | None = None
    _: KW_ONLY
    eps: NonNegative = 1e-5
    affine: bool = False

    def output_shape(self, shape: Shape) -> Shape:
        check_ndim(self, shape, IMAGE_AXES)
        check_inferred(self, "num_features", shape[0], shape)
        return shape

    def forward(self, params: Params, state: State, x: Value, mode: Mode) -> tuple[Value, State]:
        return ops.group_norm(x, x.shape[1], params.get("weight"), params.get("bias"), eps=self.eps), state
