"""Attention and its gradient: `attention/forward.cu` and `attention/backward.cu`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.precision import mantissa
from adtrain.core.registry import register
from adtrain.core.target import Target
from adtrain.lowering.cuda.reduce import WARP, launchable
from adtrain.lowering.shapes import AttentionLengths, attention_lengths, optional_arguments

SHARED_VECTOR = 16
"""Bytes of padding of a row in shared memory."""


class Tile(NamedTuple):
    """Rows of a tile of queries or keys (TILE), and rows of a thread (MICRO)."""

    rows: int
    micro: int

    @property
    def lanes(self) -> int:
        return self.rows // self.micro

    def shared(self, width: int, itemsize: int, tiles: int, scores: int) -> int:
        """Bytes of shared memory for so many tiles of rows and of scores."""
        padded, vector = -(-width // self.lanes) * self.lanes, SHARED_VECTOR // itemsize
        return self.rows * itemsize * (tiles * (padded + vector) + scores * (self.rows + vector))


MIN_TILE = 16
"""Rows of the first candidate for the shortest sequences."""
TILES = (Tile(64, 4), Tile(32, 2), Tile(16, 1), Tile(8, 1))


class Problem(NamedTuple):
    """An attention or its gradient. `more` counts the optional arguments."""

    lengths: AttentionLengths
    dtype: np.dtype
    more: int
    separate: bool
    definitions: Mapping[str, int]
    options: tuple[float | int, ...]

    def launch(
        self, tile: Tile, file: str, name: str, length: int, shared: int, operands: tuple[int, ...]
    ) -> CudaLaunch:
        """A launch of a block for each tile of `length` rows of each head."""
        x = self.lengths
        step = 0 if self.separate else x.out_row  # from q to k and from k to v in one array
        return CudaLaunch(
            f"attention/{file}",
            name,
            (x.batch, x.heads, x.queries, x.keys, x.row, x.out_row, step, *self.options),
            (self.dtype,),
            blocks=x.batch * -(-length // tile.rows),
            threads=tile.lanes**2,
            shared=shared,
            definitions={**self.definitions, "TILE": tile.rows, "MICRO": tile.micro},
            operands=operands,
        )

    def candidates(
        self, target: Target, tiles: int, scores: int, make: Callable[[Tile, int], CudaKernel]
    ) -> list[CudaKernel]:
        """A kernel for each tile that fits into shared memory, first for the largest one that the sequences fill."""
        longest = max(self.lengths.queries, self.lengths.keys)
        sizes = {tile: tile.shared(self.lengths.width, self.dtype.itemsize, tiles, scores) for tile in TILES}
        fitting = [tile for tile in TILES if sizes[tile] <= target.shared]
        ordered = sorted(fitting, key=lambda tile: (tile.rows >= 2 * longest and tile.rows > MIN_TILE, -tile.rows))
        return launchable([make(tile, sizes[tile]) for tile in ordered])


def _problem(types: tuple[Any, ...], inputs: int, params: Mapping[str, Any]) -> Problem:
    """``inputs``: the number of arguments that are not optional."""
    given, lengths = optional_arguments(*types[inputs:]), attention_lengths(*types, **params)
    definitions = {
        "WIDTH": lengths.width,
        "CAUSAL": int(params["causal"]),
        "MASKED": int("mask" in given),
        "DROPOUT": int("rng" in given),
        "MANTISSA": mantissa(params["precision"]),
    }
    options = float(params["scale"]), float(params["dropout"]), params["stream"]
    return Problem(lengths, types[0].dtype, len(given), "heads" not in params, definitions, options)


def _forward(target: Target, arrays: int, types: tuple[Any, ...], params: Mapping[str, Any]) -> list[CudaKernel]:
    """One launch for each size of tile. ``arrays``: 3 for q, k and v, or 1 that holds them."""
    problem = _problem(types, arrays, params)
    operands = (*_three(range(arrays)), *range(arrays, arrays + problem.more + 2))

    def kernel(tile: Tile, shared: int) -> CudaKernel:
        launch = problem.launch(tile, "forward.cu", "attention", problem.lengths.queries, shared, operands)
        return CudaKernel((launch,))

    return problem.candidates(target, 2, 1, kernel)


def _backward(target: Target, arrays: int, types: tuple[Any, ...], params: Mapping[str, Any]) -> list[CudaKernel]:
    """Three launches for each size of tile."""
    inputs = arrays + 3  # and the output, the logsumexp, the cotangent
    problem = _problem(types, inputs, params)
    lengths, first = problem.lengths, inputs + problem.more
    rows = lengths.batch * lengths.queries
    given = *_three(range(arrays)), *range(arrays + 1, first)  # without the output
    by_q, by_k, by_v = _three(range(first, first + arrays))

    def kernel(tile: Tile, shared: int) -> CudaKernel:
        by_keys = problem.launch(tile, "backward.cu", "attention_grad_keys", lengths.keys, shared, (*given, by_k, by_v))
        delta = CudaLaunch(
            by_keys.file, "attention_delta", (lengths.batch, lengths.heads, lengths.queries, lengths.out_row),
            by_keys.dtypes, rows * WARP, definitions=by_keys.definitions, operands=(arrays, arrays + 2),
        )  # fmt: skip
        by_queries = problem.launch(
            tile, "backward.cu", "attention_grad_queries", lengths.queries, shared, (*given, by_q)
        )
        return CudaKernel((delta, by_keys, by_queries), rows * problem.dtype.itemsize)

    return problem.candidates(target, 4, 2, kernel)


def _three(positions: Sequence[int]) -> tuple[int, ...]:
    """The positions of q, k and v: three arrays, or one that holds them."""
    return tuple(positions) * (3 // len(positions))


for _prefix, _arrays in (("", 3), ("self_", 1)):
    register(
        f"{_prefix}attention", "cuda", lambda target, *types, n=_arrays, **params: _forward(target, n, types, params)
    )
    register(
        f"{_prefix}attention_grad",
        "cuda",
        lambda target, *types, n=_arrays, **params: _backward(target, n, types, params),
    )
