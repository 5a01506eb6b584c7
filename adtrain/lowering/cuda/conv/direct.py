"""Direct convolution for few channels, with the sums in registers (`kernels/cuda/conv/direct.cu`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adtrain.core.kernel import MAX_GRID, WARP, CudaKernel, CudaLaunch, Target
from adtrain.lowering.cuda.conv.problem import ConvProblem

THREADS, WEIGHT_GRAD_THREADS = 128, 256
"""Threads of a block, and of one of the weight gradient."""
MAX_WEIGHT_GRAD_CHANNELS = 16
"""Maximum of channels of a group for the weight gradient."""
MAX_TAPS, MAX_WEIGHT_GRAD_TAPS = 49, 25
"""Maximum of taps."""
MAX_PRODUCTS = 512
"""Maximum of products of one output."""
SUMS, WEIGHT_GRAD_SUMS = 32, 96
"""Sums that a thread has registers for."""
MAX_FILTERS, MAX_WEIGHT_GRAD_FILTERS = 32, 8
"""Maximum of filters of a thread."""
WEIGHT_BYTES = 40 << 10
"""Bytes of shared memory for the weights of a block."""
WARPS, SCHEDULERS = 16, 4
"""Warps that keep a multiprocessor busy; its warp schedulers."""
MAX_ELEMENTS = 1 << 30
"""Maximum of elements of an array, so that 32 bits count them and the elements that a grid reads beyond the end."""
MIN_STEPS = 6
"""Minimum of steps of a warp. With fewer, the sum over splits takes longer than the split saves."""
BROADCAST_CYCLES = 0.8
"""Cycles in which shared memory broadcasts a number to a warp, measured."""
BYTES_PER_CYCLE = 2400
"""Bytes per cycle that memory reads and writes."""
START, SECOND_PASS = 4000, 4000
"""Cycles of the launch; cycles of the sum over splits."""


def _macros(problem: ConvProblem) -> Mapping[str, int]:
    shapes = {**problem.window_macros(), **problem.shape_macros()}
    return {**shapes, "CONV_GROUPS": problem.groups, **problem.mantissa_macro()}


def _array_bytes(problem: ConvProblem) -> int:
    return 4 * (math.prod(problem.images) + math.prod(problem.outputs))


def _supported(problem: ConvProblem, max_taps: int) -> bool:
    sizes = math.prod(problem.images), math.prod(problem.outputs)
    fits = problem.taps <= max_taps and 0 < min(sizes) <= max(sizes) < MAX_ELEMENTS
    return fits and problem.dtype.itemsize == 4


@dataclass(frozen=True)
class DirectConv:
    """A convolution.

    Attributes:
        flipped: whether the weights are (C, O / groups, KH, KW) with their taps in reverse order.
    """

    problem: ConvProblem
    target: Target
    flipped: bool

    @property
    def wide(self) -> int:
        """Neighbouring outputs of a thread: two if there are enough threads."""
        enough = self.problem.pixels >= 2 * WARP * self.target.multiprocessors
        return math.gcd(self.problem.outputs[3], 2) if enough else 1

    @property
    def filters(self) -> int:
        """Filters of a thread: as many as registers and shared memory hold, or fewer to get more threads."""
        p = self.problem
        weights = WEIGHT_BYTES // (4 * p.group_channels * p.taps) // 4 * 4
        capacity = min(SUMS // self.wide, MAX_FILTERS, weights)
        min_blocks = -(-p.group_filters // max(capacity, 1))
        warps = -(-p.pixels // (WARP * self.wide)) * p.groups
        wanted = SCHEDULERS * self.target.multiprocessors // warps
        return -(-p.group_filters // max(min_blocks, min(wanted, p.group_filters // 4)))

    @property
    def filter_blocks(self) -> int:
        """Threads that share the filters of a group."""
        return -(-self.problem.group_filters // self.filters)

    @property
    def cycles(self) -> float:
        """An estimate of the time, bound by additions, by shared memory and cache, or by memory."""
        p, wide, filters = self.problem, self.wide, self.filters
        steps = -(-p.pixels // (WARP * wide)) * p.groups * self.filter_blocks
        product = max((filters * (wide + 0.25) + wide + 2) / SCHEDULERS, filters * BROADCAST_CYCLES + wide)
        products = -(-steps // self.target.multiprocessors) * p.group_channels * p.taps * product
        return START + max(products, _array_bytes(p) / BYTES_PER_CYCLE)

    def supported(self) -> bool:
        p = self.problem
        products = p.group_channels * p.taps
        fits = products <= MAX_PRODUCTS and products * 16 <= WEIGHT_BYTES and p.outputs[1] <= MAX_GRID[1]
        return fits and _supported(p, MAX_TAPS)

    def kernels(self) -> Sequence[CudaKernel]:
        p, wide = self.problem, self.wide
        macros = {"FILTERS": self.filters, "WIDE_C": wide, "FLIPPED": int(self.flipped), "WEIGHT_GRAD": 0}
        steps = -(-p.pixels // (THREADS * wide))
        few_registers = self.filters * wide <= SUMS // 8
        warps = WARPS * (4 if few_registers else 1)
        grid_y = self.filter_blocks * p.groups
        max_blocks = max(warps * WARP // THREADS * self.target.multiprocessors // grid_y, 1)
        launch = CudaLaunch(
            "conv/direct.cu",
            "conv_direct",
            p.images[:1],
            (p.dtype,),
            blocks=(-(-steps // -(-steps // max_blocks)), grid_y),
            threads=THREADS,
            definitions={**_macros(p), **macros},
        )
        return [CudaKernel((launch,))]


@dataclass(frozen=True)
class DirectWeightGrad:
    """The weight gradient of a convolution; with ``bias`` also the bias gradient."""

    problem: ConvProblem
    target: Target
    bias: bool = False

    @property
    def filters(self) -> int:
        """Filters of a warp."""
        p = self.problem
        capacity = min(WEIGHT_GRAD_SUMS // (p.taps + self.bias), MAX_WEIGHT_GRAD_FILTERS)
        return -(-p.group_filters // -(-p.group_filters // max(capacity, 1)))

    @property
    def _warps(self) -> int:
        """Warps that read the same outputs."""
        return self.problem.images[1] * -(-self.problem.group_filters // self.filters)

    @property
    def _wide(self) -> int:
        """Neighbouring outputs of a thread."""
        return math.gcd(self.problem.outputs[3], 2)

    @property
    def _steps(self) -> int:
        """Steps of a warp over all outputs."""
        return -(-self.problem.pixels // (WARP * self._wide))

    @property
    def splits(self) -> int:
        """Equal splits of the outputs: as many as fill the GPU, or half as many if each has too few steps."""

        def steps(warps: int) -> int:
            """Steps of a split if a multiprocessor has this number of warps."""
            return -(-self._steps // max(warps * self.target.multiprocessors // self._warps, 1))

        few_registers = self.filters * self.problem.taps <= WEIGHT_GRAD_SUMS // 3
        warps = WARPS * (2 if few_registers else 1)
        return -(-self._steps // steps(warps if steps(warps) >= MIN_STEPS else warps // 2))

    @property
    def cycles(self) -> float:
        """An estimate of the time, bound by additions, by reads, or by memory."""
        p, filters, wide = self.problem, self.filters, self._wide
        read = 2 * p.kernel[0] * (p.kernel[1] + wide - 1)
        step = max((filters * ((p.taps + 1) * wide + 3) + read + 40) / SCHEDULERS, wide * (2 * filters + read / 2))
        steps = -(-self._warps * self.splits // self.target.multiprocessors) * -(-self._steps // self.splits)
        second = SECOND_PASS if self.splits > 1 else 0
        return START + second + max(steps * step, _array_bytes(p) / BYTES_PER_CYCLE)

    def supported(self) -> bool:
        few = self.problem.group_channels <= MAX_WEIGHT_GRAD_CHANNELS
        return few and _supported(self.problem, MAX_WEIGHT_GRAD_TAPS)

    def kernels(self) -> Sequence[CudaKernel]:
        """The sums of each split and their sum; one launch if there is one split."""
        p, splits = self.problem, self.splits
        gradients = p.outputs[1] * (p.group_channels * p.taps + self.bias)
        own = {"FILTERS": self.filters, "WIDE_C": self._wide, "BIAS": int(self.bias), "WEIGHT_GRAD": 1}
        own["SPLIT"] = int(splits > 1)
        file, types, macros = "conv/direct.cu", (p.dtype,), {**_macros(p), **own}
        multiply = CudaLaunch(
            file,
            "weight_grad_direct",
            (p.images[0], splits),
            types,
            blocks=-(-self._warps * splits * WARP // WEIGHT_GRAD_THREADS),
            threads=WEIGHT_GRAD_THREADS,
            definitions=macros,
        )
        if splits == 1:
            return [CudaKernel((multiply,))]
        add = CudaLaunch(
            file, "sum_weight_grad_direct", (splits,), types, elements=gradients * WARP, definitions=macros
        )
        return [CudaKernel((multiply, add), gradients * splits * 4)]
