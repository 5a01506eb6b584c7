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
one kernel computes. Large results of convolutions in bfloat16 are rounded where they are stored, so their squares are
exact in float32. The results and their squares are added in float64, and the sums can join the epilogue of the
convolution (`forms/product_sums.py`). For other values the sums are those of the differences from the first row, and of
the squares of these. So little precision is lost (T. Chan, G. Golub, R. LeVeque: "Algorithms for computing the sample
variance", 1983). Each equation that reads the normalised values computes them itself, so they are not stored.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from adtrain.backends.cuda.forms.horizontal import MAX_FLOPS
from adtrain.backends.cuda.forms.weight_gradients import fuse_bias_gradients
from adtrain.backends.cuda.round_channels import round_channels
from adtrain.backends.cuda.write_channels_last import (
    CONVOLUTIONS,
    OF_TERMS,
    PIXELS,
    POOLS,
    format_of_operands,
    images_of,
    is_batch_norm,
    is_grouped,
    of_terms,
    operand_shapes,
    params_of_terms,
    write_channels_last,
)
from adtrain.core.kernel import CudaKernel, Target, cuda_kernels
from adtrain.core.precision import FLOAT32, TERMS, TF32
from adtrain.core.primitive import CHANNELS_LAST, Trait
from adtrain.core.program import OF_POOLED, Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.types import BITS, ArrayType, Shape
from adtrain.lowering.cuda.gemm.bfloat16 import BOXES, BYTES_PER_CYCLE, ROW_MULTIPLE
from adtrain.passes.fuse_maxpool_gradients import fuse_maxpool_gradients
from adtrain.passes.simplify import remove_dead_code

FIRST_BYTES_PER_CYCLE = 600
"""A norm or a sum over PIXELS takes one cycle longer than if channels were last for this number of bytes that it moves;
fitted (docs/worklog/conv.md)."""
WIDE = BOXES[0]
"""Channels that fill a row of a box of the kernels. A layer with fewer keeps its layout where that is faster."""


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

    A layer with few channels or several groups may be faster as it is. So such layers are tried in order, and each is
    left out if that saves cycles. With many transposes, such as around depthwise convolutions, all layers are left out.
    """

    def cycles(chosen: set[Equation]) -> float:
        written = write_channels_last(program, chosen) if chosen else program
        pooled = remove_dead_code(
            fuse_maxpool_gradients(written, lambda e: bool(_kernels(e, target)), all_readers=True)
        )
        alone = set(fuse_bias_gradients(pooled, target).equations)
        return sum(_cycles(e, target) for e in pooled.equations if e.primitive.name != "sum" or e in alone)

    chosen = {e for layer in layers for e in layer}
    best = cycles(chosen)
    for layer in layers:
        channels = (v.type.shape[1] for e in layer for v in images_of(e) if v in e.inputs)
        optional = min(channels) < WIDE or any(map(is_grouped, layer))
        if optional and (found := cycles(chosen - layer)) < best:
            chosen, best = chosen - layer, found
    return chosen if best < cycles(set()) else set()


def _cycles(e: Equation, target: Target) -> float:
    """The estimated cycles of an equation that depend on the layout; 0 for equations that are as fast in either one.

    - Convolution: the estimate of its kernel.
    - Transpose: twice the bytes that it moves, because the kernels before and after it write and read float32.
    - Pooling: its bytes, which are half as many where channels are last, in bfloat16. In the other layout the kernel of
      a convolution also computes 2 x 2 max pooling.
    - `bfloat16_rest`: the bytes of the further term, which the same kernel writes.
    - Batch norm, or sum over PIXELS: what it takes longer because channels are not last. Sums that the kernel of a
      weight gradient also computes are not counted.
    """
    moved = sum(v.nbytes for v in (*e.inputs, *e.outputs)) / BYTES_PER_CYCLE
    if e.name == "transpose":
        return 2 * moved
    if e.name.endswith(CHANNELS_LAST):
        return moved / 2
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
