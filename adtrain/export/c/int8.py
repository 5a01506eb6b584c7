"""A trained network in int8, by integer arithmetic alone.

A value x stands for x * scale. Weights have a scale for each output channel, activations one for each array, from their
largest numbers on training images (B. Jacob et al., "Quantization and training of neural networks for efficient
integer-arithmetic-only inference", 2018; here without zero points). Batch normalisation becomes part of the product
before it, and a relu that follows is a limit of that product's result. Elementwise equations on one value become a
table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import frexp, log, prod
from typing import NamedTuple

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Variable, body_of
from adtrain.core.staging import evaluate
from adtrain.core.trace import bind
from adtrain.data.statistics import PIXEL_MAX
from adtrain.export.c.code import Argument, Code, Part, Statement
from adtrain.export.c.network import Notes, Translated, factor_and_summand, interface
from adtrain.export.c.statements import conv_sizes, padded, pool_sizes
from adtrain.export.evaluation import Evaluation, evaluation
from adtrain.nn.module import size_text
from adtrain.ops.conv import Window
from adtrain.passes.fusion import elementwise
from adtrain.training import TrainedModel

MOST = 127
"""The largest magnitude of a value."""
LOGIT_UNIT = log(2) / 256
"""The scale of the last layer's results, which have 32 bits: e^-x is then 2^(-k / 256)."""


class Quantized(NamedTuple):
    """A value of the program: its bytes for one image, and the number that 1 stands for."""

    buffer: Variable
    scale: float


class Unary(NamedTuple):
    """A value that elementwise equations, the last one in `place`, compute of one quantized value, `base`, and of
    constant numbers: the results for its 256 numbers."""

    base: Variable
    numbers: Value
    place: str


def translated(trained: TrainedModel, images: np.ndarray) -> Translated:
    """The statements of a network in int8, calibrated on `images` (N, C, H, W) of the training set.

    Raises AdtrainError for images that are not uint8, for probabilities that are not a softmax, and for an operation
    without an int8 version, with its layer.
    """
    network = trained.network
    if network.scale != PIXEL_MAX:
        raise AdtrainError("int8 takes images of bytes, and this run was trained on float32 data; leave out --int8")
    if trained.targets or network.task.predictions is not ops.softmax or trained.config.data.is_text:
        raise AdtrainError("int8 gives classes with the probabilities of a softmax, this run other numbers")
    found = evaluation(trained, len(images)).with_known_weights()
    return _Quantizer(trained, found, Code({}, {}, {}, integers=True)).run(images)


@dataclass
class _Quantizer:
    trained: TrainedModel
    found: Evaluation
    code: Code

    def run(self, images: np.ndarray) -> Translated:
        program = self.found.program
        outputs, predictions = program.outputs
        self.floats: dict[Variable, Value] = {**program.constants, self.found.images: array(images)}
        self.values: dict[Variable, Quantized] = {}
        self.unary: dict[Variable, Unary] = {}
        self.taken: set[Equation] = set()
        self.results: Variable | None = None
        notes = Notes(self.found)
        for e, dead in zip(program.equations, program.last_uses(), strict=True):
            self.code.steps += notes.before(e)
            if e.outputs[0] is predictions:
                break
            self._compute(e)
            if e.scope == "input" and not e.has(Trait.RESHAPE):
                if e.name == "add":  # the last one of the normalisation
                    self._input(e)
            elif e not in self.taken:
                self._add(e)
            for v in dead:
                del self.floats[v]
        logits = self.results or self._rescaled(outputs)
        powers = self.code.constant("powers_of_2", np.round(2.0 ** (16 - np.arange(256) / 256)).astype(np.int32))
        self.code.add(Statement("softmax_16", [logits, logits.size, powers, "probabilities"]))
        return Translated(self.code, logits, logits)

    def _compute(self, e: Equation) -> None:
        """The results of an equation for the calibration images, unless they are there already."""
        if e.outputs[0] not in self.floats:
            found = evaluate(body_of(e), [self.floats[v] for v in dict.fromkeys(e.inputs)])
            self.floats |= zip(e.outputs, found, strict=False)

    def _input(self, e: Equation) -> None:
        """The image, normalised and quantized by a table of the 256 bytes of each channel."""
        network = self.trained.network
        factor, summand = (x.reshape(-1, 1) for x in network.normalization())
        numbers = np.arange(256) * factor + summand
        scale = float(np.abs(numbers).max()) / MOST
        table = self.code.constant("layer_input_table", np.round(numbers / scale).astype(np.int8))
        channels, *sizes = self.trained.image_shape
        example = interface(self.trained).example
        self._write(e.outputs[0], scale, "look_up_image", [example, channels, prod(sizes), table])

    def _add(self, e: Equation) -> None:
        """Add the statements of an equation."""
        given = [v for v in dict.fromkeys(e.inputs) if v not in self.found.known]
        if not given:
            return
        if e.has(Trait.RESHAPE):
            (x,), (y,) = e.inputs, e.outputs
            if y.type.shape[:1] != x.type.shape[:1]:
                raise self._refused(e)
            quantized = self._value(x)
            buffer = self._new(y)
            self.code.same(buffer, quantized.buffer)
            self.values[y] = quantized._replace(buffer=buffer)
        elif e.name in TABLE:
            TABLE[e.name](self, e)
        elif self._is_unary(e, given):
            known: dict[Variable, Value] = {v: self._table(v).numbers for v in given}
            arguments = [known[v] if v in known else array(self.found.known[v].reshape(())) for v in e.inputs]
            numbers = ops.broadcast_to(bind(e.primitive, *arguments, **e.params), (256,))
            self.unary[e.outputs[0]] = Unary(self._table(given[0]).base, numbers, self._path(e))
        elif e.name == "add" and e.inputs[0].type == e.inputs[1].type and len(given) == 2:
            self._sum(e)
        else:
            raise self._refused(e)

    def _is_unary(self, e: Equation, given: Sequence[Variable]) -> bool:
        """Whether each element of the result is a function of one element of one quantized value."""
        single = all(v.size == 1 for v in e.inputs if v in self.found.known)
        alone = elementwise(e) and not e.has(Trait.BROADCAST) and single
        return alone and len({self.unary[v].base if v in self.unary else v for v in given}) == 1

    def _table(self, v: Variable) -> Unary:
        """A value as a function of the 256 numbers of a quantized value."""
        if v in self.unary:
            return self.unary[v]
        return Unary(v, array((np.arange(-128, 128) * self._value(v).scale).astype(np.float32)), "")

    def _refused(self, e: Equation) -> AdtrainError:
        name = "" if self.found.layer_of(e) else f" ({e.name})"
        return AdtrainError(f"{self.found.place_of(e)} has no int8 version{name}; leave out --int8")

    def _value(self, v: Variable) -> Quantized:
        """A value in int8; elementwise equations on one value become a table of its 256 numbers."""
        if v not in self.values:
            base, numbers, place = self.unary[v]
            x, y, scale = self._value(base), self._new(v), self._scale(v)
            table = np.clip(np.round(numbers.numpy() / scale), -MOST, MOST).astype(np.int8)
            name = self.code.constant(f"layer_{place}_table", table)
            self.code.add(Statement("look_up", [x.buffer, y.size, name, y], overwrites=(x.buffer,)))
            self.values[v] = Quantized(y, scale)
        return self.values[v]

    def _path(self, e: Equation) -> str:
        return self.found.layer_of(e) or e.scope

    def _scale(self, v: Variable) -> float:
        """The scale at which the largest number on the calibration images is MOST."""
        return max(float(np.abs(self.floats[v].numpy()).max(initial=0)), 1e-30) / MOST

    def _new(self, v: Variable) -> Variable:
        """A value for one image of `v`."""
        return self.code.value((1, *v.type.shape[1:]), "int8")

    def _write(self, v: Variable, scale: float, function: str, arguments: Sequence[Argument]) -> None:
        y = self._new(v)
        self.code.add(Statement(function, [*arguments, y]))
        self.values[v] = Quantized(y, scale)

    def _only_reader(self, v: Variable, name: str) -> Equation | None:
        readers = self.found.program.readers.get(v, ())
        return readers[0] if len(readers) == 1 and readers[0].name == name else None

    def _then_relu(self, v: Variable) -> tuple[Variable, int]:
        """The relu of `v`, if only that reads it, or `v`; and the least result in int8."""
        relu = self._only_reader(v, "relu")
        if relu is None:
            return v, -MOST
        self.taken.add(relu)
        self._compute(relu)
        self.code.steps.append("relu: the least result is 0")
        return relu.outputs[0], 0

    def _product(self, e: Equation, weight: np.ndarray, bias: np.ndarray, kind: str) -> None:
        """A product with weights (outputs, ...), with the batch normalisation and the relu that follow."""
        x, y, name = self._value(e.inputs[0]), e.outputs[0], f"layer_{self._path(e)}"
        rows = prod(x.buffer.type.shape[1:-1])
        norm = self._only_reader(y, "batch_norm") if e.name != "batch_norm" else None
        if norm is not None:
            if kind == "linear" and rows != 1:
                raise self._refused(norm)
            self.taken.add(norm)
            self._compute(norm)
            factor, summand = factor_and_summand(norm, self.found)
            weight, bias = weight * factor.reshape(-1, *[1] * (weight.ndim - 1)), bias * factor + summand
            y = norm.outputs[0]
        if kind == "linear" and y is self.found.program.outputs[0] and rows == 1:
            self.results = self.code.value((len(weight),), "int32")
            arrays = self._arrays(name, weight, bias, x.scale, LOGIT_UNIT)
            sizes = x.buffer.size, len(weight)
            self.code.add(Statement("linear_32", [x.buffer, *sizes, *arrays, self.results]))
            return
        y, least = self._then_relu(y)
        scale = self._scale(y)
        arrays = self._arrays(name, weight, bias, x.scale, scale)
        if kind == "linear":
            inputs = x.buffer.type.shape[-1]
            self._write(y, scale, "linear", [x.buffer, rows, inputs, len(weight), *arrays, least])
            return
        source, window = x.buffer, e.kernel_params.get("window")
        shape, out = source.type.shape, (1, *y.type.shape[1:])
        if window is None:  # a batch normalisation: a convolution 1x1 of each channel
            shape = out = (1, len(weight), 1, source.size // len(weight))
            window = Window((1, 1), (0, 0), (1, 1), len(weight))
        else:
            source, copies = padded(self.code, e, source)
            shape = source.type.shape
            for copy in copies:
                self.code.add(copy)
        sizes_text = conv_sizes(shape, out, weight.shape, window, (0, 0))
        scratch = self.code.value((prod(out[2:]),), "int32")
        self._write(y, scale, "conv2d", [sizes_text, source, *arrays, least, scratch])

    def _arrays(
        self, name: str, weight: np.ndarray, bias: np.ndarray, given: float, wanted: float
    ) -> tuple[str, str, str, str]:
        """The C names of weight, bias, multiplier and shift for an input of the scale `given` and a result of `wanted`.

        The scale of a channel is that of its largest weight.
        """
        rows = weight.reshape(len(weight), -1)
        scales = np.maximum(np.abs(rows).max(axis=1), 1e-30) / MOST
        limit = 2.0**30
        pairs = np.array([multiplier(float(s) * given / wanted) for s in scales])
        arrays = {
            "weight": np.round(rows / scales[:, None]).astype(np.int8),
            "bias": np.clip(np.round(bias / (scales * given)), -limit, limit).astype(np.int32),
            "multiplier": pairs[:, 0].astype(np.int32),
            "shift": pairs[:, 1].astype(np.int8),
        }
        weight_, bias_, multiplier_, shift = (self.code.constant(f"{name}_{k}", x) for k, x in arrays.items())
        return weight_, bias_, multiplier_, shift

    def _sum(self, e: Equation) -> None:
        a, b = (self._value(v) for v in e.inputs)
        y, least = self._then_relu(e.outputs[0])
        scale, out = self._scale(y), self._new(y)
        ratios = a.scale / scale, b.scale / scale
        _, shift = multiplier(max(ratios))
        multipliers = [round(ratio * 2.0**shift) for ratio in ratios]
        arguments: list[Argument] = [a.buffer, b.buffer, out.size, *multipliers, shift, least, out]
        self.code.add(Statement("add", arguments, overwrites=(a.buffer,)))
        self.values[y] = Quantized(out, scale)

    def _rescaled(self, outputs: Variable) -> Variable:
        x = self._value(outputs)
        if len(outputs.type.shape) != 2:
            found = size_text(outputs.type.shape[1:])
            raise AdtrainError(f"int8 gives one vector of probabilities, this run {found} outputs")
        logits = self.code.value((x.buffer.size,), "int32")
        self.code.add(Statement("rescale_32", [x.buffer, x.buffer.size, *multiplier(x.scale / LOGIT_UNIT), logits]))
        return logits


def product(q: _Quantizer, e: Equation) -> None:
    if not q.found.known.keys() >= set(e.inputs[1:]):
        raise q._refused(e)
    weight, *bias = (q.found.known[v].astype(np.float64) for v in e.inputs[1:])
    if e.name == "linear" and not e.kernel_params["transpose_b"]:
        weight = weight.T
    q._product(e, weight, bias[0] if bias else np.zeros(len(weight)), e.name)


def batch_norm(q: _Quantizer, e: Equation) -> None:
    factor, summand = factor_and_summand(e, q.found)
    q._product(e, factor.reshape(-1, 1, 1, 1), summand, "conv2d")


def max_pool2d(q: _Quantizer, e: Equation) -> None:
    x = q._value(e.inputs[0])
    q._write(e.outputs[0], x.scale, "max_pool2d", [pool_sizes(e), x.buffer])


def avg_pool2d(q: _Quantizer, e: Equation) -> None:
    x, scale = q._value(e.inputs[0]), q._scale(e.outputs[0])
    q._write(e.outputs[0], scale, "avg_pool2d", [pool_sizes(e), x.buffer, *multiplier(x.scale / scale)])


def adaptive_avg_pool2d(q: _Quantizer, e: Equation) -> None:
    (_, *sizes), y = e.inputs[0].type.shape, e.outputs[0]
    if len(sizes) != 3 or (e.name == "mean" and e.kernel_params["axes"] != (2, 3)):
        raise q._refused(e)
    grid = y.type.shape[2:] or (1, 1)
    x, scale = q._value(e.inputs[0]), q._scale(y)
    q._write(y, scale, "adaptive_avg_pool2d", [x.buffer, *sizes, *grid, *multiplier(x.scale / scale)])


def take(q: _Quantizer, e: Equation) -> None:
    if e.params["axis"] != 1 or e.inputs[1] not in q.found.known:
        raise q._refused(e)
    x, chosen = q._value(e.inputs[0]), q.found.known[e.inputs[1]].astype(np.int32).reshape(-1)
    indices = q.code.constant(f"layer_{q._path(e)}_indices", chosen)
    n = prod(e.inputs[0].type.shape[2:])
    q._write(e.outputs[0], x.scale, "take_channels", [x.buffer, indices, len(chosen), n])


def concatenate(q: _Quantizer, e: Equation) -> None:
    if e.params["axis"] != 1 or q.found.known.keys() & set(e.inputs):
        raise q._refused(e)
    (out,), parts = e.outputs, [q._value(v) for v in e.inputs]
    scale, y, start = q._scale(out), q._new(out), 0
    for x in parts:
        q.code.add(Statement("rescale", [x.buffer, x.buffer.size, *multiplier(x.scale / scale), Part(y, start)]))
        start += x.buffer.size
    q.values[out] = Quantized(y, scale)


TABLE: dict[str, Callable[[_Quantizer, Equation], None]] = {
    "linear": product,
    "conv2d": product,
    "batch_norm": batch_norm,
    "max_pool2d": max_pool2d,
    "avg_pool2d": avg_pool2d,
    "mean": adaptive_avg_pool2d,
    "adaptive_avg_pool2d": adaptive_avg_pool2d,
    "take": take,
    "concatenate": concatenate,
}
"""The equations with statements of their own, by name. Sums, reshapes and elementwise equations are in `_add`."""


def multiplier(ratio: float) -> tuple[int, int]:
    """(m, shift) with ratio = m / 2^shift, m of 30 bits, and 1 <= shift <= 62."""
    _, exponent = frexp(ratio)
    shift = min(max(30 - exponent, 1), 62)
    return min(round(ratio * 2.0**shift), 2**31 - 1), shift
