"""Attention on Hopper by TMA and wgmma, `attention/wgmma_*.cu`: in bfloat16, and the gradient in fp16x2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.kernel import HOPPER, CudaKernel, CudaLaunch, MemoryLayout, Target, lengths, memory_layout
from adtrain.core.precision import FULL
from adtrain.core.types import BITS
from adtrain.lowering.cuda.attention.problem import Candidates, Problem, waves

WIDTHS = (64, 128)
"""Packed widths of a head."""
WARPGROUP, WARPGROUP_ROWS, PACK_THREADS, CHUNK = 128, 64, 256, 8
MAX_PACK_BLOCKS = 1 << 14
MAPS_BYTES = 512
"""Bytes of the tensor maps of a block."""
ALIGNMENT = 1024
"""Bytes that shared memory is aligned to."""


class ForwardTile(NamedTuple):
    """Rows of a tile of queries and of keys; tiles of q, and of k and v, in shared memory; FLOP/s of a block."""

    queries: int
    keys: int
    query_stages: int
    stages: int
    speed: float

    def shared(self, width: int) -> MemoryLayout:
        q, k = (rows * width * 2 for rows in self[:2])
        arrays = {"Q": (q, self.query_stages), "K": (k, self.stages), "V": (k, self.stages)}
        return memory_layout("SHARED", arrays, alignment=ALIGNMENT)

    def scratch(self, width: int, q_rows: int, k_rows: int) -> MemoryLayout:
        """The layout of scratch for these numbers of packed rows of queries and of keys."""
        q, k = rows = lengths(q_rows=q_rows, k_rows=k_rows)
        arrays = {"Q": (1, q * (width * 2)), "K": (1, k * (width * 2)), "V": (1, k * (width * 2))}
        return memory_layout("SCRATCH", arrays, *rows)


class BackwardTile(NamedTuple):
    """Rows of a tile of queries and of keys; tiles of queries and of cotangents in shared memory; terms of operands."""

    queries: int
    keys: int
    stages: int
    terms: int

    @property
    def stats(self) -> int:
        """Numbers about a tile of queries: two of each row, and in fp16x2 two inverse scales, padded to 16 bytes."""
        return 2 * self.queries + (4 if self.terms == 2 else 0)

    def shared(self, width: int) -> MemoryLayout:
        q, k = (rows * width * 2 * self.terms for rows in self[:2])
        arrays = {
            **{"K": (k, 2), "V": (k, 1), "Q": (q, self.stages), "CT": (q, self.stages)},
            "BY_SCORES": (self.queries * self.keys * 2, 2),
            "BY_Q": (self.queries * width * 4, self.terms),
            "STATS": (self.stats * 4, self.stages),
        }
        return memory_layout("SHARED", arrays, alignment=ALIGNMENT)

    def scratch(self, width: int, q_rows: int, k_rows: int, map_blocks: int) -> int:
        """Bytes of scratch for these numbers of packed rows of queries and of keys. `GradientScratch` has the places.

        Args:
            map_blocks: blocks with tensor maps of arrays in memory. If there are any, nothing is packed.
        """
        rows = 2 * (q_rows + k_rows) * width * 2 * self.terms  # of q and its cotangent, k and v
        packed = map_blocks * MAPS_BYTES if map_blocks else rows
        tiles, inverses = q_rows // self.queries, k_rows // GROUP * 2 if self.terms == 2 else 0
        return packed + 4 * (tiles * self.stats + q_rows * width + inverses + tiles)


class ShortTile(NamedTuple):
    """Units of queries and of keys in a buffer of `attention/wgmma_short_forward.cu`."""

    query_units: int
    key_units: int

    @property
    def shared(self) -> MemoryLayout:
        units = self.query_units + 2 * self.key_units
        return memory_layout("SHARED", {"BUFFERS": (units * UNIT_BYTES, 2)}, alignment=ALIGNMENT)


FORWARD_TILES: Mapping[int, tuple[ForwardTile, ...]] = {
    64: (ForwardTile(192, 128, 2, 2, 5.2e12), ForwardTile(128, 128, 2, 3, 4.4e12)),
    128: (ForwardTile(128, 176, 1, 2, 5.2e12), ForwardTile(128, 128, 2, 2, 5.1e12)),
}
"""The candidates by packed width."""
BACKWARD_TILES = {
    (64, 1): BackwardTile(128, 128, 2, 1),
    (128, 1): BackwardTile(64, 128, 2, 1),
    (64, 2): BackwardTile(64, 128, 2, 2),
}
"""The tile of the gradient by packed width and terms of an operand."""
GROUP = 64
"""Rows with one scale in fp16x2."""
UNIT_BYTES, MAX_UNITS = 16 << 10, 7
"""Bytes of a unit, which is 128 rows of 64 columns or 64 rows of 128; the most units in a buffer of
`attention/wgmma_short_forward.cu`."""
MIN_HEAD_GROUP, GROUP_BYTES = 8, 32 << 20
"""Causal tiles of several heads are computed together, so that long and short tiles mix. The minimum number of heads,
and the bytes of the keys and values of more heads, which stay in L2."""
SPEED = {1: 4.2e12, 2: 1.5e12}
"""FLOP/s of a multiprocessor in the gradient, by terms of an operand."""
TILE_START = 0.5
"""The time that a tile of queries or of keys takes besides its steps, in steps."""
BYTES, SHORT_BYTES = {(False, 1): 28, (True, 1): 50, (True, 2): 80}, 19
"""Memory traffic of an element of q, k or v in all launches; in the kernel for short sequences."""
BANDWIDTH, START = 4e12, 4e-6
"""Bytes per second of memory; seconds of a launch."""


def candidates(target: Target, problem: Problem) -> Candidates | None:
    """Kernels for `bfloat16`, and for the gradient in full precision, without mask and dropout, with a positive scale.

    None for other problems.
    """
    suits = problem.dtype == np.float32 and not problem.optional and problem.options[0] > 0
    if target.capability != HOPPER or not suits or problem.lengths.width > WIDTHS[-1]:
        return None
    if problem.gradient:
        tile = BACKWARD_TILES.get((packed_width(problem), terms_of(problem)))
        return None if tile is None else Candidates(_seconds(target, problem, tile), [_backward(target, problem, tile)])
    if problem.precision != "bfloat16":
        return None
    tiles = sorted(FORWARD_TILES[packed_width(problem)], key=lambda tile: _seconds(target, problem, tile))
    kernels = [_forward(target, problem, tile) for tile in tiles]
    short = short_tile(problem)
    if short is None:
        return Candidates(_seconds(target, problem, tiles[0]), kernels)
    seconds = START + _elements(problem) * SHORT_BYTES / BANDWIDTH
    return Candidates(seconds, [_short_forward(target, problem, short), *kernels])


def _elements(problem: Problem) -> float:
    """Elements of a padded array, on average over queries and keys. A partly filled tile counts in full."""
    x, rows = problem.estimated, WARPGROUP_ROWS
    queries, keys = (-(-length // rows) * rows for length in (x.queries, x.keys))
    return x.batch * (queries + keys) / 2 * packed_width(problem)


def _seconds(target: Target, problem: Problem, tile: ForwardTile | BackwardTile) -> float:
    """The estimated time of packing and of the products."""
    x, gradient, (queries, keys) = problem.estimated, problem.gradient, packed_rows(problem, tile)
    query_tiles, key_tiles = -(-queries // tile.queries), -(-keys // tile.keys)
    if gradient:
        own, others, tiles, most = tile.keys, tile.queries, key_tiles, query_tiles
    else:
        own, others, tiles, most = tile.queries, tile.keys, query_tiles, key_tiles
    # The steps of each tile of a head: the tiles of keys that queries attend to, or of queries that attend to keys.
    steps = [min(most, -(-(i + 1) * own // others)) if problem.causal else most for i in range(tiles)]
    waves_of_tiles = waves(x.batch * tiles, 1, target)
    steps_of_block = max(max(steps), waves_of_tiles * sum(steps) / tiles) + waves_of_tiles * TILE_START
    products, speed = (10, SPEED[terms_of(problem)]) if isinstance(tile, BackwardTile) else (4, tile.speed)
    flops = steps_of_block * products * own * others * packed_width(problem)
    return 2 * START + flops / speed + _elements(problem) * BYTES[gradient, terms_of(problem)] / BANDWIDTH


def terms_of(problem: Problem) -> int:
    """The 16-bit numbers that an operand is the sum of: one bfloat16, or in full precision two float16. 0 in tf32."""
    return {"bfloat16": 1, FULL: 2}.get(problem.precision, 0)


def packed_width(problem: Problem) -> int:
    return next(width for width in WIDTHS if width >= problem.lengths.width)


def is_direct(problem: Problem) -> bool:
    """Whether TMA reads the arrays as they are in memory. A box of it has 64 columns of a head."""
    return problem.stored and problem.lengths.width in WIDTHS


def packed_rows(problem: Problem, tile: ForwardTile | BackwardTile) -> tuple[int, int]:
    """Rows of packed queries and of packed keys."""
    x = problem.lengths
    return -(-x.queries // tile.queries) * tile.queries, -(-x.keys // tile.keys) * tile.keys


def _launch(
    problem: Problem,
    file: str,
    name: str,
    numbers: tuple[int | float, ...],
    definitions: Mapping[str, int],
    **more: Any,
) -> CudaLaunch:
    """A launch with ``numbers`` after batch, heads, queries and keys."""
    x, own = problem.lengths, {"CAUSAL": int(problem.causal), "OPERAND_TERMS": terms_of(problem)}
    own["DIRECT"] = int(is_direct(problem))
    widths = {"HEAD_WIDTH": x.width, "PACKED_WIDTH": packed_width(problem)}
    return CudaLaunch(
        f"attention/{file}",
        name,
        (x.batch, x.heads, x.queries, x.keys, *numbers),
        (problem.dtype, BITS if problem.stored else problem.dtype),
        definitions={**widths, **own, **definitions},
        **more,
    )


def _blocks(tile: ForwardTile | BackwardTile) -> dict[str, int]:
    return {"BLOCK_Q": tile.queries, "BLOCK_K": tile.keys}


def _loads(problem: Problem) -> dict[str, int]:
    return {"LOAD_WIDTH": math.gcd(8 if problem.stored else 4, problem.lengths.width)}


def _pack_blocks(chunks: int, arrays: int = 1) -> dict[str, Any]:
    """The grid of a thread for each chunk, up to a limit, for each of ``arrays``."""
    return {"blocks": (min(-(-chunks // PACK_THREADS), MAX_PACK_BLOCKS), arrays), "threads": PACK_THREADS}


def _forward(target: Target, problem: Problem, tile: ForwardTile) -> CudaKernel:
    """Two launches: pack, multiply. Only the second one if nothing is packed."""
    x, width, (queries, keys) = problem.lengths, packed_width(problem), packed_rows(problem, tile)
    direct, blocks = is_direct(problem), min(x.batch * queries // tile.queries, target.multiprocessors)
    maps = memory_layout("SCRATCH", {"MAPS": (MAPS_BYTES, blocks)})
    scratch = maps if direct else tile.scratch(width, x.batch * queries, x.batch * keys)
    pack = _launch(
        problem,
        "wgmma_pack.cu",
        "attention_pack",
        (x.row, problem.step),
        {**_blocks(tile), **_loads(problem)},
        operands=problem.inputs,
        layouts=(scratch,),
        **_pack_blocks(x.batch * max(queries, keys) * width // CHUNK, 3),
    )
    shared = tile.shared(width)
    head_bytes = 2 * x.keys * width * 2
    group = {"HEAD_GROUP": min(x.batch, max(MIN_HEAD_GROUP, GROUP_BYTES // head_bytes)) if problem.causal else 1}
    forward = _launch(
        problem,
        "wgmma_forward.cu",
        "attention_wgmma",
        (*((x.row, problem.step) if direct else ()), x.out_row, problem.options[0]),
        {**_blocks(tile), **group, "QUERY_STAGES": tile.query_stages, "KEY_STAGES": tile.stages},
        operands=(*(problem.inputs if direct else ()), *problem.results),
        blocks=blocks,
        threads=(tile.queries // WARPGROUP_ROWS + 1) * WARPGROUP,
        shared=shared,
        layouts=(scratch,),
    )
    return CudaKernel((forward,) if direct else (pack, forward), scratch)


def short_tile(problem: Problem) -> ShortTile | None:
    """A buffer for all keys, and for as many queries as fit; None if the keys do not fit."""
    x, rows = problem.lengths, UNIT_BYTES // (2 * packed_width(problem))
    key_units = -(-x.keys // rows)
    room = MAX_UNITS - 2 * key_units
    return ShortTile(min(-(-x.queries // rows), room), key_units) if room > 0 else None


def _short_forward(target: Target, problem: Problem, tile: ShortTile) -> CudaKernel:
    """One launch."""
    x, rows = problem.lengths, tile.query_units * UNIT_BYTES // (2 * packed_width(problem))
    units = {"QUERY_UNITS": tile.query_units, "KEY_UNITS": tile.key_units}
    launch = _launch(
        problem,
        "wgmma_short_forward.cu",
        "attention_wgmma_short",
        (x.row, x.out_row, problem.step, problem.options[0]),
        {**_loads(problem), **units},
        operands=(*problem.inputs, *problem.results),
        blocks=min(x.batch * -(-x.queries // rows), target.multiprocessors),
        threads=4 * WARPGROUP,
        shared=tile.shared,
    )
    return CudaKernel((launch,))


def _backward(target: Target, problem: Problem, tile: BackwardTile) -> CudaKernel:
    """Two launches: pack, multiply. If nothing is packed, the first one computes statistics of the queries only."""
    x, width, (queries, keys) = problem.lengths, packed_width(problem), packed_rows(problem, tile)
    direct, key_tiles = is_direct(problem), keys // tile.keys
    blocks = min(x.batch * key_tiles, target.multiprocessors)
    definitions, rows = {**_blocks(tile), **_loads(problem), "MAP_BLOCKS": direct * blocks}, x.batch * queries
    longest, fp16x2 = x.batch * max(queries, keys), tile.terms == 2
    scratch = tile.scratch(width, x.batch * queries, x.batch * keys, direct * blocks)
    of_groups = {"blocks": (longest // GROUP, 4), "threads": PACK_THREADS}
    pack = _launch(
        problem,
        "wgmma_pack.cu",
        "attention_pack_grad_fp16x2" if fp16x2 else "attention_pack_grad",
        (x.row, x.out_row, problem.step),
        definitions,
        operands=(*problem.inputs, *problem.kept),
        **(of_groups if fp16x2 else _pack_blocks(longest * width // CHUNK, 4)),
    )
    statistics = _launch(
        problem,
        "wgmma_pack.cu",
        "attention_statistics",
        (x.out_row,),
        definitions,
        operands=problem.kept,
        **_pack_blocks(rows * width // CHUNK),
    )
    shared = tile.shared(width)
    of_maps = (*problem.inputs, problem.kept[2]) if direct else ()
    backward = _launch(
        problem,
        "wgmma_backward.cu",
        "attention_wgmma_grad",
        (x.row, *((x.out_row,) if direct else ()), problem.step, problem.options[0]),
        {
            **_blocks(tile),
            "SHARED_BYTES": int(shared),
            "MAP_BLOCKS": direct * blocks,
            "QUERY_STAGES": tile.stages,
            "ROTATED": int(not problem.causal and key_tiles <= target.multiprocessors),
        },
        operands=(*of_maps, *problem.results),
        blocks=blocks,
        threads=3 * WARPGROUP,
        shared=shared,
        cooperative=True,
    )
    return CudaKernel((statistics if direct else pack, backward), scratch)
