"""Channels last: inside a Program, the images of convolutions are (N, H, W, C) in memory.

y = conv2d(x, w)    ->    y = reshape(conv2d_bfloat16(to_bfloat16(x), to_bfloat16(w)), (N, OH, OW, O))

Such a convolution is a product of pixels, whose rows are the pixels and whose columns are the channels
(`ops.channels_last`). In precision bfloat16 its operands are bfloat16 in memory. In full precision an operand is the
sum of three arrays of bfloat16, its terms, which are computed beside the operand. In tf32 operands are float32; those
of a weight gradient are sums of two terms. Those of a depthwise convolution are float32 in these precisions.

All values between convolutions are channels last: elementwise equations, broadcasts, reductions, pooling, pads, slices
and concatenations. `flatten_rows` then makes equations of matrices of them, so that they can join the products, and
sums over images and their pixels become sums over rows.

A convolution of several groups becomes one of a single group. Its filters have zeros for the channels of other groups.
Tensor cores multiply these zeros, which takes less time than other kernels if channels are few. In depthwise
convolutions, where each channel is a group, no zeros are multiplied.

A value is transposed where an equation needs the other layout: inputs and outputs of the Program, a flatten layer. It
is transposed once, whatever the number of its readers. Weights are transposed too: (O, C, KH, KW) to (O, KH, KW, C),
and their gradients back. A transpose that only moves axes of length 1 is a reshape.

Batch norm is decomposed into equations on the matrix. Its mean and variance follow from two sums over the rows, which
one kernel computes. For results of convolutions in bfloat16 or tf32 these are the sums of the values and their squares,
which can join the epilogue of the convolution (`forms/product_sums.py`). Large results in bfloat16 are rounded where
they are stored, so their squares are exact in float32. For other values the sums are those of the differences from the
first row, and of the squares of these. So little precision is lost (T. Chan, G. Golub, R. LeVeque: "Algorithms for
computing the sample variance", 1983). Each equation that reads the normalised values computes them itself, so they are
not stored.

The images get channels of zeros, up to the multiple that the kernels take (`round_channels`):

y = conv2d(x, w)            ->    y = conv2d(x, pad(w))
g = relu(standardize(y))    ->    g = relu(standardize(y))
sum(g, axes=(0, 2, 3))      ->    slice(sum(g, axes=(0, 2, 3)))

So only filters and vectors are padded and cut, and no images. A value that is computed from channels of zeros has the
same number in all of them, such as 1 after exp. This number is known, because it is computed as the value is. If it is
not 0 or not known, the channels are cut off before the next convolution.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from math import isfinite
from operator import itemgetter
from typing import Any

import numpy as np

from adtrain.backends.cuda.forms.horizontal import MAX_FLOPS
from adtrain.backends.cuda.forms.weight_gradients import fuse_bias_gradients
from adtrain.backends.cuda.write_channels_last import (
    CONVOLUTIONS,
    OF_TERMS,
    PIXELS,
    POOLS,
    format_of_operands,
    images_of,
    is_batch_norm,
    is_depthwise,
    is_grouped,
    of_terms,
    operand_shapes,
    params_of_terms,
    rounded_up,
    write_channels_last,
)
from adtrain.core.array import array
from adtrain.core.kernel import CudaKernel, Target, cuda_kernels
from adtrain.core.precision import FLOAT32, TERMS, TF32
from adtrain.core.primitive import CHANNELS_LAST, PRIMITIVES, Trait
from adtrain.core.program import OF_POOLED, Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.types import BITS, ArrayType, Shape
from adtrain.lowering.cuda.gemm.bfloat16 import BOXES, BYTES_PER_CYCLE, ROW_MULTIPLE
from adtrain.passes.fuse_maxpool_gradients import fuse_maxpool_gradients
from adtrain.passes.fusion import elementwise
from adtrain.passes.simplify import remove_dead_code

CHANNELS = 1
"""The axis of channels in images (N, C, H, W)."""
MIN_OWN = 4
"""Minimum channels of an image for each one that is added."""
SECTOR = 16
"""Channels of bfloat16 that fill a sector of memory, 32 bytes. TMA is twice as fast if sectors are full."""
WIDE = BOXES[0]
"""Channels from which on TMA copies images: those that fill a row of a box. A layer with fewer keeps its layout where
that is faster."""


def round_channels(program: Program, convolutions: Collection[Equation]) -> Program:
    """``program`` in which the results of these convolutions, and what is computed from them, have more channels."""
    if all(_rounded(v.type.shape[CHANNELS]) == v.type.shape[CHANNELS] for e in convolutions for v in e.outputs):
        return program
    return _Rounding(program, convolutions).program()


def _rounded(channels: int) -> int:
    """The channels that an image gets; as many as it has, if too many would be added (MIN_OWN)."""
    found = rounded_up(channels) if channels < WIDE else -(-channels // SECTOR) * SECTOR
    return found if MIN_OWN * (found - channels) <= channels else channels


def _with(shape: Shape, channels: int) -> Shape:
    """The shape of an image with this number of channels."""
    return (*shape[:CHANNELS], channels, *shape[CHANNELS + 1 :])


class _Rounding:
    """Writes a Program whose images have more channels.

    Attributes:
        wide: the images with added channels, by the value that they replace.
        fill: the number in the added channels of each of these; None if it is not known.
        exact: the values that are also computed as in the Program before.
    """

    def __init__(self, program: Program, convolutions: Collection[Equation]) -> None:
        self.before, self.convolutions = program, convolutions
        self.producer = {v: e for e in program.equations for v in e.outputs}
        self.numbers = {v: x.item() for v, x in program.constants.items() if x.size == 1}
        self.wide: dict[Variable, Variable] = {}
        self.fill: dict[Variable, float | None] = {}
        self.exact = {*program.inputs, *program.constants}
        self.constants = dict(program.constants)
        self.equations: list[Equation] = []

    def program(self) -> Program:
        for e in self.before.equations:
            if not self._writes(e):
                for v in e.inputs:
                    self._exact(v)
                self.equations.append(e)
                self.exact.update(e.outputs)
        for v in self.before.outputs:
            self._exact(v)
        after = replace(self.before, constants=self.constants, equations=tuple(self.equations))
        return remove_dead_code(after)

    def _writes(self, e: Equation) -> bool:
        """Write an equation of images with added channels, if it is one."""
        if e in self.convolutions:
            return self._convolution(e)
        if e.has(Trait.BROADCAST) or self.wide.keys().isdisjoint(e.inputs):
            return False
        if is_batch_norm(e):
            return self._batch_norm(e)
        if e.has(Trait.REDUCTION) and len(e.outputs) == 1 and CHANNELS not in e.params["axes"]:
            return self._reduction(e)
        if e.primitive.name in POOLS:
            return self._pooling(e)
        return elementwise(e) and self._elementwise(e)

    def _convolution(self, e: Equation) -> bool:
        x, other = e.inputs
        name, groups = e.primitive.name, e.params["window"].groups
        if groups > 1 and not (is_depthwise(e) and self._is_zero(x)):
            return False
        x = self._operand(x)
        params = dict(e.params)
        if groups > 1:
            params["window"] = e.params["window"]._replace(groups=x.type.shape[CHANNELS])
        if name == "conv2d_weight_grad":
            if groups > 1 and not self._is_zero(other):
                return False
            self._cut(e, self._like(e, (x, self._operand(other)), params), e.outputs[0])
            return True
        filters, channels = other.type.shape[:2]
        given, own = x.type.shape[CHANNELS], _rounded(e.outputs[0].type.shape[CHANNELS])
        if groups > 1:
            filters = own = given
        elif name == "conv2d":
            filters, channels = own, given
        else:
            filters, channels = given, own
        w = self._padded(other, (filters, channels, *other.type.shape[2:]), e)
        self._keep(e, [self._like(e, (x, w), params)], 0.0)
        return True

    def _batch_norm(self, e: Equation) -> bool:
        """A channel in which all numbers are equal, as in an added one, is normalised to zeros."""
        image, *statistics = self._all_like(e, [self.wide[e.inputs[0]]], e.params)
        self._keep(e, [image], 0.0)
        for found, out in zip(statistics, e.outputs[1:], strict=True):
            self._cut(e, found, out)
        return True

    def _reduction(self, e: Equation) -> bool:
        self._cut(e, self._like(e, (self.wide[e.inputs[0]],), e.params), e.outputs[0])
        return True

    def _pooling(self, e: Equation) -> bool:
        image = e.inputs[0]
        if image in self.wide and self.fill[image] != 0:
            return False
        channels = next(self.wide[v].type.shape[CHANNELS] for v in e.inputs if v in self.wide)
        inputs = [self._with_channels(v, _with(v.type.shape, channels), e) for v in e.inputs]
        params = {**e.params, "shape": _with(e.params["shape"], channels)} if "shape" in e.params else e.params
        self._keep(e, self._all_like(e, inputs, params), 0.0)
        return True

    def _elementwise(self, e: Equation) -> bool:
        """An equation by element, if the number in the added channels is known."""
        shape = next(self.wide[v].type.shape for v in e.inputs if v in self.wide)
        inputs = [self._with_channels(v, shape, e) if v.type.shape else v for v in e.inputs]
        fills = [self.fill[v] if v.type.shape else self.numbers.get(v) for v in e.inputs]
        if None in fills:
            return False
        given = (np.array(x, v.type.dtype) for x, v in zip(fills, e.inputs, strict=True))
        with np.errstate(all="ignore"):
            number = float(np.asarray(e.primitive.reference(*given, **e.params)).item())
        if not isfinite(number):
            return False
        self._keep(e, [self._like(e, inputs, e.params)], number)
        return True

    def _with_channels(self, v: Variable, shape: Shape, reader: Equation) -> Variable:
        """An argument with added channels. Of a broadcast of a vector or number, that is padded."""
        if v not in self.wide:
            e = self.producer.get(v, reader)
            self.fill[v] = 0.0
            if e.has(Trait.BROADCAST) and v in e.outputs:
                (x,) = e.inputs
                own = x.type.shape[-3] if len(x.type.shape) > 2 else 1
                if own > 1:
                    x = self._padded(self._exact(x), (*x.type.shape[:-3], shape[CHANNELS], *x.type.shape[-2:]), e)
                else:
                    self.fill[v] = self.numbers.get(x)
                self.wide[v] = self._like(e, (x,), {**e.params, "shape": shape})
            else:
                self.wide[v] = self._padded(self._exact(v), shape, e)
        return self.wide[v]

    def _is_zero(self, v: Variable) -> bool:
        return v in self.wide and self.fill[v] == 0

    def _operand(self, v: Variable) -> Variable:
        """An argument of a convolution: with added channels if these are zeros."""
        return self.wide[v] if self._is_zero(v) else self._exact(v)

    def _exact(self, v: Variable) -> Variable:
        """A value as in the Program before."""
        if v not in self.exact:
            self._cut(self.producer[v], self.wide[v], v)
        return v

    def _cut(self, e: Equation, x: Variable, out: Variable) -> None:
        """`out` as the first elements of `x` along each axis."""
        if x is not out:
            shape = out.type.shape
            params = {"starts": (0,) * len(shape), "stops": shape, "steps": (1,) * len(shape)}
            self.equations.append(Equation(PRIMITIVES["slice"], (x,), params, (out,), e.scope, e.phase))
        self.exact.add(out)

    def _padded(self, x: Variable, shape: Shape, e: Equation) -> Variable:
        """`x` with zeros at the ends of its axes, to a shape."""
        if x.type.shape == shape:
            return x
        none, out = (0,) * len(shape), x.like(ArrayType(shape, x.type.dtype))
        high = tuple(after - before for before, after in zip(x.type.shape, shape, strict=True))
        if x.size == max(x.type.shape):  # a vector: small equations that join others
            axis = shape.index(out.size)
            zeros = Variable(ArrayType((*shape[:axis], high[axis], *shape[axis + 1 :]), x.type.dtype), x.device)
            self.constants[zeros] = array(np.zeros(zeros.type.shape, x.type.dtype), device=x.device)
            joined = Equation(PRIMITIVES["concatenate"], (x, zeros), {"axis": axis}, (out,), e.scope, e.phase)
            self.equations.append(joined)
            return out
        params = {"low": none, "high": high, "gaps": none, "value": 0}
        self.equations.append(Equation(PRIMITIVES["pad"], (x,), params, (out,), e.scope, e.phase))
        return out

    def _keep(self, e: Equation, found: Sequence[Variable], fill: float) -> None:
        """Note the results of an equation, and the number in the added channels."""
        for v, x in zip(e.outputs, found, strict=False):
            if x is v:
                self.exact.add(v)
            else:
                self.wide[v], self.fill[v] = x, fill

    def _like(self, e: Equation, inputs: Sequence[Variable], params: Any) -> Variable:
        (found,) = self._all_like(e, inputs, params)
        return found

    def _all_like(self, e: Equation, inputs: Sequence[Variable], params: Any) -> Sequence[Variable]:
        """The results of the equation for other arguments and parameters: its own ones if their types are the same."""
        types = e.primitive.output_types([v.type for v in inputs], params)
        same = all(v.type == type_ for v, type_ in zip(e.outputs, types, strict=True))
        outputs = e.outputs if same else tuple(map(Variable.like, e.outputs, types))
        self.equations.append(replace(e, inputs=tuple(inputs), outputs=outputs, params=params))
        return outputs


FIRST_BYTES_PER_CYCLE = 600
"""A norm or a sum over PIXELS takes one cycle longer than if channels were last for this number of bytes that it moves;
fitted (docs/worklog/conv.md)."""


@keeps(Results.FINITE)
def channels_last(program: Program, target: Target) -> Program:
    """``program`` with convolutions of images that are channels last, where the GPU has kernels for them."""
    found = {e for e in program.equations if _has_kernel(e, target)}
    if all(e.cost.flops <= MAX_FLOPS for e in found):
        return program
    sunk = fuse_maxpool_gradients(program, has_kernel=lambda e: False, all_readers=True)
    rounded = round_channels(sunk, found)
    layers = _layers(e for e in rounded.equations if _has_kernel(e, target))
    chosen = _fastest(rounded, layers, target)
    return write_channels_last(rounded, chosen) if chosen else program


def _layers(convolutions: Iterable[Equation]) -> list[set[Equation]]:
    """The convolutions of a Program by layer: a convolution and its gradients, which share weights or the input."""
    layers: dict[Hashable, set[Equation]] = {}
    for e in convolutions:
        x, w = e.inputs
        if e.primitive.name == "conv2d_weight_grad":
            shape = e.outputs[0].type.shape
            keys = [key for key, layer in layers.items() if any(_computes(c, x, shape, e) for c in layer)]
            layers.setdefault(keys[0] if keys else x, set()).add(e)
        else:
            layers.setdefault(w, set()).add(e)
    return list(layers.values())


def _computes(e: Equation, x: Variable, weight_shape: Shape, gradient: Equation) -> bool:
    """Whether an equation is the convolution of `x` whose weight gradient another one computes."""
    same = e.params["window"] == gradient.params["window"] and e.inputs[1].type.shape == weight_shape
    return e.primitive.name == "conv2d" and e.inputs[0] is x and same


def _fastest(program: Program, layers: Sequence[set[Equation]], target: Target) -> set[Equation]:
    """The convolutions that become channels last: the choice with the fewest cycles of `_cycles`.

    A layer with few channels or several groups may be faster as it is. So all such layers are left out, or they are
    tried in order, and each is left out if that saves cycles. With many transposes, such as around depthwise
    convolutions, all layers are left out.
    """

    def cycles(chosen: set[Equation]) -> float:
        written = write_channels_last(program, chosen) if chosen else program
        pooled = remove_dead_code(
            fuse_maxpool_gradients(written, lambda e: bool(_kernels(e, target)), all_readers=True)
        )
        alone = set(fuse_bias_gradients(pooled, target).equations)
        in_tf32 = any(e.params["precision"] == TF32 for e in chosen)
        return sum(_cycles(e, target, in_tf32) for e in pooled.equations if e.primitive.name != "sum" or e in alone)

    def is_optional(layer: set[Equation]) -> bool:
        channels = (v.type.shape[1] for e in layer for v in images_of(e) if v in e.inputs)
        return min(channels) < WIDE or any(map(is_grouped, layer))

    optional, every = list(filter(is_optional, layers)), {e for layer in layers for e in layer}
    best, chosen = min(((cycles(x), x) for x in (every, every.difference(*optional))), key=itemgetter(0))
    for layer in optional:
        if (found := cycles(chosen - layer)) < best:
            chosen, best = chosen - layer, found
    return chosen if best < cycles(set()) else set()


def _cycles(e: Equation, target: Target, in_tf32: bool) -> float:
    """The estimated cycles of an equation that depend on the layout; 0 for equations that are as fast in either one.

    Args:
        in_tf32: whether convolutions of images that are channels last are in tf32.

    - Convolution: the estimate of its kernel.
    - Transpose: twice the bytes that it moves, because the kernels before and after it write and read float32.
    - Pooling: its bytes, which are half as many where channels are last, in bfloat16. In tf32 another kernel reads a
      gradient through pooling again, and writes its first term. In the other layout the kernel of a convolution also
      computes 2 x 2 max pooling.
    - `bfloat16_rest`: the bytes of the further term, which the same kernel writes.
    - Batch norm, or sum over PIXELS: what it takes longer because channels are not last. Sums that the kernel of a
      weight gradient also computes are not counted.
    """
    moved = sum(v.nbytes for v in (*e.inputs, *e.outputs)) / BYTES_PER_CYCLE
    if e.name == "transpose":
        return 2 * moved
    if e.name.endswith(CHANNELS_LAST):
        y = e.outputs[0]
        again = y.nbytes + y.size * BITS.itemsize if y.size > e.inputs[0].size else 0
        return moved + again / BYTES_PER_CYCLE if in_tf32 else moved / 2
    if e.name in POOLS:
        joined = e.name == "max_pool2d" and e.params["windows"].kernel == (2, 2)
        return 0 if joined else moved
    if e.name == "bfloat16_rest":
        return e.outputs[0].size * BITS.itemsize / BYTES_PER_CYCLE
    by_channel = e.has(Trait.REDUCTION) and set(e.params["axes"]) == PIXELS
    if by_channel or is_batch_norm(e):
        return sum(v.nbytes for v in (*e.inputs, *e.outputs)) / FIRST_BYTES_PER_CYCLE
    if e.name.removesuffix(OF_POOLED) not in CONVOLUTIONS | OF_TERMS:
        return 0
    kernels = _kernels(e, target)
    return kernels[0].cycles or 0 if kernels else 0


def _kernels(e: Equation, target: Target) -> Sequence[CudaKernel]:
    return cuda_kernels(e.name, target, *(v.type for v in e.inputs), **e.kernel_params)


def _has_kernel(e: Equation, target: Target) -> bool:
    """Whether there are kernels for a convolution of images that are channels last."""
    if e.primitive.name not in CONVOLUTIONS:
        return False
    if is_grouped(e) and any(v.type.shape[1] % ROW_MULTIPLE for v in images_of(e)):
        return False
    if any(v.type.dtype != np.float32 or v.members for v in e.inputs):
        return False
    dtype = np.dtype(np.float32) if format_of_operands(e) in (TF32, FLOAT32) else BITS
    types = (ArrayType(shape, dtype) for shape in operand_shapes(e) for _ in range(TERMS[format_of_operands(e)]))
    return bool(cuda_kernels(of_terms(e), target, *types, **params_of_terms(e)))
