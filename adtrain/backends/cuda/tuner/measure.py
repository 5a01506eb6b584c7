"""Measures the candidates for one equation: checks their results, then times the right ones in alternating rounds.

The right results are those of the NumPy reference in float64. Where it would take long it computes a part of them.
Nothing here needs a GPU: a `Trial` runs and times a candidate.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from statistics import median
from typing import Any, Protocol

import numpy as np

from adtrain.backends.cuda.lower import Candidate
from adtrain.backends.cuda.vendor import NotOffered
from adtrain.core.errors import AdtrainError, DeviceFault
from adtrain.core.precision import FULL, TERMS, TF32, mantissa
from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation
from adtrain.core.types import BITS, ArrayType

ROUNDS = 5
SLOW = 1.5
"""A candidate slower than this many times the fastest one in the first round is not timed again."""

_log = logging.getLogger(__name__)


class Trial(Protocol):
    """The candidates for one equation, run on the same arguments."""

    def expected(self) -> Sequence[np.ndarray]:
        """The right results, or parts of them: of the NumPy reference in float64."""
        ...

    def results(self, kernel: Candidate) -> Sequence[np.ndarray]:
        """The same parts of the candidate's results. Its outputs and scratch hold NaN (integers: -1) before it runs.

        Raises:
            NotOffered: the library does not offer the candidate.
            DeviceFault: the kernel crashed. This process cannot use the device any more.
            AdtrainError: it does not compile, or cannot be launched.
        """
        ...

    def microseconds(self, kernel: Candidate) -> float:
        """The mean time of consecutive launches."""
        ...


def measure(equation: Equation, kernels: Sequence[Candidate], trials: Sequence[Trial]) -> Mapping[str, float]:
    """Microseconds by label, of the candidates that are right: the median over rounds of the mean over trials.

    A candidate whose results are wrong in any trial is left out, with a warning that names it.
    """
    labels = [kernel.label for kernel in kernels]
    right = dict(zip(labels, kernels, strict=True))
    for trial in trials:
        expected = trial.expected()
        for name, short in zip(labels, distinct(labels), strict=True):
            if name in right and not _is_right(equation, right[name], short, trial, expected):
                del right[name]

    def microseconds(kernel: Candidate) -> float:
        return sum(trial.microseconds(kernel) for trial in trials) / len(trials)

    times = {name: [microseconds(kernel)] for name, kernel in right.items()}
    best = min((first[0] for first in times.values()), default=0.0)
    close = [name for name, first in times.items() if first[0] < SLOW * best]
    for _ in range(ROUNDS - 1):
        for name in close:
            times[name].append(microseconds(right[name]))
    return {name: median(rounds) for name, rounds in times.items()}


def _is_right(equation: Equation, kernel: Candidate, name: str, trial: Trial, expected: Sequence[np.ndarray]) -> bool:
    try:
        found = trial.results(kernel)
    except DeviceFault:
        raise
    except NotOffered:
        return False
    except AdtrainError as error:
        _log.warning("adtrain: warning: %s: not used for %s (%s)", name, described(equation), error)
        return False
    if agree(found, expected, tolerance(equation)):
        return True
    _log.warning("adtrain: warning: %s: not used for %s, its result is wrong", name, described(equation))
    return False


def agree(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> bool:
    """Whether integers are equal, and floats within ``tolerance`` times the largest magnitude. NaN never agrees."""

    def same(x: np.ndarray, y: np.ndarray) -> bool:
        if y.dtype.kind != "f":
            return np.array_equal(x, y)
        with np.errstate(invalid="ignore"):
            return bool(np.all(np.abs(x - y) <= tolerance * np.abs(y).max(initial=0)))

    return all(same(x, y) for x, y in zip(found, expected, strict=True))


def tolerance(equation: Equation) -> float:
    """The largest error of a right result, as a share of the largest magnitude.

    It grows with the square root of the length of sums, and with the rounding of operands by ``precision`` and of
    results to bfloat16.
    """
    inputs, params = [v.type for v in equation.inputs], equation.params
    floats = [t.dtype for t in (*inputs, *(v.type for v in equation.outputs)) if t.dtype.kind == "f"]
    eps = max((float(np.finfo(dtype).eps) for dtype in floats), default=0.0)
    outputs = max(sum(v.size for v in equation.outputs), 1)
    lengths = [1, equation.primitive.cost(inputs, params).flops / outputs, *(t.size / outputs for t in inputs)]
    if "axis" in params:
        lengths.append(inputs[0].shape[params["axis"]])
    precision = equation.kernel_params.get("precision", "full")
    rounding = 0.0 if precision == "full" else 2 * 2.0 ** -mantissa(precision)
    if any(v.type.dtype == BITS for v in equation.outputs):
        rounding += 2.0 ** -mantissa("bfloat16")
    return 8 * eps * math.sqrt(max(lengths)) + rounding


def distinct(labels: Sequence[str]) -> list[str]:
    """The labels without the words that all of them contain, except the first word."""
    common = set.intersection(*(set(label.split()[1:]) for label in labels)) if len(labels) > 1 else set()
    return [" ".join(word for i, word in enumerate(label.split()) if i == 0 or word not in common) for label in labels]


def described(equation: Equation) -> str:
    """The problem in a few words: "matmul float32[128, 784] float32[512, 784]"."""
    return " ".join([equation.name, *(str(v.type) for v in equation.inputs)])


PERIOD = 1048573
"""Random elements drawn for one argument; a larger argument repeats them. A prime, so that rows differ."""

GRADIENT_SCALE, GRADIENT_SPREAD, GRADIENT_ZEROS = 1e-6, 2.0, 0.5
"""Gradient-like elements: median magnitude, standard deviation of its logarithm, and share of zeros (as after a relu).
Most are below 6e-5, the smallest normal fp16 number."""

MAX_FLOPS = 1 << 30
"""Work up to which the reference computes all results."""
PARTS = 4
"""The number of images, filters or matrix rows of a larger result that it computes: the first, the last, and two
between."""

Index = tuple[Any, ...]

# By primitive: for each input, and for the output, the axis along which a part of the result depends on the same part
# of that input; None where it depends on all of it.
_AXES: dict[str, tuple[Sequence[int | None], int]] = {
    "conv2d": ((0, None), 0),
    "conv2d_input_grad": ((0, None), 0),
    "conv2d_weight_grad": ((None, 1), 0),
    "conv2d_weight_grad_by_image": ((0, 0), 0),
}
for _format, _count in TERMS.items():
    _AXES[f"conv2d_{_format}"] = (None,) * _count + (0,) * _count, 1
    _AXES[f"conv2d_input_grad_{_format}"] = (None,) * _count + (0 if _format == TF32 else 3,) * _count, 1
    _AXES[f"conv2d_weight_grad_{_format}"] = (None,) * _count + (3,) * _count, 0


def arguments(equation: Equation, gradients: bool) -> list[np.ndarray]:
    """Random arguments, the same ones each time.

    Args:
        gradients: floats have the scale, spread and zeros of gradients; otherwise they are normal.
    """
    rng = np.random.default_rng(zlib.crc32(described(equation).encode()) + gradients)
    count = TERMS.get(equation.params.get("precision", FULL), 1)
    if count == 1:
        return [_drawn(rng, v.type, _index_limit(equation), gradients) for v in equation.inputs]
    types = [v.type._replace(dtype=np.dtype(np.float32)) for v in equation.inputs[::count]]
    return [term for t in types for term in terms_of(_drawn(rng, t, 0, gradients), count)]


def terms_of(x: np.ndarray, count: int) -> list[np.ndarray]:
    """The terms of bfloat16 whose sum is a float32 operand."""
    to_bits, rest = PRIMITIVES["to_bfloat16"].reference, PRIMITIVES["bfloat16_rest"].reference
    found = [to_bits(x)]
    while len(found) < count:
        x = rest(x, found[-1])
        found.append(to_bits(x))
    return found


def expected(equation: Equation, arrays: Sequence[np.ndarray]) -> tuple[Sequence[np.ndarray], Sequence[Index]]:
    """Right results for the arguments ``arrays``, and where they lie in the equation's outputs."""
    types, params = [v.type for v in equation.inputs], dict(equation.params)
    if "precision" in params:
        params["precision"] = FULL
    large = equation.primitive.cost(types, params).flops > MAX_FLOPS
    axes = _axes(equation) if large else None
    index: Index = ()
    if axes is not None:
        inputs, output = axes
        length = equation.outputs[0].type.shape[output]
        part = sorted({i * (length - 1) // (PARTS - 1) for i in range(PARTS)})
        arrays = [x if axis is None else np.take(x, part, axis) for x, axis in zip(arrays, inputs, strict=True)]
        index = (slice(None),) * output + (part,)
    wide = [x.astype(np.float64) if x.dtype == np.float32 else x for x in arrays]
    with np.errstate(all="ignore"):
        found = equation.primitive.reference(*wide, **params)
    results = [widened(np.asarray(x)) for x in (found if isinstance(found, (tuple, list)) else (found,))]
    return results, [index] * len(results)


def widened(x: np.ndarray) -> np.ndarray:
    """Elements of bfloat16 as float32 numbers; another array as it is."""
    found: np.ndarray = PRIMITIVES["from_bfloat16"].reference(x) if x.dtype == BITS else x
    return found


def _axes(equation: Equation) -> tuple[Sequence[int | None], int] | None:
    params = equation.params
    if equation.has(Trait.MATMUL) and "transpose_a" in params:
        ndim = len(equation.inputs[0].type.shape)
        return (ndim - (1 if params["transpose_a"] else 2), None), ndim - 2
    if "window" in params and params["window"].groups > 1:
        return None
    return _AXES.get(equation.primitive.name)


def _drawn(rng: np.random.Generator, type_: ArrayType, limit: int, gradients: bool) -> np.ndarray:
    """Random elements: floats are normal, or like gradients; integers are from 0 to below ``limit``. Elements of uint16
    are the bits of bfloat16."""
    if type_.dtype == BITS:
        bits = _drawn(rng, type_._replace(dtype=np.dtype(np.float32)), limit, gradients).view(np.uint32)
        return (bits >> np.uint32(16)).astype(np.uint16)
    count = min(type_.size, PERIOD)
    if type_.dtype.kind != "f":
        elements = rng.integers(0, 2 if type_.dtype.kind == "b" else limit, count).astype(type_.dtype)
    elif gradients:
        magnitude = GRADIENT_SCALE * np.exp(GRADIENT_SPREAD * rng.standard_normal(count))
        live = rng.random(count) >= GRADIENT_ZEROS
        elements = (magnitude * live * rng.choice((-1.0, 1.0), count)).astype(type_.dtype)
    else:
        elements = rng.standard_normal(count, type_.dtype)
    return np.resize(elements, type_.shape)


def _index_limit(equation: Equation) -> int:
    """The exclusive upper bound of integer arguments: the length that they index, or 256."""
    params = equation.params
    for name in ("length", "num_classes"):
        if name in params:
            return int(params[name])
    if "windows" in params:
        return prod(params["windows"].kernel)
    if "axis" in params and equation.inputs[0].type.shape:
        return int(equation.inputs[0].type.shape[params["axis"]])
    return 256
