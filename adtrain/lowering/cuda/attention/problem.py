"""What every implementation of attention gets: lengths, options, and the positions of its arguments and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.kernel import CudaKernel, Target
from adtrain.core.precision import mantissa
from adtrain.lowering.shapes import AttentionLengths, attention_lengths, optional_arguments

LAUNCH = 3e-6
"""Seconds that a launch takes besides its work."""
MANY_HEADS = 1 << 14
"""Heads that fill any GPU for many waves."""


class Candidates(NamedTuple):
    """The kernels of an implementation, the preferred one first, and the estimated seconds of that one."""

    seconds: float
    kernels: Sequence[CudaKernel]


class Problem(NamedTuple):
    """An attention or its gradient.

    Args:
        lengths: as `attention_lengths` gives them.
        dtype: of all arrays but the mask and the random state.
        precision: "full", "tf32" or "bfloat16".
        arrays: 3 where q, k and v are arguments of their own, 1 where one array holds them.
        gradient: whether it is the gradient.
        optional: which of the arguments "mask", "starts" and "rng" are present.
        causal: whether query i attends to keys 0 to i only.
        options: scale, dropout and stream, the last numbers of every kernel.
        by_member: whether the choice must not depend on how many heads all members of a sweep have together.
        stored: whether the arrays are bfloat16 in memory; the logsumexp is float32.
    """

    lengths: AttentionLengths
    dtype: np.dtype
    precision: str
    arrays: int
    gradient: bool
    optional: tuple[str, ...]
    causal: bool
    options: tuple[float | int, ...]
    by_member: bool = False
    stored: bool = False

    @property
    def estimated(self) -> AttentionLengths:
        """The lengths that times are estimated for. Those of a Program by member have enough heads for any GPU."""
        return self.lengths._replace(batch=MANY_HEADS) if self.by_member else self.lengths

    @property
    def definitions(self) -> dict[str, int]:
        """The macros of `attention/attention.cuh`."""
        return {
            "WIDTH": self.lengths.width,
            "CAUSAL": int(self.causal),
            "MASKED": int("mask" in self.optional),
            "STARTS": int("starts" in self.optional),
            "DROPOUT": int("rng" in self.optional),
            "MANTISSA": mantissa(self.precision),
        }

    @property
    def numbers(self) -> tuple[float | int, ...]:
        """The numbers that every kernel gets, from `batch` to `stream`."""
        x = self.lengths
        return x.batch, x.heads, x.queries, x.keys, x.row, x.out_row, self.step, *self.options

    @property
    def step(self) -> int:
        """Elements from q to k and from k to v in one array."""
        return self.lengths.out_row if self.arrays == 1 else 0

    @property
    def inputs(self) -> tuple[int, int, int]:
        """The positions of q, k and v."""
        return self._three(0)

    @property
    def more(self) -> tuple[int, ...]:
        """The positions of the optional arguments."""
        first = self.arrays + (3 if self.gradient else 0)
        return tuple(range(first, first + len(self.optional)))

    @property
    def results(self) -> tuple[int, ...]:
        """The positions of the output and the logsumexp, or of the cotangents of q, k and v."""
        first = self.arrays + len(self.optional) + (3 if self.gradient else 0)
        return self._three(first) if self.gradient else (first, first + 1)

    @property
    def kept(self) -> tuple[int, int, int]:
        """The positions of a gradient's arguments output, logsumexp and cotangent of the output."""
        return self.arrays, self.arrays + 1, self.arrays + 2

    def _three(self, first: int) -> tuple[int, int, int]:
        return (first, first + 1, first + 2) if self.arrays == 3 else (first, first, first)


def problem_of(
    arrays: int, gradient: bool, types: Sequence[Any], params: Mapping[str, Any], by_member: bool = False
) -> Problem:
    """The problem of a primitive's arguments; ``arrays`` and ``by_member`` as in Problem."""
    inputs = arrays + (3 if gradient else 0)
    return Problem(
        attention_lengths(*types, **params),
        types[0].dtype,
        params["precision"],
        arrays,
        gradient,
        tuple(optional_arguments(*types[inputs:])),
        params["causal"],
        (float(params["scale"]), float(params["dropout"]), params["stream"]),
        by_member,
    )


def waves(blocks: int, at_once: int, target: Target) -> int:
    """The waves of a grid: in a wave each multiprocessor computes ``at_once`` blocks."""
    return -(-blocks // (at_once * target.multiprocessors))
