"""Writes the Program whose convolutions are channels last. `channels_last` chooses them, and says what this means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from adtrain.backends.cuda.forms.gather import NEAR
from adtrain.core.array import Array, array
from adtrain.core.precision import FLOAT32, OF_PRECISION, TERMS, TF32
from adtrain.core.primitive import CHANNELS_LAST, PRIMITIVES, Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.types import BITS, NCHW, NHWC, ArrayType, Shape, permuted
from adtrain.lowering.cuda.gemm.bfloat16 import ROW_MULTIPLE
from adtrain.passes.fusion import elementwise
from adtrain.passes.simplify import remove_dead_code, simplify_reshapes

CONVOLUTIONS = frozenset(("conv2d", "conv2d_input_grad", "conv2d_weight_grad"))
OF_TERMS = frozenset(f"{name}_{operand_format}" for name in CONVOLUTIONS for operand_format in TERMS)
"""Primitives of channels-last convolutions, by the operand formats of TERMS."""
PIXELS = frozenset((0, 2, 3))
"""The axes N, H and W of images (N, C, H, W)."""
BY_FILTER = 3, 1, 2, 0
"""The permutation of filters (O, KH, KW, C) to (C, KH, KW, O)."""
BY_AXIS = frozenset(("low", "high", "gaps", "starts", "stops", "steps"))
"""Parameters with an element for each axis."""
COPIES = frozenset(("pad", "slice", "flip", "concatenate"))
IMAGES = frozenset(("conv2d_bfloat16", "conv2d_input_grad_bfloat16"))
"""Primitives of channels-last convolutions in bfloat16 whose results are images."""
POOLS = frozenset(("max_pool2d", "max_pool2d_put", "max_pool2d_pick", "avg_pool2d", "avg_pool2d_put"))


def images_of(convolution: Equation) -> tuple[Variable, Variable]:
    """The two images of a convolution or gradient. The second one may be its result."""
    x, other = convolution.inputs
    return x, other if convolution.primitive.name == "conv2d_weight_grad" else convolution.outputs[0]


def is_depthwise(convolution: Equation) -> bool:
    """Whether each channel of the input and each filter is a group."""
    groups = convolution.params["window"].groups
    return groups > 1 and all(v.type.shape[1] == groups for v in images_of(convolution))


def is_grouped(convolution: Equation) -> bool:
    """Whether it has several groups of several channels or filters."""
    return convolution.params["window"].groups > 1 and not is_depthwise(convolution)


def format_of_operands(convolution: Equation) -> str:
    """The format of its operands: one of TERMS."""
    precision = convolution.params["precision"]
    if is_depthwise(convolution) and precision != "bfloat16":
        return FLOAT32
    return TF32 if precision == TF32 and convolution.name != "conv2d_weight_grad" else OF_PRECISION[precision]


def _by_filter(convolution: Equation) -> bool:
    """Whether its filters are (C, KH, KW, O)."""
    return convolution.name == "conv2d_input_grad" and format_of_operands(convolution) == TF32


def of_terms(convolution: Equation) -> str:
    """The name of the primitive that computes it from terms."""
    return f"{convolution.primitive.name}_{format_of_operands(convolution)}"


def params_of_terms(e: Equation) -> Mapping[str, Any]:
    """The parameters of the primitive that computes it from terms. The groups of channels of zeros are counted."""
    window = e.params["window"]
    groups = rounded_up(window.groups) if is_depthwise(e) else 1
    return {**e.params, "window": window._replace(groups=groups), "precision": format_of_operands(e)}


def operand_shapes(e: Equation) -> list[Shape]:
    """The shapes of the operands of a convolution, channels last. All numbers of channels are rounded up.

    The filters of several groups have all channels.
    """
    shapes = [permuted(v.type.shape, NHWC) for v in e.inputs]
    if is_grouped(e) and e.primitive.name != "conv2d_weight_grad":
        shapes[1] = (*shapes[1][:3], shapes[1][3] * e.params["window"].groups)
    padded = [(*shape[:-1], rounded_up(shape[-1])) for shape in shapes]
    if e.primitive.name != "conv2d_weight_grad":
        padded[1] = (rounded_up(shapes[1][0]), *(shapes if is_depthwise(e) else padded)[1][1:])
    if _by_filter(e):
        padded[1] = permuted(padded[1], BY_FILTER)
    return padded


def rounded_up(channels: int) -> int:
    """The channels that kernels take: a multiple of ROW_MULTIPLE. Those that are added are zeros."""
    return -(-channels // ROW_MULTIPLE) * ROW_MULTIPLE


def _keeps_order(shape: Shape) -> bool:
    """Whether an image (N, C, H, W) has its elements in the same order if its channels are last."""
    return shape[1] == 1 or shape[2] * shape[3] == 1


def _permuted(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of an equation for images that are channels last."""

    def of_last(name: str, value: Any) -> Any:
        if name in BY_AXIS:
            return permuted(value, NHWC)
        if name == "axis":
            return NHWC.index(value)
        return tuple(map(NHWC.index, value)) if name == "axes" else value

    return {name: of_last(name, value) for name, value in params.items()}


def _is_vector(v: Variable) -> bool:
    """Whether a value is a vector of channels, (1, C, 1, 1)."""
    return len(v.type.shape) == 4 and 1 < v.size == v.type.shape[1]


def is_batch_norm(e: Equation) -> bool:
    return e.primitive.name == "standardize" and set(e.params["axes"]) == PIXELS


def write_channels_last(program: Program, convolutions: set[Equation]) -> Program:
    """``program`` with these of its convolutions, and the values between them, channels last."""
    return _Writer(program, convolutions).written()


class _Norm(NamedTuple):
    """A batch norm: a matrix of pixels, and the mean and the reciprocal of the deviation of each column."""

    pixels: Variable
    mean: Variable
    scale: Variable


class _Writer:
    """Writes a Program whose convolutions are channels last.

    Attributes:
        first: the values that are in memory as in the Program before.
        last: for a value of four axes its transpose, (N, H, W, C).
        terms: for an argument of convolutions and an operand format, the terms of its transpose.
        padded: for a term and a shape, the term with channels of zeros added.
        positions: for positions of maxima the positions in images that are channels last, of another type.
        repeated: broadcasts, and what is computed from these alone. They are computed in each layout that is read.
        norms: for the result of a batch norm what it is computed from.
        of_groups: for filters of several groups a stand-in for those that have all channels.
    """

    def __init__(self, program: Program, convolutions: set[Equation]) -> None:
        self.before, self.convolutions = program, convolutions
        self.producer = {v: e for e in program.equations for v in e.outputs}
        self.arguments = {(v, format_of_operands(e)) for e in convolutions for v in e.inputs}
        self.constants: dict[Variable, Array] = dict(program.constants)
        self.first = {*program.inputs, *program.constants}
        self.last: dict[Variable, Variable] = {}
        self.terms: dict[tuple[Variable, str], list[Variable]] = {}
        self.padded: dict[tuple[Variable, Shape], Variable] = {}
        self.positions: dict[Variable, Variable] = {}
        self.repeated: set[Variable] = set()
        self.norms: dict[Variable, _Norm] = {}
        self.of_groups: dict[Variable, Variable] = {}
        self.equations: list[Equation] = []

    def written(self) -> Program:
        for e in self.before.equations:
            self._write(e)
            for v, operand_format in product(e.outputs, TERMS):
                if (v, operand_format) in self.arguments:
                    self._terms_of(v, operand_format, e)
        for v in self.before.outputs:
            self._in_order(v)
        after = replace(self.before, constants=self.constants, equations=tuple(self.equations))
        return remove_dead_code(simplify_reshapes(after))

    def _write(self, e: Equation) -> None:
        if e in self.convolutions:
            self._convolution(e)
            return
        if _is_vector(e.outputs[0]) and elementwise(e) and not e.has(Trait.BROADCAST):
            self._of_vector(e)
            return
        rule = self._rule(e) if self._becomes_last(e) else None
        if rule is not None:
            rule(e)
            return
        for v in e.inputs:
            self._in_order(v)
        self.equations.append(e)
        self.first.update(e.outputs)
        numbers = (v in self.repeated or not v.type.shape for v in e.inputs)
        if e.has(Trait.BROADCAST) or (elementwise(e) and all(numbers)):
            self.repeated.update(e.outputs)

    def _becomes_last(self, e: Equation) -> bool:
        """Whether the results of an equation are channels last, if there is a rule for it.

        Pooling by known positions has the layout of these. A batch norm is channels last in any case.
        """
        if e.primitive.name in POOLS and (len(e.inputs) > 1 or self.repeated.issuperset(e.inputs)):
            return self.repeated.issuperset(e.inputs) or self._is_last(e.inputs[1])
        return is_batch_norm(e) or any(map(self._is_last, e.inputs))

    def _is_last(self, v: Variable) -> bool:
        """Whether a value is in memory channels last only."""
        return any(v in known for known in (self.last, self.norms, self.positions)) and v not in self.first

    def _rule(self, e: Equation) -> Callable[[Equation], None] | None:
        """The method that writes an equation of values that are channels last; None if no method does."""
        name = e.primitive.name
        if is_batch_norm(e):
            return self._batch_norm
        if e.has(Trait.RESHAPE):
            return self._reshape if _keeps_order(e.inputs[0].type.shape) else None
        if e.has(Trait.REDUCTION):
            return self._reduction
        if name in POOLS:
            return self._pooling
        images = all(len(v.type.shape) == 4 for v in e.outputs)
        return self._same if images and (elementwise(e) or name in COPIES) else None

    # Values in both layouts

    def _in_order(self, v: Variable) -> Variable:
        """A value as in the Program before."""
        if v not in self.first:
            e = self.producer[v]
            self._transpose(e, self._channels_last(v, e), NCHW, v)
            self.first.add(v)
        return v

    def _channels_last(self, v: Variable, reader: Equation) -> Variable:
        """A value with its channels last. One that is not an image is as in the Program before."""
        if len(v.type.shape) != 4:
            return self._in_order(v)
        if v in self.norms:
            return self._normalised(v, reader)
        if v not in self.last:
            e = self.producer.get(v, reader)
            out = self.last[v] = v.like(ArrayType(permuted(v.type.shape, NHWC), v.type.dtype))
            if v in self.positions:
                self._add(e, "astype", (self.positions[v],), out, dtype=v.type.dtype)
            elif v not in self.repeated:
                self._transpose(e, v, NHWC, out)
            elif e.has(Trait.BROADCAST):
                self._broadcast(e, out)
            else:
                inputs = tuple(self._channels_last(x, e) for x in e.inputs)
                self._copy(e, inputs, (out,), _permuted(e.params))
        return self.last[v]

    def _transpose(self, e: Equation, x: Variable, order: Shape, out: Variable) -> None:
        """`out` as a transpose of an image."""
        if _keeps_order(x.type.shape if order == NHWC else out.type.shape):
            self._add(e, "reshape", (x,), out, shape=out.type.shape)
        else:
            self._add(e, "transpose", (x,), out, axes=order)

    def _broadcast(self, e: Equation, out: Variable) -> None:
        """A broadcast to an image, channels last.

        A quotient of a vector of channels and a number, such as a mean, is computed by the readers of the broadcast.
        """
        inputs = e.inputs
        if inputs and inputs[0].type.shape:
            x, number = self._quotient(inputs[0])
            shape = (*(1,) * (4 - len(x.type.shape)), *x.type.shape)
            if shape != x.type.shape:
                x = self._made(e, "reshape", (self._in_order(x),), shape=shape)
                self.first.add(x)
            inputs = (self._channels_last(x, e),)
            if number is not None:
                whole = self._made(e, "broadcast_to", inputs, shape=out.type.shape)
                self._add(e, "mul", (whole, self._number(1 / number, whole)), out)
                return
        self._copy(e, inputs, (out,), {**e.params, "shape": out.type.shape})

    def _quotient(self, v: Variable) -> tuple[Variable, float | None]:
        """A vector of channels and the constant that divides it, if `v` is their quotient; else `v` and None."""
        e = self.producer.get(v)
        if e is None or e.primitive.name != "div" or not _is_vector(e.inputs[0]):
            return v, None
        x, divisor = e.inputs
        constant = self.before.constants.get(divisor)
        return (v, None) if constant is None or constant.size > 1 else (x, float(constant.item()))

    def _terms_of(self, v: Variable, operand_format: str, reader: Equation) -> list[Variable]:
        """The terms of an argument of convolutions, computed beside the equation that computes it.

        A single term of an image that is not channels last is computed before it is transposed, so that fewer bytes are
        moved.
        """
        key, count = (v, operand_format), TERMS[operand_format]
        if operand_format in (TF32, FLOAT32):
            return [self._channels_last(v, reader)]
        if key not in self.terms:
            e = self.producer.get(v, reader)
            known = v in self.last or v in self.repeated
            if count == 1 and v in self.first and not known and prod(v.type.shape[2:]) > NEAR:
                x = self._made(e, "to_bfloat16", (v,))
                self.terms[key] = [x.like(ArrayType(permuted(x.type.shape, NHWC), BITS))]
                self._transpose(e, x, NHWC, *self.terms[key])
            else:
                rest = self._channels_last(v, reader)
                self.terms[key] = [self._made(e, "to_bfloat16", (rest,))]
                while len(self.terms[key]) < count:
                    rest = self._made(e, "bfloat16_rest", (rest, self.terms[key][-1]))
                    self.terms[key].append(self._made(e, "to_bfloat16", (rest,)))
        return self.terms[key]

    # Equations

    def _convolution(self, e: Equation) -> None:
        """A convolution, or a gradient of one. Its result is cut if numbers of channels were rounded up."""
        (out,), shapes = e.outputs, operand_shapes(e)
        inputs = tuple(x for v, shape in zip(e.inputs, shapes, strict=True) for x in self._operand(v, shape, e))
        params = params_of_terms(e)
        y = self._made(e, of_terms(e), inputs, **params)
        shape = permuted(out.type.shape, NHWC)
        of_filters = e.primitive.name == "conv2d_weight_grad"
        if of_filters and is_grouped(e):
            y = self._own_channels(y, shape, e)
        elif of_filters:
            channels = inputs[0].type.shape[3] // params["window"].groups
            y = self._made(e, "reshape", (y,), shape=(y.type.shape[0], *shape[1:3], channels))
        kept = shape if of_filters else (y.type.shape[0], shape[3])
        if kept != y.type.shape:
            y = self._made(e, "slice", (y,), starts=(0,) * len(kept), stops=kept, steps=(1,) * len(kept))
        self.last[out] = self._made(e, "reshape", (y,), shape=shape)
        if of_filters:
            self._in_order(out)

    def _operand(self, v: Variable, shape: Shape, e: Equation) -> list[Variable]:
        """The terms of an argument of a convolution, with channels of zeros where a kernel needs more channels."""
        like = self.producer.get(v, e)
        of_filters = v is e.inputs[1] and e.primitive.name != "conv2d_weight_grad"
        operand = self._all_channels(v, e) if of_filters and is_grouped(e) else v
        terms = self._terms_of(operand, format_of_operands(e), e)
        if _by_filter(e) and v is e.inputs[1]:
            terms = [self._made(like, "transpose", tuple(terms), axes=BY_FILTER)]
        return [self._padded(x, shape, like) for x in terms]

    def _all_channels(self, w: Variable, e: Equation) -> Variable:
        """Filters (O, C, KH, KW) for those of several groups, (O, C / groups, KH, KW): with zeros for the channels of
        other groups."""
        if w not in self.of_groups:
            (o, c, kh, kw), groups = w.type.shape, e.params["window"].groups
            whole = self.of_groups[w] = w.like(ArrayType((o, c * groups, kh, kw), w.type.dtype))
            by_group = (groups, o // groups, kh * kw, groups, c)
            own = self._made(e, "reshape", (self._channels_last(w, e),), shape=(*by_group[:3], 1, c))
            own = self._of_own_group(self._made(e, "broadcast_to", (own,), shape=by_group), e)
            self.last[whole] = self._made(e, "reshape", (own,), shape=(o, kh, kw, c * groups))
        return self.of_groups[w]

    def _own_channels(self, y: Variable, shape: Shape, e: Equation) -> Variable:
        """The gradient of filters of several groups, (O, KH, KW, C / groups), from that of filters of all channels."""
        (o, kh, kw, c), groups = shape, e.params["window"].groups
        by_group = (groups, o // groups, kh * kw, groups, c)
        own = self._of_own_group(self._made(e, "reshape", (y,), shape=by_group), e)
        return self._made(e, "reshape", (self._made(e, "sum", (own,), axes=(3,)),), shape=shape)

    def _of_own_group(self, x: Variable, e: Equation) -> Variable:
        """Filters (groups, filters, taps, groups, channels) with zeros where the groups are not the same."""
        groups = x.type.shape[0]
        same = Variable(ArrayType((groups, 1, 1, groups, 1), np.dtype(np.bool_)), x.device)
        self.constants[same] = array(np.eye(groups, dtype=np.bool_).reshape(same.type.shape), device=x.device)
        condition, zeros = (self._made(e, "broadcast_to", (v,), shape=x.type.shape) for v in (same, self._number(0, x)))
        return self._made(e, "where", (condition, x, zeros))

    def _padded(self, x: Variable, shape: Shape, like: Equation) -> Variable:
        """`x` with zeros at the ends of its axes, to a shape."""
        if x.type.shape == shape:
            return x
        if (x, shape) not in self.padded:
            high = tuple(after - before for before, after in zip(x.type.shape, shape, strict=True))
            none = (0,) * len(shape)
            self.padded[x, shape] = self._made(like, "pad", (x,), low=none, high=high, gaps=none, value=0)
        return self.padded[x, shape]

    def _same(self, e: Equation) -> None:
        """An equation whose arguments and results have the same axes."""
        inputs = tuple(self._channels_last(v, e) for v in e.inputs)
        outputs = tuple(v.like(ArrayType(permuted(v.type.shape, NHWC), v.type.dtype)) for v in e.outputs)
        self._copy(e, inputs, outputs, _permuted(e.params))
        self.last |= dict(zip(e.outputs, outputs, strict=True))

    def _reduction(self, e: Equation) -> None:
        """A reduction. If it keeps the channels and other axes, its result is transposed.

        A sum over the pixels of a product with normalised values: the scale of the norm is the same for all pixels of a
        channel, so the sum of the unscaled products is multiplied by it.
        """
        (x,), (y,) = e.inputs, e.outputs
        axes = tuple(sorted(NHWC.index(axis) for axis in e.params["axes"]))
        kept = [axis for axis in NHWC if axis not in e.params["axes"]]
        addends, norm = self.producer.get(x), None
        if e.primitive.name == "sum" and kept == [1] and addends is not None and addends.primitive.name == "mul":
            norm = next((v for v in addends.inputs if v in self.norms), None)
        if addends is not None and norm is not None:
            centred = self._centred(norm, e)
            factors = (centred if v is norm else self._channels_last(v, e) for v in addends.inputs)
            total = self._made(e, "sum", (self._made(e, "mul", tuple(factors)),), axes=axes)
            self._add(e, "mul", (total, self.norms[norm].scale), y)
        elif kept == sorted(kept):
            self._copy(e, (self._channels_last(x, e),), (y,), {**e.params, "axes": axes})
        else:
            found = y.like(ArrayType(permuted(x.type.shape, kept), y.type.dtype))
            self._copy(e, (self._channels_last(x, e),), (found,), {**e.params, "axes": axes})
            self._add(e, "transpose", (found,), y, axes=tuple(kept.index(axis) for axis in sorted(kept)))
        self.first.add(y)

    def _reshape(self, e: Equation) -> None:
        """A reshape of an image that has its elements in the same order in both layouts."""
        (x,), (y,) = e.inputs, e.outputs
        self._add(e, "reshape", (self._channels_last(x, e),), y, shape=y.type.shape)
        self.first.add(y)

    def _pooling(self, e: Equation) -> None:
        primitive = PRIMITIVES[e.primitive.name + CHANNELS_LAST]
        inputs = tuple(self.positions.get(v) or self._channels_last(v, e) for v in e.inputs)
        params = {**e.params, "shape": permuted(e.params["shape"], NHWC)} if "shape" in e.params else e.params
        outputs = tuple(map(e.outputs[0].like, primitive.output_types([v.type for v in inputs], params)))
        self.equations.append(replace(e, primitive=primitive, inputs=inputs, outputs=outputs, params=params))
        self.last[e.outputs[0]] = outputs[0]
        self.positions |= dict(zip(e.outputs[1:], outputs[1:], strict=True))

    def _of_vector(self, e: Equation) -> None:
        """An elementwise equation on vectors of channels (1, C, 1, 1), such as the scale of a norm: on vectors (C,)."""
        (y,), size = e.outputs, (e.outputs[0].size,)
        inputs = tuple(
            self._made(e, "reshape", (self._in_order(v),), shape=size) if v.type.shape else v for v in e.inputs
        )
        out = y.like(ArrayType(size, y.type.dtype))
        self.equations.append(replace(e, inputs=inputs, outputs=(out,)))
        self._add(e, "reshape", (out,), y, shape=y.type.shape)
        self.first.add(y)

    def _batch_norm(self, e: Equation) -> None:
        """The mean and variance of each channel; `_normalised` computes the values that are read."""
        (x,), (y, average, variance) = e.inputs, e.outputs
        image = self._channels_last(x, e)
        rows, channels = prod(image.type.shape[:-1]), image.type.shape[-1]
        matrix = self._made(e, "reshape", (image,), shape=(rows, channels))
        plain = self._is_of_convolution(x)
        shift = None if plain else self._made(e, "subview", (matrix,), start=0, shape=(channels,))

        def differences() -> Variable:
            """What is summed: the differences from the first row, or the values themselves."""
            if shift is None:
                return matrix
            whole = self._made(e, "broadcast_to", (shift,), shape=matrix.type.shape)
            return self._made(e, "sub", (matrix, whole))

        def mean(addends: Variable) -> Variable:
            if plain:
                addends = self._made(e, "astype", (addends,), dtype=np.dtype("float64"))
            total = self._made(e, "sum", (addends,), axes=(0,))
            return self._made(e, "div", (total, self._number(rows, total)))

        def single(v: Variable) -> Variable:
            return self._made(e, "astype", (v,), dtype=matrix.type.dtype) if plain else v

        first, second = mean(differences()), mean(self._made(e, "square", (differences(),)))
        centre = single(first) if shift is None else self._made(e, "add", (shift, first))
        rest = self._made(e, "sub", (second, self._made(e, "square", (first,))))
        square = single(self._made(e, "maximum", (rest, self._number(0, rest))))
        shifted = self._made(e, "add", (square, self._number(e.params["eps"], square)))
        scale = self._made(e, "rsqrt", (shifted,))
        for found, out in ((centre, average), (square, variance)):
            self._add(e, "reshape", (found,), out, shape=out.type.shape)
            self.first.add(out)
        self.norms[y] = _Norm(matrix, centre, scale)

    def _is_of_convolution(self, x: Variable) -> bool:
        """Whether a value is the result of a convolution in bfloat16 or tf32, with or without a bias."""
        e = self.producer.get(x)
        if e is not None and e.primitive.name == "add" and self.repeated.intersection(e.inputs):
            (x,) = [v for v in e.inputs if v not in self.repeated] or [x]
            e = self.producer.get(x)
        return e is not None and e in self.convolutions and e.params["precision"] in ("bfloat16", TF32)

    def _normalised(self, v: Variable, reader: Equation) -> Variable:
        """The result of a norm, channels last, as computed for one reader."""
        e, centred, scale = replace(self.producer[v], phase=reader.phase), self._centred(v, reader), self.norms[v].scale
        whole = self._made(e, "broadcast_to", (scale,), shape=centred.type.shape)
        return self._made(e, "mul", (centred, whole))

    def _centred(self, v: Variable, reader: Equation) -> Variable:
        """The argument of a norm minus its mean, channels last, as computed for one reader."""
        x, mean, _ = self.norms[v]
        e = replace(self.producer[v], phase=reader.phase)
        centred = self._made(e, "sub", (x, self._made(e, "broadcast_to", (mean,), shape=x.type.shape)))
        return self._made(e, "reshape", (centred,), shape=permuted(v.type.shape, NHWC))

    # Making equations

    def _number(self, value: float, beside: Variable) -> Variable:
        v = Variable(ArrayType((), beside.type.dtype), beside.device)
        self.constants[v] = array(np.asarray(value, beside.type.dtype), device=beside.device)
        return v

    def _made(self, like: Equation, name: str, inputs: tuple[Variable, ...], **params: Any) -> Variable:
        """The result of an equation of a primitive, with the scope and phase of `like`."""
        (found,) = PRIMITIVES[name].output_types([v.type for v in inputs], params)
        out = inputs[0].like(found)
        self._add(like, name, inputs, out, **params)
        return out

    def _add(self, like: Equation, name: str, inputs: tuple[Variable, ...], out: Variable, **params: Any) -> None:
        self.equations.append(Equation(PRIMITIVES[name], inputs, params, (out,), like.scope, like.phase))

    def _copy(
        self,
        e: Equation,
        inputs: tuple[Variable, ...],
        outputs: tuple[Variable, ...],
        params: Mapping[str, Any],
    ) -> None:
        self.equations.append(replace(e, inputs=inputs, outputs=outputs, params=params))
