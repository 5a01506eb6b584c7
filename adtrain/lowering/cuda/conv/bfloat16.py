"""Convolutions of images that are channels last, on Hopper.

An operand is an array of bfloat16, the sum of several (its terms), or float32 that is rounded to tf32
(`ops.channels_last`). A `Loader` copies images to shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from math import prod
from operator import le
from typing import Any, NamedTuple

from adtrain.core.kernel import HOPPER, CudaKernel, Im2col, Target, TensorMap, memory_layout
from adtrain.core.precision import FLOAT32 as UNROUNDED
from adtrain.core.precision import TF32, mantissa
from adtrain.core.types import BITS
from adtrain.lowering.cuda.conv.depthwise import DepthwiseConv
from adtrain.lowering.cuda.conv.problem import Direction, window_macros
from adtrain.lowering.cuda.gemm.bfloat16 import (
    BOXES,
    FLOAT32,
    ROW_MULTIPLE,
    START,
    STORED,
    TF32_TILES,
    TILES_OF_TERMS,
    Bfloat16Product,
    Bfloat16Tile,
    fastest_splits,
    in_tf32,
)
from adtrain.lowering.cuda.gemm.tiles import MAX_LENGTH

MAX_STRIDE, MAX_POSITION, MAX_OFFSET = 8, 128, 255
"""Limits of a tensor map for images: of the stride, of the corners of the positions, and of taps (CUDA driver API,
cuTensorMapEncodeIm2col)."""
MAX_MAPS = 16
"""Maximum tensor maps of A, one for each phase and term. They are an argument of the kernel."""
ROW_CYCLES, PARTIAL_CYCLES = {BOXES[0]: 3.3, BOXES[1]: 2.2}, 1.6
"""Cycles in which TMA copies a row of a box, by the elements of bfloat16 that fill the row; further cycles for a row
that ends after the last channel (docs/worklog/conv.md)."""
SECTOR, UNALIGNED_CYCLES = 32, {BOXES[0]: 7.5, BOXES[1]: 6.5}
"""Bytes of a sector of memory; cycles for a row where the channels of a pixel are not a multiple of it."""
GATHER_CYCLES = {BOXES[0]: 4.5, BOXES[1]: 2.5}
"""Cycles in which a row of a box is gathered, fitted to the measurements there."""
MAX_GATHERED, MAX_GATHERED_TERMS = 1 << 31, 2
"""Images that are gathered have fewer elements: their offsets fit 32 bits. Maximum terms of an operand of a weight
gradient that is gathered; operands of other convolutions have one."""
SHIFT_TILES = tuple(
    Bfloat16Tile(128, n, 4, macs, pingpong)
    for n, macs in ((128, 1450), (64, 1100), (32, 800))
    for pingpong in (True, False)
)
"""The tiles where one copy of images serves all taps. Their multiply-adds are fitted (docs/worklog/conv.md)."""
CHUNK_BYTES, CHUNK_CYCLES, ROUND_CYCLES = 16, 0.6, 4.6
"""Bytes of a chunk of channels; cycles in which cp.async copies it, and in which the producer warps round it to
tf32."""
SHIFT_BYTES, MIN_STAGES = 200 << 10, 2
"""Maximum of shared memory for the stages and filters of such a tile, and minimum of stages."""
UNEVEN = {192: 256, 160: 128, 96: 128}
"""Columns of slow tiles, and of the faster tiles that they are compared with. Slow tiles are candidates only where they
have fewer columns after the last one of the result."""


def last_position(phase: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Along one axis, the position of the output's gradient for the last tap and the first pixel of a phase.

    0 if the phase has no taps. It is `SubFilter::last` of the kernel's file.
    """
    taps = [i for i in range(kernel) if (phase + padding - i * dilation) % stride == 0]
    return (phase + padding - taps[-1] * dilation) // stride if taps else 0


class Loader(Enum):
    """How images are copied to shared memory. The value is the name of the kernel and its file."""

    TMA = "bfloat16_conv"
    GATHER = "bfloat16_gather"
    """cp.async copies tiles of K. Images are one array of bfloat16, or two for a weight gradient."""
    SHIFT = "bfloat16_shift"
    """All threads of a warpgroup copy pixels once for all taps. Images are one array, and filters fit in shared
    memory."""


@dataclass(frozen=True)
class ShiftedProduct(Bfloat16Product):
    """The work of `conv/bfloat16_shift.cu`.

    Attributes:
        chunks: of CHUNK_BYTES, in a stage and in the filters.
    """

    chunks: tuple[int, int] = (0, 0)

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        size = self.tile.m * self.tile.n
        chunk = ROUND_CYCLES if self.tile.in_tf32 else CHUNK_CYCLES
        products, copies, stores = size * self.lengths[3] / self.tile.macs, self.chunks[0] * chunk, size / STORED
        busy = products if self.tile.pingpong else products + stores
        waves = -(-self._tiles // self.target.multiprocessors)
        return START + self.chunks[1] * chunk + waves * max(busy, copies, stores)


class Bfloat16Conv(NamedTuple):
    """A convolution or gradient by one of the kernels of `Loader`.

    Attributes:
        images: (N, H, W, C), the input.
        outputs: (N, OH, OW, O).
        kernel: (KH, KW).
        window: see `adtrain.ops.conv.Window`.
        terms: the number of terms of an operand.
        in_tf32: whether operands are float32, and rounded to tf32. Then the filters of an input gradient are
            (C, KH, KW, O). Not for weight gradients.
        wide: whether all boxes are as long as they can be, even if more channels of zeros are added.
    """

    direction: Direction
    images: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, int]
    window: Any
    terms: int = 1
    in_tf32: bool = False
    loader: Loader = Loader.TMA
    wide: bool = False

    @property
    def phases(self) -> tuple[int, int]:
        """The phases of an input gradient along each axis; (1, 1) for other directions."""
        if self.direction != Direction.INPUT_GRAD:
            return 1, 1
        return min(self.window.stride[0], self.images[1]), min(self.window.stride[1], self.images[2])

    @property
    def box(self) -> tuple[int, int]:
        """Channels of a box of each operand."""
        of_input, of_output = self._box(self.images[3]), self._box(self.outputs[3])
        if self.loader is not Loader.TMA:
            long, short = (box // (1 + self.in_tf32) for box in BOXES)
            return {
                Direction.FORWARD: (long, long),
                Direction.INPUT_GRAD: (long, short),
                Direction.WEIGHT_GRAD: (short if self.gathered[0] else of_output, long),
            }[self.direction]
        if self.direction == Direction.FORWARD:
            return of_input, of_input
        return of_output, of_output if self.in_tf32 else of_input

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        """Batch, M, N and K of the product.

        Channels along K, or columns of a weight gradient, are rounded up, unless images are gathered.
        """
        (n, h, w, c), (_, oh, ow, o), taps = self.images, self.outputs, self.kernel[0] * self.kernel[1]
        along = (c, o) if self.loader is not Loader.TMA else (self._rounded_up(c), self._rounded_up(o))
        pixels = n * oh * ow
        if self.direction == Direction.FORWARD:
            return 1, pixels, o, taps * along[0]
        if self.direction == Direction.WEIGHT_GRAD:
            return 1, o, taps * along[0], pixels
        (sh, sw), (down, right) = self.window.stride, self.phases
        k = -(-taps * along[1] // (down * right))  # the mean
        return down * right, n * -(-h // sh) * -(-w // sw), c, k

    @property
    def mn_major(self) -> tuple[bool, bool]:
        """Whether each operand is not K-major."""
        return self.direction == Direction.WEIGHT_GRAD, self.direction != Direction.FORWARD and not self.in_tf32

    @property
    def gathered(self) -> tuple[bool, bool]:
        """Whether each operand is gathered."""
        few_filters, by_threads = self.outputs[3] < BOXES[0], self.loader is not Loader.TMA
        a = self.direction != Direction.WEIGHT_GRAD or few_filters
        b = self.direction != Direction.FORWARD or self.loader is Loader.SHIFT
        return by_threads and a, by_threads and b

    def product(self, target: Target, tile: Bfloat16Tile | None = None, splits: int = 1) -> Bfloat16Product:
        """The work as a product."""
        tile = tile or (TF32_TILES if self.in_tf32 else TILES_OF_TERMS[self.terms])[0]
        c, o = self.images[3], self.outputs[3]
        along = {  # the channels of the rows of boxes
            Direction.FORWARD: (c, c),
            Direction.INPUT_GRAD: (o, o if self.in_tf32 else c),
            Direction.WEIGHT_GRAD: (o, c),
        }[self.direction]
        of_a, of_b = (
            GATHER_CYCLES[box] if gathered else self._row_cycles(box, channels)
            for gathered, box, channels in zip(self.gathered, self.box, along, strict=True)
        )
        return Bfloat16Product(target, self.lengths, tile, self.mn_major, splits, self.box, (of_a, of_b), self.gathered)

    def products(self, target: Target) -> Sequence[Bfloat16Product]:
        """The work by each tile."""
        if self.loader is not Loader.SHIFT:
            return fastest_splits(self.product(target))
        tiles = map(in_tf32, SHIFT_TILES) if self.in_tf32 else SHIFT_TILES
        return [x for tile in tiles if tile.n >= self.lengths[2] and (x := self._shifted(target, tile))]

    def _shifted(self, target: Target, tile: Bfloat16Tile) -> ShiftedProduct | None:
        """The work of `conv/bfloat16_shift.cu`; None if shared memory or 32 bits do not suffice."""
        pad_y, pad_x = self._zeros()
        images = self.images if self.direction == Direction.FORWARD else self.outputs
        line, taps = images[2] + pad_x, prod(self.kernel)
        planes = images[3] // ROW_MULTIPLE * (1 + self.in_tf32)
        reach = [d * (k - 1) for d, k in zip(self.window.dilation, self.kernel, strict=True)]
        positions = tile.m + reach[0] * line + reach[1]
        spread = -(-8 // planes) % 8 if planes < 5 else 1
        chunks = planes * (positions + (spread - positions) % 8), -(-planes * taps // 2) * 2 * tile.n
        stage, filters = (n * CHUNK_BYTES for n in chunks)
        stages = min(tile.stages, (SHIFT_BYTES - filters) // stage)
        rows = self.images[0] * (images[1] + pad_y) * line
        if stages < MIN_STAGES or rows > MAX_LENGTH:
            return None
        arrays = {"STAGES": (stage, stages), "FILTERS": (1, filters)}
        return ShiftedProduct(
            target,
            (1, rows, *self.lengths[2:]),
            replace(tile, stages=stages),
            self.mn_major,
            box=self.box,
            gathered=self.gathered,
            shared=memory_layout("SHARED", arrays, alignment=1024),
            chunks=chunks,
        )

    def _zeros(self) -> tuple[int, int]:
        """Lines of zeros after an image, and zeros after a line, of the images that are read."""
        w = self.window
        if self.direction == Direction.FORWARD:
            return w.padding
        (ph, pw), (dh, dw), (kh, kw) = w.padding, w.dilation, self.kernel
        return dh * (kh - 1) - ph, dw * (kw - 1) - pw

    def _may_shift(self) -> bool:
        """Whether a tap reads the position at a fixed distance, with zeros between the lines."""
        w, (kh, kw) = self.window, self.kernel
        spans = w.dilation[0] * (kh - 1), w.dilation[1] * (kw - 1)
        return self.direction != Direction.WEIGHT_GRAD and max(w.stride) == 1 and all(map(le, w.padding, spans))

    def fits(self) -> bool:
        """Whether rows are multiples of 16 bytes, lengths fit 32 bits, and tensor maps can describe what TMA copies."""
        aligned = self.images[3] % ROW_MULTIPLE == 0 and self.outputs[3] % ROW_MULTIPLE == 0
        if self.loader is Loader.SHIFT and not self._may_shift():
            return False
        if self.loader is not Loader.TMA:
            elements = max(prod(self.images), prod(self.outputs))
            gathering = self.loader is Loader.GATHER
            most = MAX_GATHERED_TERMS if gathering and self.direction == Direction.WEIGHT_GRAD else 1
            plain = self.terms <= most and not (gathering and self.in_tf32)
            return plain and aligned and elements < MAX_GATHERED and max(self.lengths) <= MAX_LENGTH
        positions = self._gradient_positions if self.direction == Direction.INPUT_GRAD else [self._input_positions]
        corners = [x for each in positions for x in (*each.lower, *each.upper)]
        spans = [d * (k - 1) for d, k in zip(self.window.dilation, self.kernel, strict=True)]
        small = max(self.window.stride) <= MAX_STRIDE and all(-MAX_POSITION <= x < MAX_POSITION for x in corners)
        few = self.terms * len(positions) <= MAX_MAPS and max(spans) <= MAX_OFFSET
        lengths = *self.lengths, prod(self.images[:3])  # the kernel also numbers the pixels of all phases
        return aligned and small and few and max(lengths) <= MAX_LENGTH

    def _maps(self, work: Bfloat16Product) -> list[TensorMap]:
        """The tensor maps of A, then those of B: one for each term. An operand that is gathered has none."""
        (n, h, w, c), (_, oh, ow, o), (kh, kw) = self.images, self.outputs, self.kernel
        x, g, filters = (c, w, h, n), (o, ow, oh, n), (c, kh * kw, o)
        of_a, of_b = work.box_lengths(0), work.box_lengths(1)
        if all(self.gathered):
            return []
        if self.loader is Loader.GATHER:
            wide = self.direction == Direction.FORWARD
            lengths = (c * kh * kw, o, 1) if wide else (o, n * oh * ow, 1)
            box = (*(of_b if wide else of_a), 1)
            return [TensorMap(self.terms + i, lengths, box) for i in range(self.terms)]
        if self.direction == Direction.FORWARD:
            maps = [TensorMap(0, x, of_a, self._input_positions), TensorMap(1, filters, (of_b[0], 1, of_b[1]))]
        elif self.direction == Direction.WEIGHT_GRAD:
            maps = [TensorMap(1, (o, n * oh * ow, 1), (*of_a, 1)), TensorMap(0, x, of_b, self._input_positions)]
        else:
            maps = [
                *(TensorMap(0, g, of_a, each) for each in self._gradient_positions),
                TensorMap(1, filters[::-1], (of_b[0], 1, of_b[1]))
                if self.in_tf32
                else TensorMap(1, filters, (of_b[0], 1, of_a[0])),
            ]
        dtype = FLOAT32 if self.in_tf32 else BITS
        return [replace(x, operand=x.operand * self.terms + i, dtype=dtype) for x in maps for i in range(self.terms)]

    def _box(self, channels: int) -> int:
        """Channels of a box: the choice with the fewest channels of zeros, or the largest one."""
        boxes = [box // (1 + self.in_tf32) for box in BOXES]
        return boxes[0] if self.wide else min(boxes, key=lambda box: -channels % box)

    def _row_cycles(self, box: int, channels: int) -> float:
        """The cycles in which TMA copies a row of a box, on average over the boxes of all channels."""
        bytes_of = FLOAT32.itemsize if self.in_tf32 else BITS.itemsize
        filled = box * bytes_of // BITS.itemsize
        if channels * bytes_of % SECTOR:
            return UNALIGNED_CYCLES[filled]
        partial = channels % box > 0
        return ROW_CYCLES[filled] + PARTIAL_CYCLES * partial / -(-channels // box)

    def _rounded_up(self, channels: int) -> int:
        return channels + -channels % self._box(channels)

    @property
    def _input_positions(self) -> Im2col:
        """The positions of the window in the input."""
        (ph, pw), (dh, dw), (kh, kw) = self.window.padding, self.window.dilation, self.kernel
        return Im2col((-pw, -ph), (pw - (kw - 1) * dw, ph - (kh - 1) * dh), self.window.stride[::-1])

    @property
    def _gradient_positions(self) -> list[Im2col]:
        """For each phase, the positions in the output's gradient."""
        return [self._positions_of(phase) for phase in product(*map(range, self.phases))]

    def _positions_of(self, phase: tuple[int, ...]) -> Im2col:
        """The positions in the output's gradient that one phase reads."""
        lower, upper = [], []
        for axis in (1, 0):
            w, i = self.window, phase[axis]
            last = last_position(i, self.kernel[axis], w.stride[axis], w.padding[axis], w.dilation[axis])
            pixels = -(-(self.images[1 + axis] - i) // w.stride[axis])
            lower.append(last)
            upper.append(last + pixels - self.outputs[1 + axis])
        return Im2col((lower[0], lower[1]), (upper[0], upper[1]))

    def cuda_kernel(self, work: Bfloat16Product) -> CudaKernel:
        """The launches, for tiles and splits."""
        macros = window_macros(self.kernel, *self.window[:3])
        macros |= dict(zip(("PHASES_H", "PHASES_W"), self.phases, strict=True))
        macros["DIRECTION"] = int(self.direction)
        row = self.outputs[3] if self.direction == Direction.FORWARD else self.images[3]
        maps = self._maps(work)
        if self.loader is not Loader.TMA:
            lengths = {"IMAGE": self.images[1:], "OUTPUT": self.outputs[1:]}
            macros |= {f"{of}_{axis}": n for of, each in lengths.items() for axis, n in zip("HWC", each, strict=True)}
            macros |= {"MAPPED": int(bool(maps)), "UNMAPPED": int(not maps)}
        if isinstance(work, ShiftedProduct):
            macros["STAGE_BYTES"] = work.chunks[0] * CHUNK_BYTES
            macros |= {"MANTISSA": mantissa(TF32)} if self.in_tf32 else {}
        name = self.loader.value
        numbers = (*self.images, *self.outputs[1:]) if self.loader is Loader.TMA else self.images[:1]
        return work.kernel(f"conv/{name}.cu", (name, f"sum_{name}_splits"), numbers, row, maps, macros)


def _rule(direction: Direction, shapes: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., Sequence[CudaKernel]]:
    """The rule of a primitive. ``shapes`` returns those of the input, the output and the kernel."""

    def candidates(target: Target, *operands: Any, window: Any, precision: str, **size: Any) -> Sequence[CudaKernel]:
        if target.capability != HOPPER or target.by_member:
            return []
        terms, in_tf32 = len(operands) // 2, precision == TF32
        a, b = operands[0].shape, operands[terms].shape
        if in_tf32 and direction == Direction.INPUT_GRAD:
            b = (b[3], *b[1:3], b[0])
        sizes = images, outputs, _ = shapes(a, b, window, *size.values())
        if 0 in images or 0 in outputs:
            return []
        if window.groups > 1:
            depthwise = DepthwiseConv(direction, *sizes, window, operands[0].dtype)
            return depthwise.kernels(target) if depthwise.fits() else []
        if precision == UNROUNDED:
            return []
        conv = Bfloat16Conv(direction, *sizes, window, terms, in_tf32)
        convs = [conv] if conv.fits() else []
        gathering, shifting = (conv._replace(loader=x) for x in (Loader.GATHER, Loader.SHIFT))
        if gathering.fits() and (not convs or min(conv.images[3], conv.outputs[3]) < BOXES[0]):
            convs.append(gathering)
        if shifting.fits():
            convs.append(shifting)
        wide = conv._replace(wide=True)
        if conv.fits() and wide.box != conv.box:
            convs.append(wide)
        found = [(x, work) for x in convs for work in x.products(target)]
        even = [(x, work) for x, work in found if _fills(work.tile.n, x.lengths[2])]
        return [x.cuda_kernel(work) for x, work in sorted(even, key=lambda pair: pair[1].cycles)]

    return candidates


def _fills(columns: int, result: int) -> bool:
    """Whether tiles of `columns` columns are candidates for a result; see UNEVEN."""
    return columns not in UNEVEN or -result % columns < -result % UNEVEN[columns]


def _forward_shapes(x: Any, w: Any, window: Any) -> tuple[Any, Any, Any]:
    out = (window.output_length(i, x[i + 1], w[i + 1]) for i in (0, 1))
    return x, (x[0], *out, w[0]), w[1:3]


conv2d = _rule(Direction.FORWARD, _forward_shapes)
input_grad = _rule(Direction.INPUT_GRAD, lambda g, w, window, size: ((g[0], *size, w[3] * window.groups), g, w[1:3]))
weight_grad = _rule(Direction.WEIGHT_GRAD, lambda x, g, window, size: (x, g, tuple(size)))
