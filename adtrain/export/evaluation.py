"""The evaluation of a trained network as a Program: what every export target walks over.

`evaluation` traces the config's network, from the user's images to predictions. `forms` then makes one equation of the
equations of a layer that targets have a function for. The scopes of the equations name the layers. `compare` compares
predictions of an exported network with those of the original one, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from adtrain import nn, ops
from adtrain.core import tree
from adtrain.core.array import Array, Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.scope import scope
from adtrain.core.staging import Results, keeps, stage
from adtrain.data import Split
from adtrain.data.statistics import PIXEL_MAX
from adtrain.export.forms import recognize_forms
from adtrain.lowering.shapes import optional_arguments
from adtrain.nn.module import size_text
from adtrain.passes import ALL, merge_common_subexpressions, remove_dead_code, simplify_reshapes
from adtrain.training import TrainedModel
from adtrain.training.evaluation import batch_size_of
from adtrain.training.tasks import Multilabel, Regression, Task


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a batch in float32, with the forms of `forms`.

    Attributes:
        program: its inputs are the weights and the images, its outputs the network's outputs and the predictions.
        weights: the names of the weights.
        arrays: the weights and constants.
        layers: by name, in the order in which they run, each with the shape of an input sample.
    """

    program: Program
    weights: Mapping[Variable, str]
    arrays: Mapping[Variable, np.ndarray]
    layers: Mapping[str, tuple[nn.Module, nn.Shape]]

    @property
    def images(self) -> Variable:
        return self.program.inputs[-1]

    def is_plain_attention(self, e: Equation) -> bool:
        """Whether attention has no optional argument, and only one result that is read: what targets have."""
        given = optional_arguments(*(v.type for v in e.inputs))
        return not given and e.outputs[1] not in self.program.readers

    @cached_property
    def known(self) -> Mapping[Variable, np.ndarray]:
        """The values that do not depend on the images."""
        return _known(self.program, self.arrays)

    def layer_of(self, e: Equation) -> str:
        """The name of the layer of an equation; "" where it belongs to none."""
        name = nn.layer_of(e.scope)[0]
        return name if name in self.layers else ""

    def place_of(self, e: Equation) -> str:
        """The layer of an equation for a message: "layer 2.body.0: conv2d"."""
        name, kind = nn.layer_of(e.scope)
        if name in self.layers:
            kind = self.layers[name][0].kind()
        return f"layer {name}: {kind}" if kind else name or "the network"

    def refused(self, e: Equation, reason: str) -> AdtrainError:
        """The error for an equation that a target does not have."""
        return AdtrainError(f"{self.place_of(e)}: {reason}; FILE.safetensors holds the weights of any run")

    def with_known_weights(self) -> Evaluation:
        """The same, with the weights as constants of the Program, and all that follows from them computed."""
        program, constants = self.program, {v: array(x) for v, x in self.arrays.items()}
        folded = remove_dead_code(_fold(replace(program, inputs=(self.images,), constants=constants)))
        return replace(self, program=folded, arrays={v: x.numpy() for v, x in folded.constants.items()})


def evaluation(trained: TrainedModel, batch: int = 1) -> Evaluation:
    """The evaluation of `batch` images of a trained network. Weights of another precision are rounded to float32.

    Raises AdtrainError where a weight is NaN or infinite.
    """
    float32 = np.dtype(np.float32)
    network = replace(trained.network, dtype=float32, products=FULL)

    def forward(params: nn.Params, statistics: nn.State, images: Value) -> tuple[Value, Value]:
        with scope("input"):
            if any(network.offset):
                images = ops.astype(images - np.reshape(network.offset, (-1, 1, 1)), np.float32)
        outputs, _ = network.outputs(params, statistics, images, nn.Mode(training=False))
        with scope("values" if isinstance(network.task, Regression) else "probabilities"):
            return outputs, _predictions(trained, outputs)

    def rounded(x: Value) -> Array:
        if not np.isfinite(x.numpy()).all():
            raise AdtrainError("the model's weights are NaN or infinite: they overflowed in training")
        return array(x.numpy().astype(float32))

    state = tree.map(rounded, trained.params), tree.map(rounded, trained.statistics)
    images = array(np.zeros((batch, *trained.image_shape), image_dtype(trained)))
    passes = remove_dead_code, recognize_forms, _fold, simplify_reshapes, merge_common_subexpressions, remove_dead_code
    program = stage(forward, passes).program(*state, images)
    names = [path for part in state for path in tree.paths(part)]
    weights = dict(zip(program.inputs, names, strict=False))
    arrays = dict(zip(program.inputs, (x.numpy() for x in tree.leaves(state)), strict=False))
    arrays |= {v: x.numpy() for v, x in program.constants.items()}
    layers = {name: (layer, shape) for name, layer, shape in nn.layers(network.model, network.input_shape)}
    return Evaluation(program, weights, arrays, layers)


def image_dtype(trained: TrainedModel) -> np.dtype[Any]:
    """The dtype of the images that an exported network takes; float64 where float32 would lose differences."""
    network = trained.network
    return np.dtype(np.uint8 if network.scale == PIXEL_MAX else np.float64 if any(network.offset) else np.float32)


def _predictions(trained: TrainedModel, outputs: Value) -> Value:
    """`Task.predictions`; numbers are in float64 only where float32 would lose differences between them."""
    task = trained.network.task
    if not isinstance(task, Regression) or task.needs_float64:
        return task.predictions(outputs)
    if not task.normalized:
        return outputs
    std, mean = (np.array(x, np.float32) for x in (task.std, task.mean))
    return outputs * std + mean


@keeps(Results.EXACT)
def _fold(program: Program) -> Program:
    """Compute what follows from constants alone. Broadcasts are not computed: targets read their arguments."""
    found = _known(program, {v: x.numpy() for v, x in program.constants.items()}, broadcasts=False)
    constants = {v: array(np.asarray(x, v.type.dtype)) for v, x in found.items()}
    equations = [e for e in program.equations if not found.keys() >= set(e.outputs)]
    return replace(program, constants=constants, equations=tuple(equations))


def _known(
    program: Program, arrays: Mapping[Variable, np.ndarray], broadcasts: bool = True
) -> dict[Variable, np.ndarray]:
    """`arrays`, and what follows from them; without `broadcasts` not what broadcasts and equations without inputs
    give."""
    found = dict(arrays)
    for e in program.equations:
        if found.keys() >= set(e.inputs) and (broadcasts or (e.inputs and not e.has(Trait.BROADCAST))):
            results = e.primitive.reference(*(found[v] for v in e.inputs), **e.params)
            found |= zip(e.outputs, results if isinstance(results, tuple) else (results,), strict=True)
    return found


def describe(layer: nn.Module, path: str, shape: nn.Shape) -> str:
    """A layer's name, kind, shapes and number of parameters."""
    text = f"{path} {layer.kind()}: {size_text(shape) or 1} -> {size_text(layer.output_shape(shape)) or 1}"
    parameters = sum(map(prod, layer.parameter_shapes(shape).values()))
    return text + (f", {parameters:,} parameters" if parameters else "")


VALUE_TOLERANCE = 1e-3


class Comparison(NamedTuple):
    """Numbers of `images` and of those with a `different` class or label, and the largest differences of each output.

    Differences are absolute. Predicted numbers count as different beyond a relative tolerance of VALUE_TOLERANCE.
    """

    images: int
    different: int
    outputs: dict[str, float]


def compare(
    run: Callable[[np.ndarray], Sequence[np.ndarray]], names: Sequence[str], trained: TrainedModel, examples: Split
) -> Comparison:
    """Run the exported network, `run`, and the original one on all images.

    `run` gives the arrays `names`, which are the outputs (N, ...) and the task's predictions, or the latter only, for
    images before normalisation, (N, C, H, W). Raises AdtrainError where a number of either is NaN or infinite.
    """
    network = trained.network

    def forward(params: nn.Params, statistics: nn.State, batch: Value) -> tuple[Value, ...]:
        outputs, _ = network.outputs(params, statistics, batch, nn.Mode(training=False))
        return (outputs, network.task.predictions(outputs))[-len(names) :]

    ours = stage(forward, ALL)
    different, largest = 0, np.zeros(len(names))
    size = batch_size_of(network.task)
    for start in range(0, len(examples), size):
        batch = np.ascontiguousarray(examples.images[start : start + size])
        expected = [x.numpy() for x in ours(trained.params, trained.statistics, array(batch))]
        found = run(network.original(batch))
        if not all(np.isfinite(x).all() for x in (*found, *expected)):
            raise AdtrainError("the model's outputs are NaN or infinite: its weights overflowed in training")
        different += int(_different(network.task, found[0], expected[0], names[0]).sum())
        gaps = [np.abs(x - y).max() for x, y in zip(found, expected, strict=True)]
        largest = np.maximum(largest, gaps)
    return Comparison(len(examples), different, dict(zip(names, largest.tolist(), strict=True)))


def _different(task: Task, found: np.ndarray, expected: np.ndarray, name: str) -> np.ndarray:
    """Whether the predictions for each image differ: bool (N,)."""
    if isinstance(task, Regression):
        scale = np.maximum(np.abs(expected), np.array(task.std))
        return (np.abs(found - expected) > VALUE_TOLERANCE * scale).any(axis=1)
    if isinstance(task, Multilabel):
        threshold = 0.5 if name == "probabilities" else 0
        return ((found > threshold) != (expected > threshold)).any(axis=1)
    chosen = (x.argmax(axis=-1).reshape(len(x), -1) for x in (found, expected))
    return np.not_equal(*chosen).any(axis=1)
