"""Attention and its gradient: `attention/forward.cu` and `attention/backward.cu`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.precision import mantissa
from adtrain.core.registry import register
from adtrain.core.target import Target
from adtrain.lowering.cuda.reduce import WARP, launchable
from adtrain.lowering.shapes import optional_arguments

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


TILES = (Tile(64, 4), Tile(32, 2), Tile(16, 1), Tile(8, 1))


class Problem(NamedTuple):
    """An attention or its gradient."""

    batch: int
    queries: int
    keys: int
    width: int
    dtype: np.dtype
    more: int  # optional arguments
    definitions: Mapping[str, int]
    options: tuple[float | int, ...]

    def launch(
        self, tile: Tile, file: str, name: str, length: int, shared: int, operands: tuple[int, ...]
    ) -> CudaLaunch:
        """A launch of a block for each tile of `length` rows of each head."""
        return CudaLaunch(
            f"attention/{file}",
            name,
            (self.batch, self.queries, self.keys, *self.options),
            (self.dtype,),
            blocks=self.batch * -(-length // tile.rows),
            threads=tile.lanes**2,
            shared=shared,
            definitions={**self.definitions, "TILE": tile.rows, "MICRO": tile.micro},
            operands=operands,
        )


def _problem(q: Any, k: Any, more: tuple[Any, ...], params: Mapping[str, Any]) -> Problem:
    given = optional_arguments(*more)
    definitions = {
        "WIDTH": q.shape[-1],
        "CAUSAL": int(params["causal"]),
        "MASKED": int("mask" in given),
        "DROPOUT": int("rng" in given),
        "MANTISSA": mantissa(params["precision"]),
    }
    options = float(params["scale"]), float(params["dropout"]), params["stream"]
    sizes = math.prod(q.shape[:-2]), q.shape[-2], k.shape[-2], q.shape[-1]
    return Problem(*sizes, q.dtype, len(more), definitions, options)


def _candidates(
    problem: Problem, target: Target, tiles: int, scores: int, make: Callable[[Tile, int], CudaKernel]
) -> list[CudaKernel]:
    """A kernel for each tile that fits into shared memory, first for the largest one that the sequences fill."""
    longest = max(problem.queries, problem.keys)
    sizes = {tile: tile.shared(problem.width, problem.dtype.itemsize, tiles, scores) for tile in TILES}
    fitting = [tile for tile in TILES if sizes[tile] <= target.shared]
    ordered = sorted(fitting, key=lambda tile: (tile.rows >= 2 * longest and tile.rows > 16, -tile.rows))
    return launchable([make(tile, sizes[tile]) for tile in ordered])


def attention(target: Target, q: Any, k: Any, v: Any, *more: Any, **params: Any) -> list[CudaKernel]:
    """The candidates: one launch for each size of tile."""
    problem = _problem(q, k, more, params)

    def kernel(tile: Tile, shared: int) -> CudaKernel:
        operands = tuple(range(5 + problem.more))
        return CudaKernel((problem.launch(tile, "forward.cu", "attention", problem.queries, shared, operands),))

    return _candidates(problem, target, 2, 1, kernel)


def attention_grad(
    target: Target, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, ct: Any, *more: Any, **params: Any
) -> list[CudaKernel]:
    """The candidates: three launches for each size of tile."""
    problem = _problem(q, k, more, params)
    rows = problem.batch * problem.queries
    given = (0, 1, 2, 4, 5, *range(6, 6 + problem.more))  # without the output
    by_q, by_k, by_v = range(6 + problem.more, 9 + problem.more)

    def kernel(tile: Tile, shared: int) -> CudaKernel:
        by_keys = problem.launch(tile, "backward.cu", "attention_grad_keys", problem.keys, shared, (*given, by_k, by_v))
        delta = CudaLaunch(
            by_keys.file, "attention_delta", (rows,), by_keys.dtypes, rows * WARP,
            definitions=by_keys.definitions, operands=(3, 5),
        )  # fmt: skip
        by_queries = problem.launch(
            tile, "backward.cu", "attention_grad_queries", problem.queries, shared, (*given, by_q)
        )
        return CudaKernel((delta, by_keys, by_queries), rows * problem.dtype.itemsize)

    return _candidates(problem, target, 4, 2, kernel)


register("attention", "cuda", attention)
register("attention_grad", "cuda", attention_grad)
