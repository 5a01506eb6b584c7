"""Attention in bfloat16 on Hopper: operands packed for bulk copies and WGMMA (`attention/wgmma_attention.cuh`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
ROW_BYTES_PER_COLUMN = 2
MAX_PACK_BLOCKS = 1 << 14


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


class WgmmaAttention(NamedTuple):
    """An attention that these kernels compute."""

    lengths: AttentionLengths
    causal: bool
    scale: float
    separate: bool
    target: Target

    @property
    def packed_width(self) -> int:
        return next(width for width in WIDTHS if width >= self.lengths.width)

    def definitions(self, tile: ForwardTile) -> dict[str, int]:
        return {
            "HEAD_WIDTH": self.lengths.width,
            "PACKED_WIDTH": self.packed_width,
            "CAUSAL": int(self.causal),
            "BLOCK_Q": tile.queries,
            "BLOCK_K": tile.keys,
        }

    def forward(self, arrays: int, tile: ForwardTile) -> CudaKernel:
        """Two launches: pack, multiply."""
        x, width = self.lengths, self.packed_width
        queries, keys = (-(-n // rows) * rows for n, rows in ((x.queries, tile.queries), (x.keys, tile.keys)))
        chunks = x.batch * max(queries, keys) * width // CHUNK
        common = self.definitions(tile)
        pack = CudaLaunch(
            "attention/wgmma_pack.cu",
            "attention_pack",
            (x.batch, x.heads, x.queries, x.keys, x.row, 0 if self.separate else x.out_row),
            (FLOAT32,),
            blocks=(min(-(-chunks // PACK_THREADS), MAX_PACK_BLOCKS), 3),
            threads=PACK_THREADS,
            definitions={**common, "LOAD_WIDTH": math.gcd(4, x.width)},
            operands=(0, 1, 2) if arrays == 3 else (0, 0, 0),
        )
        shared = tile.shared(width)
        forward = CudaLaunch(
            "attention/wgmma_forward.cu",
            "attention_wgmma",
            (x.batch, x.heads, x.queries, x.keys, x.out_row, self.scale),
            (FLOAT32,),
            blocks=min(x.batch * (queries // tile.queries), self.target.multiprocessors),
            threads=(tile.queries // 64 + 1) * WARPGROUP,
            shared=shared,
            definitions={**common, "KEY_STAGES": tile.stages, "HEAD_GROUP": 8 if self.causal else 1, "SHARED_BYTES": shared},
            operands=(arrays, arrays + 1),
        )
        return CudaKernel((pack, forward), x.batch * (queries + 2 * keys) * width * 2)


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
    return [found.forward(arrays, tile) for tile in FORWARD_TILES[found.packed_width]]
