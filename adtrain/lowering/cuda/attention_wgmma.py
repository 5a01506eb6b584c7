"""Attention in bfloat16 on Hopper: operands packed for bulk copies and WGMMA (`attention/wgmma_attention.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.target import Target
from adtrain.lowering.shapes import AttentionLengths, attention_lengths, optional_arguments

CAPABILITY = (9, 0)
"""The compute capability that has WGMMA."""
FLOAT32 = np.dtype("float32")
WIDTHS = (64, 128)
"""Packed widths of a head."""
WARPGROUP, PACK_THREADS, CHUNK = 128, 256, 8
MAX_PACK_BLOCKS = 1 << 14
UNIT_BYTES = 16 << 10
MAX_UNITS = 7
"""Units of a buffer of `attention/wgmma_short_forward.cu`."""


class ForwardTile(NamedTuple):
    """Rows of a tile of queries and of keys, and tiles of k and of v in shared memory."""

    queries: int
    keys: int
    stages: int

    def shared(self, width: int) -> int:
        """Bytes of shared memory, with those for its alignment to 1024."""
        return (self.queries + 2 * self.stages * self.keys) * width * 2 + 1024


FORWARD_TILES: Mapping[int, tuple[ForwardTile, ...]] = {
    64: (ForwardTile(192, 128, 2), ForwardTile(128, 128, 3), ForwardTile(128, 176, 2)),
    128: (ForwardTile(128, 176, 2), ForwardTile(128, 128, 2)),
}
"""By packed width."""


class ShortTile(NamedTuple):
    """Units of queries and of keys in a buffer of `attention/wgmma_short_forward.cu`: 128 rows of 64 columns, or 64 of
    128."""

    query_units: int
    key_units: int

    queries = 64
    keys = 64

    @property
    def shared(self) -> int:
        """Bytes of shared memory, with those for its alignment to 1024."""
        return 2 * (self.query_units + 2 * self.key_units) * UNIT_BYTES + 1024


class BackwardTile(NamedTuple):
    """Rows of a tile of queries, and tiles of queries and of cotangents in shared memory. A tile has 128 keys."""

    queries: int
    stages: int
    keys: int = 128

    def shared(self, width: int) -> int:
        """Bytes of shared memory, with those for its alignment to 1024."""
        tiles = (2 * self.keys + 2 * self.stages * self.queries) * width * 2
        scores = 2 * self.queries * self.keys * 2
        return tiles + scores + self.queries * width * 4 + 2 * self.stages * self.queries * 4 + 1024


BACKWARD_TILES: Mapping[int, tuple[BackwardTile, ...]] = {64: (BackwardTile(128, 2),), 128: (BackwardTile(64, 2),)}
"""By packed width."""


class WgmmaAttention(NamedTuple):
    """An attention that these kernels compute. ``separate``: q, k and v are three arrays."""

    lengths: AttentionLengths
    causal: bool
    scale: float
    separate: bool
    target: Target

    @property
    def width(self) -> int:
        """The packed width of a head."""
        return next(width for width in WIDTHS if width >= self.lengths.width)

    @property
    def step(self) -> int:
        """Elements from q to k and from k to v in one array."""
        return 0 if self.separate else self.lengths.out_row

    def packed_rows(self, tile: ForwardTile | BackwardTile) -> tuple[int, int]:
        """Rows of packed queries and of packed keys."""
        x = self.lengths
        return -(-x.queries // tile.queries) * tile.queries, -(-x.keys // tile.keys) * tile.keys

    def launch(
        self,
        tile: ForwardTile | BackwardTile | ShortTile,
        file: str,
        name: str,
        numbers: tuple[int | float, ...],
        operands: tuple[int, ...],
        **more: Any,
    ) -> CudaLaunch:
        """A launch with ``numbers`` after batch, heads, queries and keys; ``more``: definitions in capitals, fields."""
        x = self.lengths
        definitions = {
            "HEAD_WIDTH": x.width,
            "PACKED_WIDTH": self.width,
            "CAUSAL": int(self.causal),
            "BLOCK_Q": tile.queries,
            "BLOCK_K": tile.keys,
            **{key: value for key, value in more.items() if key.isupper()},
        }
        return CudaLaunch(
            f"attention/{file}",
            name,
            (x.batch, x.heads, x.queries, x.keys, *numbers),
            (FLOAT32,),
            definitions=definitions,
            operands=operands,
            **{key: value for key, value in more.items() if not key.isupper()},
        )

    def pack_options(self, tile: ForwardTile | BackwardTile, arrays: int) -> dict[str, Any]:
        """A thread for each 16 packed bytes, up to a limit."""
        chunks = self.lengths.batch * max(self.packed_rows(tile)) * self.width // CHUNK
        blocks = min(-(-chunks // PACK_THREADS), MAX_PACK_BLOCKS), arrays
        return {"blocks": blocks, "threads": PACK_THREADS, "LOAD_WIDTH": math.gcd(4, self.lengths.width)}

    def forward(self, arrays: int, tile: ForwardTile) -> CudaKernel:
        """Two launches: pack, multiply."""
        x, (queries, keys), shared = self.lengths, self.packed_rows(tile), tile.shared(self.width)
        pack = self.launch(
            tile,
            "wgmma_pack.cu",
            "attention_pack",
            (x.row, self.step),
            three(range(arrays)),
            **self.pack_options(tile, 3),
        )
        forward = self.launch(
            tile,
            "wgmma_forward.cu",
            "attention_wgmma",
            (x.out_row, self.scale),
            (arrays, arrays + 1),
            blocks=min(x.batch * (queries // tile.queries), self.target.multiprocessors),
            threads=(tile.queries // 64 + 1) * WARPGROUP,
            shared=shared,
            KEY_STAGES=tile.stages,
            HEAD_GROUP=8 if self.causal else 1,
            SHARED_BYTES=shared,
        )
        return CudaKernel((pack, forward), x.batch * (queries + 2 * keys) * self.width * 2)

    @property
    def short_tile(self) -> ShortTile | None:
        """A buffer for all keys, and all queries if they fit. None: the keys do not fit."""
        x, rows = self.lengths, UNIT_BYTES // (2 * self.width)
        key_units = -(-x.keys // rows)
        room = MAX_UNITS - 2 * key_units
        return ShortTile(min(-(-x.queries // rows), room), key_units) if room > 0 else None

    def short_forward(self, arrays: int, tile: ShortTile) -> CudaKernel:
        """One launch, for keys that fit into shared memory."""
        x, rows = self.lengths, tile.query_units * UNIT_BYTES // (2 * self.width)
        launch = self.launch(
            tile,
            "wgmma_short_forward.cu",
            "attention_wgmma_short",
            (x.row, x.out_row, self.step, self.scale),
            (*three(range(arrays)), arrays, arrays + 1),
            blocks=min(x.batch * -(-x.queries // rows), self.target.multiprocessors),
            threads=4 * WARPGROUP,
            shared=tile.shared,
            LOAD_WIDTH=math.gcd(4, x.width),
            QUERY_UNITS=tile.query_units,
            KEY_UNITS=tile.key_units,
            SHARED_BYTES=tile.shared,
        )
        return CudaKernel((launch,))

    def backward(self, arrays: int, tile: BackwardTile) -> CudaKernel:
        """Three launches: pack, multiply, write the cotangents of the queries."""
        x, (queries, keys), shared = self.lengths, self.packed_rows(tile), tile.shared(self.width)
        inputs = arrays + 3  # and the output, the logsumexp, the cotangent
        by_q, by_k, by_v = three(range(inputs, inputs + arrays))
        pack = self.launch(
            tile,
            "wgmma_pack_grad.cu",
            "attention_pack_grad",
            (x.row, x.out_row, self.step),
            (*three(range(arrays)), *range(arrays, inputs)),
            **self.pack_options(tile, 4),
        )
        backward = self.launch(
            tile,
            "wgmma_backward.cu",
            "attention_wgmma_grad",
            (x.row, self.step, self.scale),
            (by_k, by_v),
            blocks=min(x.batch * (keys // tile.keys), self.target.multiprocessors),
            threads=3 * WARPGROUP,
            shared=shared,
            QUERY_STAGES=tile.stages,
            SHARED_BYTES=shared,
        )
        unpack = self.launch(
            tile,
            "wgmma_pack_grad.cu",
            "attention_unpack_grad",
            (x.row, self.scale),
            (by_q,),
            **{**self.pack_options(tile, 4), "blocks": min(-(-x.batch * queries * self.width // 1024), MAX_PACK_BLOCKS)},
        )
        rows = x.batch * queries
        packed = (2 * rows + 2 * x.batch * keys) * self.width * 2
        sums = rows * (2 + self.width) * 4 + rows // tile.queries * 4
        return CudaKernel((pack, backward, unpack), packed + sums)


def three(positions: Sequence[int]) -> tuple[int, ...]:
    """The positions of q, k and v: three arrays, or one that holds them."""
    return tuple(positions) * (3 // len(positions))


def problem(target: Target, types: tuple[Any, ...], inputs: int, params: Mapping[str, Any]) -> WgmmaAttention | None:
    """The attention, if these kernels compute it. ``inputs``: the number of arguments that are not optional."""
    lengths = attention_lengths(*types, **params)
    if (
        target.capability != CAPABILITY
        or params["precision"] != "bfloat16"
        or optional_arguments(*types[inputs:])
        or lengths.width > WIDTHS[-1]
        or params["scale"] <= 0
    ):
        return None
    return WgmmaAttention(lengths, params["causal"], float(params["scale"]), "heads" not in params, target)


def forward_candidates(
    target: Target, arrays: int, types: tuple[Any, ...], params: Mapping[str, Any]
) -> list[CudaKernel]:
    """Kernels of attention. ``arrays``: 3 for q, k and v, or 1 that holds them."""
    found = problem(target, types, arrays, params)
    if found is None:
        return []
    short = [found.short_forward(arrays, found.short_tile)] if found.short_tile else []
    return short + [found.forward(arrays, tile) for tile in FORWARD_TILES[found.width]]


def backward_candidates(
    target: Target, arrays: int, types: tuple[Any, ...], params: Mapping[str, Any]
) -> list[CudaKernel]:
    """Kernels of its gradient."""
    found = problem(target, types, arrays + 3, params)
    return [] if found is None else [found.backward(arrays, tile) for tile in BACKWARD_TILES[found.width]]
