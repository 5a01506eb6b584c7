"""Convolutions followed by 2 x 2 max pooling on Hopper, and their gradients: the input gradient from the pooled
gradient as a 2:4 sparse operand (`kernels/cuda/conv/sparse_pool.cuh`), and the rules that choose kernels.

A rule returns a kernel only if it is estimated faster than separate kernels for convolution and pooling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from adtrain.core.kernel import CudaKernel, CudaLaunch, MemoryLayout, Target, memory_layout
from adtrain.lowering.cuda.conv.problem import Direction, PaddedIndex
from adtrain.lowering.cuda.conv.rules import conv2d_weight_grad_by_image, problem_of, ranked_algorithms
from adtrain.lowering.cuda.conv.shifted import (
    BF16X3_TERMS,
    CHUNK_ELEMENTS,
    IMAGE_STAGES,
    MIN_WEIGHT_STAGES,
    START,
    STATIC_SHARED,
    WARPGROUP,
    ShiftedConv,
    weight_stages,
)
from adtrain.lowering.cuda.conv.shifted_fp16x2 import Fp16x2Conv, Fp16x2WeightGrad
from adtrain.lowering.cuda.conv.shifted_weight_grad import ShiftedWeightGrad

FILE = "conv/sparse_pool_input_grad.cu"
ROWS, OUT_CHANNELS, STAGE_CHANNELS = 64, 32, (32, 16)
"""Pairs of positions of a warpgroup; channels of the input gradient of a tile; filters of a stage, the preferred number
first."""
PRODUCERS, CONSUMERS, FULL_CONSUMERS = 256, 3, 2
"""Threads of a block that load; warpgroups that multiply, for rounded operands and for full precision."""
PRODUCT_CYCLES, NARROW_PRODUCT_CYCLES = 1420, 1600
"""Cycles of a tile's products with the weights of a stage, measured; the same if outputs are written one by one."""
OPERAND_SHARE = {6: 1.0, 4: 1.0, 2: 0.8}
"""Factor of these cycles by the bytes of an element, measured. Tiles of rounded operands are larger."""


@dataclass(frozen=True)
class SparsePoolInputGrad:
    """The input gradient.

    Attributes:
        index: of the convolution of the output gradient with flipped weights.
    """

    index: PaddedIndex
    target: Target

    @property
    def _consumers(self) -> int:
        """Warpgroups that multiply."""
        return FULL_CONSUMERS if self.index.bf16_terms == BF16X3_TERMS else CONSUMERS

    @property
    def _pair_index(self) -> PaddedIndex:
        """`index`, with rows that include the zeros that windows read beyond a row's pairs."""
        padding, columns = self.index.problem.padding[1], self.index.problem.images[3]
        odd = padding % 2
        back, last = (padding + odd) // 2, (self.index.problem.outputs[3] - 1 + odd) // 2
        kernel_columns = self.index.problem.kernel[1]
        return self.index.with_even_rows(max(columns // 2 + back, last + 1 + kernel_columns // 2 - back))

    @property
    def _matrices(self) -> int:
        """Matrices of weights of a block of filters: one for each row of the window and each pair that it reads."""
        rows, columns = self.index.problem.kernel
        return rows * (columns // 2 + 1)

    @property
    def _wide(self) -> int:
        """Neighbouring outputs that are written at once."""
        return 1 if self.index.problem.padding[1] % 2 else math.gcd(2, self.index.problem.outputs[3])

    def _input_blocks(self, channels: int) -> int:
        """Blocks of filters."""
        return -(-self.index.problem.images[1] // channels)

    @property
    def _blocks(self) -> int:
        """Tiles of the same positions."""
        return -(-self.index.problem.outputs[1] // OUT_CHANNELS)

    def _weight_stage_bytes(self, channels: int) -> int:
        return 2 * channels * 2 * OUT_CHANNELS * self.index.k_major_bytes

    def _layout(self, channels: int, weight_stages: int) -> MemoryLayout:
        """The layout of shared memory."""
        rows, columns = self.index.problem.kernel
        tile = self._consumers * ROWS
        pairs = -(-(tile + (rows - 1) * self._pair_index.pitch // 2 + columns // 2) // 8) * 8
        element_bytes = self.index.k_major_bytes
        metadata_bits = 4 if element_bytes == 4 else 2  # of an element: tf32; bfloat16
        gradients = pairs * channels * (8 * element_bytes + metadata_bits) // 8, IMAGE_STAGES
        arrays = {"GRADIENTS": gradients, "WEIGHTS": (self._weight_stage_bytes(channels), weight_stages)}
        return memory_layout("SHARED", arrays, alignment=128)

    def _all_weight_stages(self, channels: int) -> int:
        """Stages that hold all weights."""
        return self._blocks * self._input_blocks(channels) * self._matrices

    def _weight_stages(self, channels: int) -> int:
        free = self.target.shared - STATIC_SHARED - self._layout(channels, 0)
        return weight_stages(free // self._weight_stage_bytes(channels), self._all_weight_stages(channels))

    @property
    def _channels(self) -> int:
        """Filters of a stage: the first choice for which shared memory holds all weights, else the first one."""
        resident = (n for n in STAGE_CHANNELS if self._weight_stages(n) == self._all_weight_stages(n))
        return next(resident, STAGE_CHANNELS[0])

    @property
    def _shared(self) -> MemoryLayout:
        return self._layout(self._channels, self._weight_stages(self._channels))

    @property
    def _tiles(self) -> int:
        return -(-self._pair_index.count // 2 // (self._consumers * ROWS)) * self._blocks

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        waves = -(-self._tiles // self.target.multiprocessors)
        products = PRODUCT_CYCLES if self._wide == 2 else NARROW_PRODUCT_CYCLES
        blocks = self._input_blocks(STAGE_CHANNELS[0])
        return START + waves * blocks * self._matrices * products * OPERAND_SHARE[self.index.k_major_bytes]

    def supported(self) -> bool:
        fits = self.index.problem.dilation == (1, 1) and self._weight_stages(self._channels) >= MIN_WEIGHT_STAGES
        return fits and self._pair_index.supported(self.target)

    def kernels(self) -> Sequence[CudaKernel]:
        """The launches: pack the weights, multiply."""
        problem = self.index.problem
        weights = self._weight_stage_bytes(self._channels), self._all_weight_stages(self._channels)
        scratch = memory_layout("SCRATCH", {"WEIGHTS": weights})
        chunks = scratch // (CHUNK_ELEMENTS * self.index.k_major_bytes)
        macros = {
            **self._pair_index.macros(),
            "STAGE_CHANNELS": self._channels,
            "WEIGHT_STAGES": self._weight_stages(self._channels),
            "CONSUMER_WARPGROUPS": self._consumers,
            "WIDE_C": self._wide,
            "FLIPPED": 1,
        }
        numbers, types = problem.images[:1], (problem.dtype,)
        multiply = CudaLaunch(
            FILE,
            "input_grad_sparse_pool",
            numbers,
            types,
            blocks=min(self._tiles, self.target.multiprocessors),
            threads=PRODUCERS + self._consumers * WARPGROUP,
            shared=self._shared,
            definitions=macros,
            layouts=(scratch,),
        )
        pack = replace(multiply, name="pack_weights", elements=chunks, blocks=None, threads=None, shared=0)
        return [CudaKernel((replace(pack, layouts=(scratch, self._shared)), multiply), scratch)]


WINDOWS = (2, 2), (2, 2), (0, 0)
"""Kernel, stride and padding of the supported max pooling."""
POOLING_START, POOLING_ELEMENTS = 4000, 400
"""Cycles of a launch of pooling alone; elements that it reads per cycle."""
SHIFTED = ShiftedConv, Fp16x2Conv, ShiftedWeightGrad, Fp16x2WeightGrad
"""Shifted implicit GEMM. Other convolutions are not compared with the kernels for pooling."""


def candidates(
    direction: Direction,
    target: Target,
    *operands: Any,
    window: Any,
    windows: Any,
    precision: str,
    shape: tuple[int, ...] = (),
    size: tuple[int, int] = (0, 0),
    axes: Sequence[int] = (),
) -> Sequence[CudaKernel]:
    """The kernel of a convolution with pooling, or of a gradient from the pooled gradient as a 2:4 sparse operand.

    None if the best other kernel, a shifted implicit GEMM, and pooling are estimated faster.

    Args:
        operands: images and weights; or the pooled gradient, positions and weights; or images, the pooled gradient
            and positions.
        shape: of the gradient before pooling.
        axes: those that the bias gradient sums over, if it is computed too.
    """
    a, b = operands[0], operands[1 if direction is not Direction.INPUT_GRAD else 2]
    if direction is Direction.INPUT_GRAD:
        a = a._replace(shape=shape)
    elif direction is Direction.WEIGHT_GRAD:
        b = b._replace(shape=shape)
    problem = problem_of(direction, a, b, window, size, precision)
    index, pooling = PaddedIndex(problem), 0.0
    if windows != WINDOWS or not index.supported(target):
        return []
    pooled: ShiftedConv | SparsePoolInputGrad | ShiftedWeightGrad | None
    if direction is Direction.FORWARD:
        pooled = ShiftedConv(index, target, flipped=False, pooled=True).best()
        pooling = POOLING_START + math.prod(problem.outputs) / POOLING_ELEMENTS
    elif direction is Direction.INPUT_GRAD:
        sparse = SparsePoolInputGrad(PaddedIndex(problem.transposed()), target)
        pooled = sparse if sparse.supported() else None
    else:
        pooled = ShiftedWeightGrad(index, target, pooled=True).best()
    best = next(iter(ranked_algorithms(direction, problem, target)), None)
    if pooled is None or not isinstance(best, SHIFTED) or pooled.cycles > best.cycles + pooling:
        return []
    if isinstance(pooled, ShiftedWeightGrad):
        pooled = replace(pooled, bias=bool(axes))
    return [replace(x, cycles=pooled.cycles) for x in pooled.kernels()]


conv2d_max_pool2d, conv2d_input_grad_pooled, conv2d_weight_grad_pooled = (
    partial(candidates, direction) for direction in Direction
)


def conv2d_weight_grad_by_image_pooled(
    target: Target, x: Any, g: Any, where: Any, windows: Any, shape: tuple[int, ...], **others: Any
) -> Sequence[CudaKernel]:
    """The kernel for the weight gradient of each image, if it is estimated no slower than the best dense one.

    Args:
        where: the positions of the pooled gradient `g`.
        shape: of the gradient before pooling.
    """
    dense = g._replace(shape=shape)
    index = PaddedIndex(problem_of(Direction.WEIGHT_GRAD, x, dense, **others))
    if windows != WINDOWS or not index.supported(target):
        return []
    pooled = ShiftedWeightGrad(index, target, pooled=True, by_image=True).best()
    best = conv2d_weight_grad_by_image(target, x, dense, **others)[0].cycles
    if pooled is None or best is None or pooled.cycles > best:
        return []
    return [replace(each, cycles=pooled.cycles) for each in pooled.kernels()]
