"""What each layer of a model costs: parameters, and floating-point operations as its primitives count them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from adtrain import config, nn, ops
from adtrain.config import Config
from adtrain.core.array import Value
from adtrain.core.autodiff import value_and_grad
from adtrain.core.hooks import Call, Hook, hook

# Batch normalisation needs two images to train on.
TRAINING_BATCH = 2


class LayerCost(NamedTuple):
    """A layer; `output_shape` is that of one image, FLOPs are for one image.

    `forward_flops` is for inference. `backward_flops` is for training, with the gradients of all parameters.
    """

    name: str
    kind: str
    output_shape: nn.Shape
    parameters: int
    forward_flops: int
    backward_flops: int


def layer_costs(cfg: Config) -> list[LayerCost]:
    """A row a layer in the order they run; a container has one where it computes something itself, as a sum does.

    The model is run, on zeros: once forward for one image, and once forward and backward for two.
    Raises ConfigError where the layers do not fit together.
    """
    model, shape, dtype = config.build.model(cfg), cfg.model.input, np.dtype(cfg.training.precision)
    params, statistics = model.init(shape, np.random.default_rng(0), dtype)
    forward, backward = _Flops("forward"), _Flops("backward")

    def total(params: nn.Params) -> Value:
        rng = ops.rng_state(0)
        images = ops.zeros((TRAINING_BATCH, *shape), dtype)
        return ops.sum(model(params, statistics, images, nn.Mode(training=True, rng=rng))[0])

    with hook(forward):
        model(params, statistics, ops.zeros((1, *shape), dtype), nn.Mode(training=False))
    with hook(backward):
        value_and_grad(total)(params)

    layers = nn.describe(model, shape)
    for name in sorted(forward.of.keys() - {row.name for row in layers}, reverse=True):  # the innermost first
        if forward.of[name]:
            last_child = max(i for i, row in enumerate(layers) if row.name.startswith(f"{name}."))
            layers.insert(last_child + 1, nn.LayerRow(name, forward.kinds[name], forward.output_shapes[name], 0))
    return [LayerCost(*row, forward.of[row.name], backward.of[row.name] // TRAINING_BATCH) for row in layers]


class _Flops(Hook):
    """Counts the FLOPs of one phase by layer, and keeps each layer's kind and the shape of its last output."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.of: Counter[str] = Counter()
        self.kinds: dict[str, str] = {}
        self.output_shapes: dict[str, nn.Shape] = {}

    def before(self, call: Call) -> None:
        name, kind = _layer(call.scope)
        if call.phase == self.phase and name:
            self.of[name] += call.primitive.cost(call.args, call.params).flops
            self.kinds[name], self.output_shapes[name] = kind, call.outputs[0].shape[1:]


def _layer(scope: str) -> tuple[str, str]:
    """The layer's name ("2.body.0") and kind, of a scope that names kinds as well ("2.residual.body.0.conv2d")."""
    parts = scope.split(".")
    names = [part for part in parts if part.isdigit() or part in ("body", "shortcut")]
    return ".".join(names), parts[-1]
