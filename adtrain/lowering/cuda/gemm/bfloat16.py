"""Products of operands that are bfloat16 in memory, on Hopper (`gemm/bfloat16_product.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.kernel import HOPPER, CudaKernel, CudaLaunch, MemoryLayout, Target, TensorMap, memory_layout
from adtrain.lowering.cuda.gemm.narrow import narrow_products
from adtrain.lowering.cuda.gemm.tiles import MAX_LENGTH
from adtrain.lowering.shapes import product_lengths

ROW_MULTIPLE = 8
"""The length of a row is a multiple of this number of elements: TMA needs multiples of 16 bytes."""
TILE_K, ROW_BYTES, WARPGROUP, CONSUMER_ROWS, MAX_CONSUMERS = 64, 128, 128, 64, 2
"""K of a pipeline stage in bfloat16; bytes of this K; threads of a warpgroup; rows of a tile that a consumer warpgroup
multiplies at a time; most consumer warpgroups of a block."""
SUM_THREADS, SUM_COLUMNS = 256, 4
"""Threads of a block of the second launch; columns of a thread."""
BOXES = 64, 32
"""Elements of bfloat16 in a row of a box: 128 or 64 bytes, the lengths of a swizzle."""
SPLITS, MIN_SPLIT_TILES = range(1, 65), 4
"""Numbers of splits of K that are considered; minimum of tiles of K in a split."""
GATHER_SPLITS = *SPLITS, 128
"""Numbers of splits where an operand is gathered: few channels make few tiles."""
START, STORED, SECOND_PASS, BYTES_PER_CYCLE = 5000, 24, 2500, 2000
"""Cycles of a launch; elements of a result that the epilogue of a multiprocessor stores in a cycle; cycles of the
launch that adds splits; bytes that this launch reads in a cycle."""
EPILOGUE, MOVED, PINGPONG_MOVED = 2000, 13, 2.5
"""Cycles of an epilogue, whatever it moves; bytes that the epilogue of a multiprocessor reads after the product and
writes in a cycle; bytes that the epilogue of a warpgroup reads and writes in a cycle while another one multiplies,
which takes almost all of the bandwidth of shared memory. Fitted to the products of GPT-2 at a clock of 1.94 GHz."""
PRODUCTS = {1: 1, 2: 3, 3: 6}
"""Products of terms that are computed, by the terms of an operand."""
SPEEDUP = {1: 1.0, 2: 1.15, 3: 1.25}
"""Multiply-adds of a multiprocessor in a cycle over those for one term, by the terms of an operand: a stage has more
products for each copy."""
TF32_SPEED = 0.56
"""Multiply-adds of a multiprocessor in a cycle for operands in tf32, over those for bfloat16."""
PROMOTED_TERMS, PROMOTED_COLUMNS, TERMS_SIZE = 3, 128, 128 * 128
"""Terms for which a thread has three sets of accumulators; maximum columns of a tile for these; maximum elements of a
tile for several terms. For larger tiles registers do not suffice, or only two stages fit, which is slower."""
STAGES_BYTES = 192 << 10
"""Shared memory of a block for the stages; the rest is for the epilogue."""
EARLY_REGISTERS, ROUND_COLUMNS, ROUND_WAIT = 160, 32, 4000
"""EARLY_REGISTERS of `gemm/bfloat16_product.cuh`; columns of a round of an epilogue; cycles in which a round waits for
its auxiliary inputs, if these are not loaded before the product."""
FLOAT32_ACCUMULATORS = 64
"""Maximum accumulators of a thread whose epilogue reads float32 arrays and adds columns."""
PREFETCHED_BYTES = 24 << 20
"""Most bytes that the epilogues of all blocks prefetch to L2 before a product. More would be replaced before use."""
FIND_ROWS = 1400
"""Cycles in which the producer warps find the rows of a tile in the images, if channels are along K; fitted."""
FLOAT32 = np.dtype("float32")


@dataclass(frozen=True)
class Bfloat16Tile:
    """Macros of `gemm/bfloat16_product.cuh`.

    Args:
        m, n: rows and columns of a tile (TILE_M, TILE_N).
        stages: pipeline stages.
        macs: multiply-adds of a multiprocessor in a cycle.
        pingpong: whether two consumer warpgroups take tiles in turns (PINGPONG), so that one stores while the other one
            multiplies.
        terms: arrays whose sum is an operand (TERMS).
        in_tf32: whether operands are float32 and rounded to tf32 (IN_TF32). Then K and the boxes are half as long.
    """

    m: int
    n: int
    stages: int
    macs: int
    pingpong: bool = False
    terms: int = 1
    in_tf32: bool = False

    @property
    def k(self) -> int:
        """K of a pipeline stage (TILE_K)."""
        return TILE_K // (1 + self.in_tf32)

    @property
    def threads(self) -> int:
        """Threads of a block: a warpgroup whose threads load, and the consumer warpgroups."""
        return WARPGROUP * (1 + (2 if self.pingpong else self.m // CONSUMER_ROWS // self.parts))

    @property
    def parts(self) -> int:
        """The number of times that a consumer warpgroup has CONSUMER_ROWS rows of a tile (PARTS_M)."""
        return max(1, self.m // CONSUMER_ROWS // (1 if self.pingpong else MAX_CONSUMERS))

    @property
    def shared(self) -> MemoryLayout:
        return memory_layout("SHARED", {"STAGES": (self._stage_bytes, self.stages)}, alignment=1024)

    @property
    def _stage_bytes(self) -> int:
        return self.terms * (self.m + self.n) * ROW_BYTES

    def registers(self, loaded: int) -> float:
        """Registers of a thread for accumulators and for all auxiliary inputs, `loaded` bytes for an element."""
        return self.parts * (self.n / 2 + self.n // ROUND_COLUMNS * loaded * ROUND_COLUMNS / 8)

    def of_terms(self, terms: int) -> Bfloat16Tile | None:
        """The tile for operands of several terms; None if it is too wide, or registers do not suffice."""
        too_large = self.m * self.n > TERMS_SIZE or (terms == PROMOTED_TERMS and self.n > PROMOTED_COLUMNS)
        if too_large or (terms == PROMOTED_TERMS and self.pingpong):
            return None
        tile = replace(self, terms=terms, macs=int(self.macs * SPEEDUP[terms]))
        return replace(tile, stages=min(self.stages, STAGES_BYTES // tile._stage_bytes))


MATRIX_TILES = (
    Bfloat16Tile(128, 256, 4, 1590),
    Bfloat16Tile(128, 192, 5, 1600),
    Bfloat16Tile(128, 128, 6, 1500),
    Bfloat16Tile(128, 128, 6, 1500, pingpong=True),
    Bfloat16Tile(64, 128, 8, 1150),
    Bfloat16Tile(128, 64, 8, 1000),
    Bfloat16Tile(128, 64, 8, 1000, pingpong=True),
)
"""The tiles for products of matrices."""
TILES = (
    replace(MATRIX_TILES[0], macs=1600),
    *MATRIX_TILES[1:],
    Bfloat16Tile(256, 160, 3, 1600),
    Bfloat16Tile(256, 128, 4, 1600),
    Bfloat16Tile(256, 96, 4, 1450),
    Bfloat16Tile(64, 192, 6, 1250),
)
"""The tiles for convolutions. The widest ones are a little faster."""
GATHER_TILES = (
    Bfloat16Tile(128, 256, 4, 1600),
    Bfloat16Tile(64, 256, 4, 1300),
    Bfloat16Tile(128, 128, 4, 1500),
    Bfloat16Tile(128, 128, 4, 1500, pingpong=True),
    Bfloat16Tile(64, 128, 5, 1150),
    Bfloat16Tile(128, 64, 4, 1000),
    Bfloat16Tile(128, 64, 4, 1000, pingpong=True),
    Bfloat16Tile(64, 64, 6, 600),
    Bfloat16Tile(128, 32, 5, 600),
    Bfloat16Tile(128, 32, 5, 600, pingpong=True),
)
"""The tiles where an operand is gathered. They have few stages, which leaves memory for L1."""
TILES_OF_TERMS = {1: TILES, **{n: tuple(x for tile in TILES if (x := tile.of_terms(n))) for n in (2, 3)}}
"""The tiles, by the terms of an operand."""
GATHER_TILES_OF_TERMS = {
    1: GATHER_TILES,
    2: tuple(replace(x, stages=max(2, x.stages // 2)) for tile in GATHER_TILES if (x := tile.of_terms(2))),
}
"""The same where an operand is gathered. Stages of two terms are twice as large."""


def in_tf32(tile: Bfloat16Tile) -> Bfloat16Tile:
    """The same tile for operands in tf32."""
    return replace(tile, in_tf32=True, macs=int(tile.macs * TF32_SPEED))


TF32_TILES = tuple(map(in_tf32, (*TILES, Bfloat16Tile(256, 64, 4, 1200))))
"""The tiles for operands in tf32."""


class EpilogueBytes(NamedTuple):
    """Bytes that an epilogue moves for an element of the product.

    Attributes:
        loaded: from memory to registers, also of what all rows share, such as a bias.
        read, written: of arrays that have the product's shape.
    """

    loaded: int
    read: int
    written: int


@dataclass(frozen=True)
class Bfloat16Product:
    """The work of a kernel with the main loop of `gemm/bfloat16_product.cuh`.

    Attributes:
        lengths: batch, M, N and K.
        mn_major: of A and B, whether it is not K-major.
        splits: of K, for the tiles of the last wave if they do not fill all multiprocessors.
        box: elements of a row of a box of A and of B: one of BOXES.
        row_cycles: of A and B, the cycles in which a row of a box is copied; 0 if the products always take longer.
        gathered: of A and B, whether the producer warps gather it (GATHER_A, GATHER_B).
        others: M and N of further products of the same K in the same launch. The batch is 1.
        epilogue: what the epilogue moves; None if it is not known.
        shared: shared memory of a block; None: stages with TILE_K of both operands.
    """

    target: Target
    lengths: tuple[int, int, int, int]
    tile: Bfloat16Tile
    mn_major: tuple[bool, bool]
    splits: int = 1
    box: tuple[int, int] = (BOXES[0], BOXES[0])
    row_cycles: tuple[float, float] = (0.0, 0.0)
    gathered: tuple[bool, bool] = (False, False)
    others: tuple[tuple[int, int], ...] = ()
    epilogue: EpilogueBytes | None = None
    shared: MemoryLayout | None = None

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """M and N of each product."""
        return self.lengths[1:3], *self.others

    @property
    def _tiles(self) -> int:
        """Tiles of the results."""
        tiles = (-(-m // self.tile.m) * -(-n // self.tile.n) for m, n in self.shapes)
        return self.lengths[0] * sum(tiles)

    @property
    def _split_tiles(self) -> int:
        """Tiles that are split."""
        return self._tiles % self.target.multiprocessors if self.splits > 1 else 0

    @property
    def prefetches(self) -> bool:
        """Whether what epilogues read is prefetched to L2 before a product (PREFETCHES)."""
        read = 0 if self.epilogue is None else self.epilogue.read
        return read * self.tile.m * self.tile.n * self.target.multiprocessors <= PREFETCHED_BYTES

    def has_whole_boxes(self) -> bool:
        """Whether boxes fill the columns of a tile, where these are the columns of a box."""
        return not self.mn_major[1] or self.tile.n % self.box[1] == 0

    def possible_splits(self, splits: Sequence[int]) -> Iterator[int]:
        """Those of ``splits`` that run at once, each with MIN_SPLIT_TILES tiles of K; and 1."""
        most = self.lengths[3] // (MIN_SPLIT_TILES * self.tile.k)
        tiles = self._tiles % self.target.multiprocessors
        return (x for x in splits if x == 1 or (x <= most and 0 < x * tiles <= self.target.multiprocessors))

    @property
    def cycles(self) -> float:
        """An estimate of the time."""
        k_tiles = -(-self.lengths[3] // self.tile.k)
        size = self.tile.m * self.tile.n
        boxes = zip((self.tile.m, self.tile.n), self.box, self.row_cycles, strict=True)
        copies = self.tile.terms * sum(length * self.tile.k / box * cycles for length, box, cycles in boxes)
        stage = max(PRODUCTS[self.tile.terms] * self.tile.k * size / self.tile.macs, copies)
        stores, turn = self._epilogue_cycles
        waves = -(-(self._tiles - self._split_tiles) // self.target.multiprocessors)
        rows = FIND_ROWS if self.gathered[0] and not self.mn_major[0] else 0
        product = k_tiles * stage + rows
        if self.tile.pingpong:
            cycles = START + waves * max(product, (product + turn) / 2) + min(waves, 1) * stores
        else:
            cycles = START + waves * (product + stores)
        if self.splits == 1:
            return cycles
        traffic = (2 * self.splits + 1) * self._split_tiles * size * 4
        split = -(-k_tiles // self.splits) * stage + rows + stores
        return cycles + split + SECOND_PASS + traffic / BYTES_PER_CYCLE

    @property
    def _epilogue_cycles(self) -> tuple[float, float]:
        """The cycles of the epilogue of a tile after the product, and while another warpgroup multiplies."""
        size = self.tile.m * self.tile.n
        if self.epilogue is None:
            return size / STORED, 0
        loaded, read, written = self.epilogue
        late = 0 if self.tile.registers(loaded) <= EARLY_REGISTERS else read
        return EPILOGUE + size * (late + written) / MOVED, size * (read + written) / PINGPONG_MOVED

    def kernel(
        self,
        file: str,
        names: tuple[str, str],
        numbers: Sequence[int],
        row_length: int,
        maps: Sequence[TensorMap],
        definitions: Mapping[str, int] | None = None,
    ) -> CudaKernel:
        """The launches: one multiplies, and with split-K another one adds.

        Args:
            names: of the kernels.
            numbers: their arguments, before the number of tiles that are not split.
            row_length: the length of a row of results in memory.
            definitions: macros of the file.
        """
        whole, split = self._tiles - self._split_tiles, self._split_tiles
        size = self.tile.m * self.tile.n
        scratch = memory_layout("SCRATCH", {"PARTIAL_SUMS": (4, split * self.splits * size)})

        def launch(name: str, blocks: int, threads: int, shared: int, *others: MemoryLayout) -> CudaLaunch:
            return CudaLaunch(
                file,
                name,
                (*numbers, whole),
                (FLOAT32,),
                blocks=blocks,
                threads=threads,
                shared=shared,
                definitions={
                    "TILE_M": self.tile.m,
                    "TILE_N": self.tile.n,
                    "TILE_STAGES": self.tile.stages,
                    "SPLITS": self.splits,
                    "PREFETCHES": int(self.prefetches),
                    "TILE_K": self.tile.k,
                    "BLOCK_THREADS": self.tile.threads,
                    "PINGPONG": int(self.tile.pingpong),
                    "IN_TF32": int(self.tile.in_tf32),
                    "TERMS": self.tile.terms,
                    "SUM_THREADS": SUM_THREADS,
                    "SUM_COLUMNS": SUM_COLUMNS,
                    "MN_MAJOR_A": int(self.mn_major[0]),
                    "MN_MAJOR_B": int(self.mn_major[1]),
                    "BOX_A": self.box[0],
                    "BOX_B": self.box[1],
                    "GATHER_A": int(self.gathered[0]),
                    "GATHER_B": int(self.gathered[1]),
                    "WIDE_C": math.gcd(8, row_length),
                    **(definitions or {}),
                },
                layouts=others,
                maps=tuple(maps),
            )

        blocks = min(whole + split * self.splits, self.target.multiprocessors)
        shared = self.tile.shared if self.shared is None else self.shared
        launches = [launch(names[0], blocks, self.tile.threads, shared)]
        if split:
            blocks = split * size // (SUM_THREADS * SUM_COLUMNS)
            launches.append(launch(names[1], blocks, SUM_THREADS, 0, shared))
        return CudaKernel(tuple(launches), scratch, self.cycles)

    def box_lengths(self, operand: int) -> tuple[int, int]:
        """The lengths of a box of A (0) or B (1), innermost first."""
        rows = (self.tile.m, self.tile.n)[operand]
        return self.box[operand], self.tile.k if self.mn_major[operand] else rows


@cache
def fastest_splits(
    product: Bfloat16Product, tiles: tuple[Bfloat16Tile, ...] | None = None
) -> Sequence[Bfloat16Product]:
    """The product by each tile, with the splits that take the fewest cycles; the fastest first.

    Args:
        tiles: None: those of convolutions, for the product's terms.
    """
    found = []
    if tiles is None:
        tiles = TF32_TILES if product.tile.in_tf32 else TILES_OF_TERMS[product.tile.terms]
        tiles = GATHER_TILES_OF_TERMS[product.tile.terms] if any(product.gathered) else tiles
    for each in (replace(product, tile=tile) for tile in tiles):
        if not each.has_whole_boxes():
            continue
        splits = each.possible_splits(GATHER_SPLITS if any(each.gathered) else SPLITS)
        found.append(min((replace(each, splits=x) for x in splits), key=lambda x: x.cycles))
    return tuple(sorted(found, key=lambda x: x.cycles))


def with_column_sums(kernel: CudaKernel, columns: int, sums: int, read: int) -> CudaKernel | None:
    """The kernel with an epilogue that adds columns of the result; None if it splits K, has fewer blocks than columns
    of tiles, or reads float32 arrays for so many results that registers do not suffice.

    All tiles of a block are in one column of tiles. The sums are an array in scratch memory: (blocks of a column of
    tiles, sums, columns).

    Args:
        kernel: has no such epilogue.
        columns: columns of the result.
        sums: the number of sums.
        read: bytes of auxiliary inputs that the epilogue reads for an element.
    """
    launch, *others = kernel.launches
    if others or "SPLITS" not in launch.definitions or not isinstance(launch.blocks, int):
        return None
    tile = _tile_of(launch)
    if tile.in_tf32 and read and tile.registers(0) > FLOAT32_ACCUMULATORS:
        return None
    across = -(-columns // tile.n)
    down = launch.blocks // across
    scratch = memory_layout("SCRATCH", {"SUMS": (FLOAT32.itemsize, down * sums * columns)})
    if not down:
        return None
    launch = replace(launch, blocks=down * across)
    return replace(kernel, launches=(launch,), scratch=scratch, cycles=_cycles_with_inputs(kernel, read))


def _tile_of(launch: CudaLaunch) -> Bfloat16Tile:
    """The tile of a launch."""
    m, n, stages, pingpong, in_tf32 = (
        launch.definitions[name] for name in ("TILE_M", "TILE_N", "TILE_STAGES", "PINGPONG", "IN_TF32")
    )
    return Bfloat16Tile(m, n, stages, 0, bool(pingpong), in_tf32=bool(in_tf32))


def _cycles_with_inputs(kernel: CudaKernel, read: int) -> float:
    """The estimated time of a kernel whose epilogue reads `read` bytes for an element.

    The inputs are loaded before the product if registers allow (EARLY in `gemm/bfloat16_product.cuh`).
    """
    (launch,) = kernel.launches
    assert kernel.cycles is not None
    assert isinstance(launch.blocks, int)
    if not read:
        return kernel.cycles
    tile = _tile_of(launch)
    late = tile.registers(read) > EARLY_REGISTERS
    waits = tile.parts * (tile.n // ROUND_COLUMNS) * ROUND_WAIT if late else 0
    waves, stores = -(-int(launch.numbers[-1]) // launch.blocks), tile.m * tile.n / STORED
    if not tile.pingpong:
        return kernel.cycles + waves * waits
    products = (kernel.cycles - START - stores) / waves
    return START + waves * max(products, (products + stores + waits) / 2) + stores + waits


def bfloat16_gemm(product: Bfloat16Product) -> CudaKernel:
    """Products by `gemm/bfloat16_gemm.cu`. The operands are A and B of the first one, then of the next one."""
    (batch, _, _, k), shapes = product.lengths, product.shapes
    maps = []
    for i, lengths in enumerate(shapes):
        for operand, (length, is_mn_major) in enumerate(zip(lengths, product.mn_major, strict=True)):
            shape = (length, k) if is_mn_major else (k, length)
            maps.append(TensorMap(2 * i + operand, (*shape, batch), (*product.box_lengths(operand), 1)))
    names, macros = ("bfloat16_gemm", "sum_bfloat16_splits"), {}
    numbers: tuple[int, ...] = product.lengths
    if product.others:
        names = "bfloat16_products", "sum_bfloat16_products"
        numbers, macros = (k, *(length for shape in shapes for length in shape)), {"PRODUCTS": len(shapes)}
    row_length = math.gcd(*(n for _, n in shapes))
    return product.kernel("gemm/bfloat16_gemm.cu", names, numbers, row_length, maps, macros)


def product_kernels(product: Bfloat16Product) -> Sequence[CudaKernel]:
    """The kernels of products of matrices, the fastest by estimate first. Tiles are too wide for products of few
    columns."""
    narrow = None
    if product.lengths[0] == 1:
        narrow = narrow_products(product.target, product.shapes, product.lengths[3], product.mn_major)
    tiled = [bfloat16_gemm(x) for x in fastest_splits(product, MATRIX_TILES)]
    return tiled if narrow is None else [narrow, *tiled]


def candidates(
    target: Target,
    a: Any,
    b: Any,
    transpose_a: bool,
    transpose_b: bool,
    precision: str,
    epilogue: EpilogueBytes | None = None,
) -> Sequence[CudaKernel]:
    """The rule of `matmul_bfloat16`, the fastest by estimate first; none except on Hopper and for aligned rows.

    Args:
        epilogue: see `Bfloat16Product`.
    """
    if target.capability != HOPPER or target.by_member or a.shape[-1] % ROW_MULTIPLE or b.shape[-1] % ROW_MULTIPLE:
        return []
    lengths, mn_major = product_lengths(a, b, transpose_a, transpose_b), (transpose_a, not transpose_b)
    if 0 in lengths or max(lengths[1:]) > MAX_LENGTH:
        return []
    product = Bfloat16Product(target, lengths, TILES[0], mn_major, epilogue=epilogue)
    return product_kernels(product)
