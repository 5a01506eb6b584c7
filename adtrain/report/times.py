"""Where the time went: by kernels of a step, by layers of the network as a strip of blocks, and in the whole run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log, prod
from typing import NamedTuple

from adtrain import config, nn
from adtrain.config import Config
from adtrain.nn.module import size_text
from adtrain.report.plot import ticks
from adtrain.training.costs import BEFORE, PHASES
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


class Block(NamedTuple):
    """A layer, the input or the loss.

    Attributes:
        numbers: numbers in the output for one example.
        height: `numbers` on a logarithmic scale, 0 to 1.
        ms: milliseconds of a step by phase. A kernel of several layers counts for the first of them.
        share: the part of the slowest block's time.
    """

    name: str
    kind: str
    shape: str
    numbers: int
    parameters: int
    height: float
    ms: dict[str, float]
    share: float


class Strip(NamedTuple):
    """The blocks from the input to the loss, and the milliseconds of work that belongs to none, such as updates."""

    blocks: Sequence[Block]
    rest_ms: float


def strip(cfg: Config, ops: Iterable[OperationTime]) -> Strip:
    """The strip of the config's network; without times where `ops` is empty."""
    layers = nn.describe(config.build.model(cfg), cfg.model.input_shape)
    rows = [
        nn.LayerRow("input", "", cfg.model.input_shape, 0),
        *layers,
        nn.LayerRow("loss", cfg.loss.kind, (), 0),
    ]
    names = [row.name for row in rows]
    times: dict[str, dict[str, float]] = {name: {} for name in names}
    rest = 0.0
    for op in ops:
        if (name := _block(op.scope, names)) is None:
            rest += op.ms
        else:
            times[name][op.phase] = times[name].get(op.phase, 0.0) + op.ms
    sizes = [prod(row.output_shape) for row in rows]
    slowest = max(sum(found.values()) for found in times.values()) or 1.0
    blocks = [
        Block(
            row.name,
            row.kind,
            size_text(row.output_shape),
            size,
            row.parameters,
            log(size + 1) / log(max(sizes) + 1),
            times[row.name],
            sum(times[row.name].values()) / slowest,
        )
        for row, size in zip(rows, sizes, strict=True)
    ]
    return Strip(blocks, rest)


def _block(scope: str, names: Sequence[str]) -> str | None:
    """The first layer in the scope of a kernel, or else its input or loss; None if there is neither."""
    parts = [nn.layer_of(part)[0] for part in scope.split("+")]
    for part in parts:
        inside = [name for name in names if name == part or name.startswith(f"{part}.")]
        if inside and part not in ("input", "loss"):
            return inside[-1]
    if any(part in BEFORE for part in parts):
        return "input"
    return "loss" if "loss" in parts or "accuracy" in parts else None


class Bar(NamedTuple):
    """A span of time; `left` and `width` are in percent of the axis."""

    left: float
    width: float
    tooltip: str


class Lane(NamedTuple):
    """All spans of one activity, and their sum."""

    name: str
    seconds: float
    bars: Sequence[Bar]


class Lanes(NamedTuple):
    """The lanes in the order in which they start, the axis, and the seconds of all lanes."""

    lanes: Sequence[Lane]
    ticks: Sequence[float]
    seconds: float


def lanes(summary: Summary) -> Lanes | None:
    """None if the run recorded no spans."""
    spans = summary.spans
    if not spans:
        return None
    first, end = min(span.start for span in spans), max(span.start + span.seconds for span in spans)
    axis = ticks(0.0, end - first)
    names = dict.fromkeys(span.name for span in sorted(spans, key=lambda span: span.start))

    def bar(start: float, seconds: float) -> Bar:
        left, width = (x / axis[-1] * 100 for x in (start - first, seconds))
        return Bar(left, width, f"{seconds:.3g} s from {start - first:.3g} s")

    found = [
        Lane(
            name,
            sum(span.seconds for span in spans if span.name == name),
            [bar(span.start, span.seconds) for span in spans if span.name == name],
        )
        for name in names
    ]
    return Lanes(found, axis, end - first)
