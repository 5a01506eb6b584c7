"""The kernels of one step by time: what they compute, named by the layers that they compute it for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from adtrain.training.costs import PHASES
from adtrain.training.summary import OperationTime, Summary, operations_text

MOST_KERNELS = 15


class Kernels(NamedTuple):
    """The kernels of one scope and phase.

    Attributes:
        layers: their layers and parts of the step, such as ["0.conv2d", "1.relu"].
        primitives: a line for each kernel, for a tooltip.
        length: of the bar: `ms` over that of the slowest row.
    """

    layers: Sequence[str]
    phase: str
    primitives: str
    ms: float
    share: float
    length: float
    gflops_per_s: float | None
    gbytes_per_s: float | None


class StepKernels(NamedTuple):
    """The slowest kernels of a step; number, milliseconds and share of the others; milliseconds by phase and of
    all, and their sum beside the step that ran."""

    slowest: Sequence[Kernels]
    others: int
    others_ms: float
    others_share: float
    phases: Mapping[str, float]
    ms: float
    comparison: str


def kernels(summary: Summary) -> StepKernels:
    """The kernels of a step. Those of the same layers and phase are one row."""
    groups: dict[tuple[str, str], list[OperationTime]] = {}
    for op in summary.ops:
        groups.setdefault((op.scope, op.phase), []).append(op)
    ordered = sorted(groups.items(), key=lambda item: -_ms(item[1]))
    longest = max((_ms(ops) for _, ops in ordered), default=0.0) or 1.0
    rows = [
        Kernels(
            scope.split("+"),
            phase,
            "\n".join(f"{op.op.replace('+', ' + ')}: {op.ms:.3f} ms" for op in ops),
            _ms(ops),
            sum(op.share for op in ops),
            _ms(ops) / longest,
            _rate(sum(op.flops for op in ops), ops),
            _rate(sum(op.bytes for op in ops), ops),
        )
        for (scope, phase), ops in ordered
    ]
    others = rows[MOST_KERNELS:]
    phases = {phase: ms for phase in PHASES if (ms := _ms([op for op in summary.ops if op.phase == phase]))}
    ms, share = sum(row.ms for row in others), sum(row.share for row in others)
    return StepKernels(rows[:MOST_KERNELS], len(others), ms, share, phases, _ms(summary.ops), operations_text(summary))


def _ms(ops: Sequence[OperationTime]) -> float:
    return sum(op.ms for op in ops)


def _rate(amount: float, ops: Sequence[OperationTime]) -> float | None:
    """Billions a second; None where the clock saw no time pass."""
    return amount / _ms(ops) * 1e-6 if _ms(ops) else None
