"""The evaluation of a trained network as a Program: what every export target walks over.

`evaluation` traces the config's network, from the user's images to predictions. The scopes of the equations name the
layers. `compare` compares predictions of an exported network with those of the original one, on the CPU.

A form is the equations of one layer as one fused equation, where targets have an operation for the whole layer. It is
recognised by its equations, so it does not matter which layer made them. Each function of FORMS starts at one equation,
and returns the form of the equations around it, or None. The arguments of a form are in the order of its docstring.
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
from adtrain.core.program import Equation, Program, Variable, fuse
from adtrain.core.staging import Results, keeps, stage
from adtrain.core.trace import scope
from adtrain.data import Split
from adtrain.data.statistics import PIXEL_MAX
from adtrain.lowering.shapes import optional_arguments
from adtrain.nn.module import size_text
from adtrain.ops.pool import averages
from adtrain.passes import ALL, merge_common_subexpressions, remove_dead_code, simplify_reshapes
from adtrain.passes.fusion import with_copies
from adtrain.training import TrainedModel
from adtrain.training.evaluation import batch_size_of
from adtrain.training.tasks import Multilabel, Regression, Task


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a batch in float32, with forms.

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


EXAMPLES = {"images": "image", "rows": "row", "sequences": "text", "points": "point", "examples": "example"}
"""The name of one example, by what the data consist of."""


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

    `run` gives the arrays `names`, which are the outputs (N, ...) and the task's predictions, or the predictions only,
    for images before normalisation, (N, C, H, W). Raises AdtrainError where a number of either is NaN or infinite.
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


class _Reader:
    """Finds equations around another one. An equation belongs to one form at most."""

    def __init__(self, program: Program) -> None:
        self.constants = program.constants
        self.producers = {v: e for e in program.equations for v in e.outputs}
        self.readers = program.readers
        self.outputs = set(program.outputs)
        self.taken: set[Equation] = set()

    def maker(self, v: Variable, *names: str) -> Equation | None:
        """The equation that computes `v` if it has one of the names and belongs to no form."""
        e = self.producers.get(v)
        return e if e is not None and e.name in names and e not in self.taken else None

    def only(self, v: Variable) -> bool:
        """Whether one equation reads `v`, and the Program does not return it."""
        return len(self.readers.get(v, ())) == 1 and v not in self.outputs

    def used(self, v: Variable) -> bool:
        """Whether an equation reads `v`, or the Program returns it."""
        return bool(self.readers.get(v)) or v in self.outputs

    def reader(self, v: Variable, *names: str) -> Equation | None:
        """The only equation that reads `v`, if it has one of the names."""
        e = self.readers[v][0] if self.only(v) else None
        return e if e is not None and e.name in names and e not in self.taken else None

    def along(self, v: Variable, axis: int) -> tuple[Variable, list[Equation]] | None:
        """The vector that `v` repeats along all axes but `axis`, and the equations that repeat it."""
        spread = self.maker(v, "broadcast_to")
        if spread is None or not self.only(v):
            return None
        (source,), shape = spread.inputs, v.type.shape
        position = axis - (len(shape) - len(source.type.shape))
        if position < 0 or source.type.shape[position] != shape[axis] or source.size != shape[axis]:
            return None
        if source.type.shape == (source.size,):
            return source, [spread]
        column = self.maker(source, "reshape")
        if column is None or not self.only(source) or column.inputs[0].type.shape != (source.size,):
            return None
        return column.inputs[0], [column, spread]

    def number(self, v: Variable) -> float | None:
        """A constant with one element."""
        x: Array | None = self.constants.get(v)
        return float(x.numpy().reshape(())) if x is not None and x.size == 1 else None

    def then(self, y: Variable, name: str, axis: int) -> tuple[Variable, list[Equation]] | None:
        """The vector along `axis` that the only reader of `y`, an equation `name`, combines with it."""
        e = self.reader(y, name)
        other = None if e is None else self.along(_other(e, y), axis)
        return None if e is None or other is None else (other[0], [*other[1], e])

    def affine(self, y: Variable, axis: int) -> tuple[list[Variable], list[Equation]]:
        """A weight and a bias along `axis` that `y` is multiplied by and that are added; none where one is missing."""
        weight = self.then(y, "mul", axis)
        bias = None if weight is None else self.then(weight[1][-1].outputs[0], "add", axis)
        return ([], []) if weight is None or bias is None else ([weight[0], bias[0]], [*weight[1], *bias[1]])


Form = tuple[str, Sequence[Equation], Sequence[Variable]]
"""Its name, its equations and its arguments."""


def _other(e: Equation, v: Variable) -> Variable:
    a, b = e.inputs
    return b if a is v else a


def _linear(read: _Reader, e: Equation) -> Form | None:
    """linear(x, weight[, bias]): x weight, or x weightᵀ with `transpose_b`, for an x of any number of axes."""
    (rows, weight), (y,) = e.inputs, e.outputs
    if len(weight.type.shape) != 2 or len(rows.type.shape) != 2 or e.params["transpose_a"]:
        return None
    x, equations = rows, [e]
    flat, back = read.maker(rows, "reshape"), read.reader(y, "reshape")
    if flat is not None and back is not None and read.only(rows):
        (given,), (shaped,) = flat.inputs, back.outputs
        if given.type.shape[:-1] == shaped.type.shape[:-1] and given.type.shape[-1] == rows.type.shape[-1]:
            x, y, equations = given, shaped, [flat, e, back]
    if (bias := read.then(y, "add", len(y.type.shape) - 1)) is not None:
        return "linear", [*equations, *bias[1]], [x, weight, bias[0]]
    return "linear", equations, [x, weight]


def _convolution(read: _Reader, e: Equation) -> Form | None:
    """conv2d or conv2d_input_grad (x, weight[, bias]). Zeros around x are the `low` and `high` of a pad in the body."""
    x, weight = e.inputs
    equations, parts = [e], [weight]
    pad = read.maker(x, "pad") if e.name == "conv2d" and read.only(x) else None
    if pad is not None and pad.params["value"] == 0 and not any(pad.params["gaps"]):
        low, high = pad.params["low"], pad.params["high"]
        if not any((*low[:2], *high[:2])):
            x, equations = pad.inputs[0], [pad, e]
    if (bias := read.then(e.outputs[0], "add", 1)) is not None:
        equations, parts = [*equations, *bias[1]], [weight, bias[0]]
    return e.name, equations, [x, *parts]


def _batch_norm(read: _Reader, e: Equation) -> Form | None:
    """batch_norm(x, mean, variance, eps[, weight, bias]) with given statistics of each channel, axis 1."""
    difference = e
    mean = read.along(e.inputs[1], 1) if len(e.outputs[0].type.shape) > 1 else None
    scaled = read.reader(e.outputs[0], "mul")
    scale = None if scaled is None else read.along(_other(scaled, e.outputs[0]), 1)
    root = None if scale is None or not read.only(scale[0]) else read.maker(scale[0], "rsqrt")
    shifted = None if root is None else read.maker(root.inputs[0], "add")
    if mean is None or scaled is None or scale is None or root is None or shifted is None:
        return None
    variance, eps = shifted.inputs
    if read.number(eps) is None or not read.only(root.inputs[0]):
        return None
    parts, affine = read.affine(scaled.outputs[0], 1)
    equations = [*mean[1], difference, shifted, root, *scale[1], scaled, *affine]
    return "batch_norm", equations, [e.inputs[0], mean[0], variance, eps, *parts]


def _layer_norm(read: _Reader, e: Equation) -> Form | None:
    """layer_norm(x[, weight, bias]) over the last axes: `standardize`, and factors of the shape of these axes."""
    (x,), (y, *statistics) = e.inputs, e.outputs
    axes, shape = e.params["axes"], x.type.shape
    if axes != tuple(range(len(shape) - len(axes), len(shape))) or any(map(read.used, statistics)):
        return None
    alone: Form = ("layer_norm", [e], [x])
    parts: list[Variable] = []
    equations = [e]
    for name in ("mul", "add"):
        reader = read.reader(y, name)
        spread = None if reader is None else read.maker(_other(reader, y), "broadcast_to")
        if reader is None or spread is None or not read.only(spread.outputs[0]):
            return alone
        if spread.inputs[0].type.shape != shape[-len(axes) :]:
            return alone
        parts, equations, y = [*parts, *spread.inputs], [*equations, spread, reader], reader.outputs[0]
    return "layer_norm", equations, [x, *parts]


def _max_pool2d(read: _Reader, e: Equation) -> Form | None:
    """max_pool2d(x) without the positions of the maxima."""
    return None if read.used(e.outputs[1]) else ("max_pool2d", [e], e.inputs)


def _mean(read: _Reader, e: Equation) -> Form | None:
    """mean(x, count) over the `axes` of a sum."""
    (x,), (y,) = e.inputs, e.outputs
    keep = read.reader(y, "reshape")
    total = y if keep is None else keep.outputs[0]
    divided = read.reader(total, "div")
    if divided is None or divided.inputs[0] is not total:
        return None
    if read.number(divided.inputs[1]) != prod(x.type.shape[i] for i in e.params["axes"]):
        return None
    return "mean", [e, *([] if keep is None else [keep]), divided], [x, divided.inputs[1]]


def _adaptive_avg_pool2d(read: _Reader, e: Equation) -> Form | None:
    """adaptive_avg_pool2d(x, rows, columns): products with the matrices of `ops.pool.averages`."""
    left, inner = e.inputs
    spread, back = read.maker(left, "broadcast_to"), read.maker(inner, "reshape")
    product = None if back is None else read.maker(back.inputs[0], "matmul")
    flat = None if product is None else read.maker(product.inputs[0], "reshape")
    if spread is None or back is None or product is None or flat is None:
        return None
    if not all(read.only(v) for v in (left, inner, back.inputs[0], product.inputs[0])):
        return None
    matrices, x = (spread.inputs[0], product.inputs[1]), flat.inputs[0]
    if len(x.type.shape) != 4 or len(e.outputs[0].type.shape) != 4 or not product.params["transpose_b"]:
        return None
    for matrix, length, count in zip(matrices, x.type.shape[2:], e.outputs[0].type.shape[2:], strict=True):
        known = read.constants.get(matrix)
        if known is None or not np.array_equal(known.numpy(), averages(length, count).astype(known.dtype)):
            return None
    return "adaptive_avg_pool2d", [flat, product, back, spread, e], [x, *matrices]


def _embedding(read: _Reader, e: Equation) -> Form | None:
    """embedding(numbers, weight): rows of a matrix at numbers that become integers."""
    weight, indices = e.inputs
    cast = read.maker(indices, "astype")
    if e.params["axis"] or cast is None or not read.only(indices) or len(weight.type.shape) != 2:
        return None
    return "embedding", [cast, e], [cast.inputs[0], weight]


def _recurrent(read: _Reader, e: Equation) -> Form | None:
    """CELL_layer(x, weight_ih, weight_hh, *biases): a recurrent layer in one direction from zero states."""
    products, weight_hh, *rest = e.inputs
    back = read.maker(products, "reshape")
    product = None if back is None else read.maker(back.inputs[0], "matmul")
    flat = None if product is None else read.maker(product.inputs[0], "reshape")
    count = 2 if e.name == "gru" else 1
    states = [read.maker(v, "full") for v in dict.fromkeys(rest[count:])]
    if back is None or product is None or flat is None or any(s is None or s.params["value"] for s in states):
        return None
    values = (products, back.inputs[0], product.inputs[0], *rest[count:])
    if not all(map(read.only, values)) or any(map(read.used, e.outputs[1 + len(rest) - count :])):
        return None
    equations = [flat, product, back, *(s for s in states if s is not None), e]
    return f"{e.name}_layer", equations, [flat.inputs[0], product.inputs[1], weight_hh, *rest[:count]]


FORMS: Sequence[tuple[Callable[[_Reader, Equation], Form | None], Sequence[str]]] = (
    (_adaptive_avg_pool2d, ("matmul",)),
    (_recurrent, ("rnn_tanh", "rnn_relu", "lstm", "gru")),
    (_linear, ("matmul",)),
    (_convolution, ("conv2d", "conv2d_input_grad")),
    (_batch_norm, ("sub",)),
    (_layer_norm, ("standardize",)),
    (_max_pool2d, ("max_pool2d",)),
    (_mean, ("sum",)),
    (_embedding, ("take",)),
)
"""Each form with the names of the equations that it may start at. Earlier forms take equations first."""


def _own_views(program: Program) -> Program:
    """A copy of each reshape and broadcast for each equation that reads it, so that a form can take it."""
    shared = {v for v, readers in program.readers.items() if len(readers) > 1 or v in program.outputs}

    def copied(e: Equation, reader: Equation) -> bool:
        return (e.has(Trait.RESHAPE) or e.has(Trait.BROADCAST)) and e.outputs[0] in shared

    return remove_dead_code(with_copies(program, copied))


@keeps(Results.EXACT)
def recognize_forms(program: Program) -> Program:
    """`program` with one fused equation for each form."""
    program = _own_views(_own_views(program))  # a vector may be reshaped, then broadcast
    read = _Reader(program)
    found: dict[Equation, Equation] = {}  # by the last equation of each form
    position = {e: i for i, e in enumerate(program.equations)}
    for recognize, names in FORMS:
        for start in program.equations:
            form = recognize(read, start) if start.name in names and start not in read.taken else None
            if form is not None and len(set(form[2])) == len(form[2]):
                name, members, arguments = form
                ordered = sorted(members, key=position.__getitem__)
                needed = set(filter(read.used, ordered[-1].outputs))
                read.taken.update(ordered)
                found[ordered[-1]] = fuse(name, ordered, needed, tuple(arguments))
    equations = [found.get(e, e) for e in program.equations if e in found or e not in read.taken]
    return replace(program, equations=tuple(equations))
