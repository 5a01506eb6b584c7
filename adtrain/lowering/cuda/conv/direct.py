"""Convolutions of few channels, whose sums a thread has in registers (`kernels/cuda/conv/direct.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from adtrain.core.chip import CHIP
from adtrain.core.kernel import LegacyKernel
from adtrain.core.precision import FULL, mantissa

WARP = 32
THREADS, WEIGHT_GRAD_THREADS = 128, 256
"""Of a block of `conv/direct.cu`, and of `conv/direct_weight_grad.cu`."""
CHANNELS, TAPS, SUM = 16, (49, 25), 512
"""Of a group, and elements of a kernel, that are few, to each of the two; products of an output, at most."""
SUMS, WEIGHT_GRAD_SUMS = 32, 96
"""That a thread of each has registers for."""
MOST_FILTERS, WEIGHT_GRAD_FILTERS = 32, 8
"""That a thread has sums of, at most."""
WEIGHTS = 40 << 10
"""Bytes of shared memory for the weights of a block."""
WARPS, SCHEDULERS = 16, 4
"""That keep a multiprocessor busy; of one, each with a warp at a time."""
MOST_BLOCKS = 1 << 16
"""Of a launch along its second axis."""
MOST_ELEMENTS = 1 << 30
"""Of an array, so that 32 bits count them, and a grid beyond."""
LEAST_STEPS = 6
"""Of a warp, or adding up the parts takes longer than it is worth."""
HANDED = 0.8
"""Cycles in which shared memory hands a number to the 32 lanes of a warp, measured."""
BYTES_PER_CYCLE = 2400
"""That memory reads and writes in a cycle."""
START, SECOND_PASS = 4000, 4000
"""Cycles of the launch; of the sum of the parts."""


@dataclass(frozen=True)
class Few:
    """A convolution of float32.

    Attributes:
        images: (N, C, H, W) of what windows are taken of.
        outputs: (N, O, OH, OW).
        kernel, stride, padding, dilation: of the window, rows and columns.
        groups: of channels.
        precision: what operands are rounded to.
    """

    images: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int = 1
    precision: str = FULL

    @property
    def channels(self) -> int:
        """Of a group."""
        return self.images[1] // self.groups

    @property
    def filters(self) -> int:
        """Of a group."""
        return self.outputs[1] // self.groups

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def count(self) -> int:
        """Outputs of a filter."""
        return self.outputs[0] * math.prod(self.outputs[2:])

    @property
    def bytes(self) -> int:
        """Of images and outputs."""
        return 4 * (math.prod(self.images) + math.prod(self.outputs))

    @property
    def definitions(self) -> Mapping[str, int]:
        names = ("KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW")
        window = zip(names, (*self.kernel, *self.stride, *self.padding, *self.dilation), strict=True)
        lengths = ("IN_CHANNELS", "IN_ROWS", "IN_COLUMNS", "OUT_CHANNELS", "OUT_ROWS", "OUT_COLUMNS")
        sizes = zip(lengths, (*self.images[1:], *self.outputs[1:]), strict=True)
        return {**dict(window), **dict(sizes), "CONV_GROUPS": self.groups, "MANTISSA": mantissa(self.precision)}

    def turned(self) -> Few:
        """The convolution of the outputs' gradients that is the gradient by the images; of stride 1."""
        reach = [(length - 1) * step for length, step in zip(self.kernel, self.dilation, strict=True)]
        padding = reach[0] - self.padding[0], reach[1] - self.padding[1]
        return replace(self, images=self.outputs, outputs=self.images, padding=padding)

    def suits(self) -> bool:
        sizes = math.prod(self.images), math.prod(self.outputs)
        return self.taps <= TAPS[0] and 0 < min(sizes) <= max(sizes) < MOST_ELEMENTS


@dataclass(frozen=True)
class FewConvolution:
    """A convolution; with ``turned`` the weights are (C, O / groups, KH, KW), and their elements in reverse order."""

    few: Few
    turned: bool

    @property
    def wide(self) -> int:
        """Neighbouring outputs of a thread: two where there are enough of them."""
        enough = self.few.count >= 2 * WARP * CHIP.multiprocessors
        return math.gcd(self.few.outputs[3], 2) if enough else 1

    @property
    def filters(self) -> int:
        """Of a thread: as many of a group's as there are registers and shared memory for, fewer if threads are few."""
        few = self.few
        room = min(SUMS // self.wide, MOST_FILTERS, WEIGHTS // (4 * few.channels * few.taps) // 4 * 4)
        least = -(-few.filters // max(room, 1))
        warps = -(-few.count // (WARP * self.wide)) * few.groups
        wanted = SCHEDULERS * CHIP.multiprocessors // warps
        return -(-few.filters // max(least, min(wanted, few.filters // 4)))

    @property
    def shares(self) -> int:
        """Of a group's filters, each for a thread of its own."""
        return -(-self.few.filters // self.filters)

    @property
    def cycles(self) -> float:
        """An estimate of the time: of additions, of what shared memory and cache hand out, and of memory."""
        few, wide, filters = self.few, self.wide, self.filters
        steps = -(-few.count // (WARP * wide)) * few.groups * self.shares
        product = max((filters * (wide + 0.25) + wide + 2) / SCHEDULERS, filters * HANDED + wide)
        products = -(-steps // CHIP.multiprocessors) * few.channels * few.taps * product
        return START + max(products, few.bytes / BYTES_PER_CYCLE)

    def suits(self) -> bool:
        """Whether the kernel is right for it."""
        few = self.few
        products = few.channels * few.taps
        return few.suits() and products <= SUM and products * 16 <= WEIGHTS and few.outputs[1] < MOST_BLOCKS

    def kernel(self) -> LegacyKernel:
        wide, shares = self.wide, self.shares
        definitions = {**self.few.definitions, "FILTERS": self.filters, "WIDE_C": wide, "TURNED": int(self.turned)}
        steps = -(-self.few.count // (THREADS * wide))
        few_sums = self.filters * wide <= SUMS // 8  # so a thread has few registers
        warps = WARPS * (4 if few_sums else 1)
        most = max(warps * WARP // THREADS * CHIP.multiprocessors // (shares * self.few.groups), 1)
        blocks = -(-steps // -(-steps // most))
        return LegacyKernel(
            "conv/direct.cu",
            "conv_few",
            lambda *_, **__: self.few.images[:1],
            blocks=lambda *_, **__: (blocks, shares * self.few.groups),
            threads=lambda *_, **__: THREADS,
            definitions=lambda *_, **__: definitions,
        )


@dataclass(frozen=True)
class FewWeightGrad:
    """The gradient of a convolution by its weights; with ``bias``, by its bias, too."""

    few: Few
    bias: bool = False

    @property
    def filters(self) -> int:
        """Of a warp."""
        room = min(WEIGHT_GRAD_SUMS // (self.few.taps + self.bias), WEIGHT_GRAD_FILTERS)
        return -(-self.few.filters // -(-self.few.filters // max(room, 1)))

    @property
    def _units(self) -> int:
        """Warps that read the same outputs."""
        return self.few.images[1] * -(-self.few.filters // self.filters)

    @property
    def _wide(self) -> int:
        """Neighbouring outputs of a thread."""
        return math.gcd(self.few.outputs[3], 2)

    @property
    def _steps(self) -> int:
        """Of a warp's outputs."""
        return -(-self.few.count // (WARP * self._wide))

    @property
    def parts(self) -> int:
        """Even ones, of the outputs, as many as fill the multiprocessors, or half if there is little to do."""

        def steps(warps: int) -> int:
            """Of a part."""
            return -(-self._steps // max(warps * CHIP.multiprocessors // self._units, 1))

        few_sums = self.filters * self.few.taps <= WEIGHT_GRAD_SUMS // 3  # so a thread has few registers
        warps = WARPS * (2 if few_sums else 1)
        return -(-self._steps // steps(warps if steps(warps) >= LEAST_STEPS else warps // 2))

    @property
    def cycles(self) -> float:
        """An estimate of the time: of additions, reads and what is around them, and of memory."""
        few, filters, wide = self.few, self.filters, self._wide
        read = 2 * few.kernel[0] * (few.kernel[1] + wide - 1)
        step = max((filters * ((few.taps + 1) * wide + 3) + read + 40) / SCHEDULERS, wide * (2 * filters + read / 2))
        steps = -(-self._units * self.parts // CHIP.multiprocessors) * -(-self._steps // self.parts)
        return START + SECOND_PASS + max(steps * step, few.bytes / BYTES_PER_CYCLE)

    def suits(self) -> bool:
        """Whether the kernels are right for it."""
        return self.few.suits() and self.few.taps <= TAPS[1] and self.few.channels <= CHANNELS

    def kernel(self) -> LegacyKernel:
        """The launches: the sums of each part, and their sum."""
        parts, batch = self.parts, self.few.images[0]
        outputs = self.few.outputs[1] * (self.few.channels * self.few.taps + self.bias)
        definitions = {**self.few.definitions, "FILTERS": self.filters, "WIDE_C": self._wide, "BIAS": int(self.bias)}
        sums = LegacyKernel(
            "conv/direct_weight_grad.cu",
            "conv_few_weight_grad",
            lambda *_, **__: (batch, parts),
            blocks=lambda *_, **__: -(-self._units * parts * WARP // WEIGHT_GRAD_THREADS),
            threads=lambda *_, **__: WEIGHT_GRAD_THREADS,
            definitions=lambda *_, **__: definitions,
            scratch=lambda *_, **__: outputs * parts * 4,
        )
        add = replace(
            sums,
            name="conv_few_sum_parts",
            numbers=lambda *_, **__: (parts,),
            blocks=None,
            threads=None,
            elements=lambda *_, **__: outputs * WARP,
        )
        return replace(sums, then=add)
