"""The result of `adtrain bench against`: training steps or operations in adtrain and in its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, NamedTuple, cast

from markupsafe import Markup

from adtrain import config, training
from adtrain.bench import page
from adtrain.bench.machine import Progress, Protocol, observed_load, thread_count
from adtrain.bench.op_table import OpCase
from adtrain.bench.page import Scale
from adtrain.bench.peers import comparison
from adtrain.bench.peers.comparison import Systems
from adtrain.bench.peers.systems import ADTRAIN, Choice, WorkerProcess, precision_of, started
from adtrain.bench.result import NamedTime, TimedResult, named
from adtrain.bench.sampling import Time
from adtrain.bench.view import (
    ERROR,
    MS,
    Column,
    Note,
    Part,
    Picture,
    Ratio,
    Section,
    Table,
    Tiles,
    View,
    absent,
    factor,
    joined,
    ratio_headline,
)
from adtrain.sweeps.members import with_seeds
from adtrain.table import COUNT, TEXT, CellFormat


class SystemTime(NamedTuple):
    """A system in a comparison; the ratio is None for adtrain, and for a peer that computes something else."""

    row: Systems
    system: str

    @property
    def time(self) -> Time:
        return self.row.times[self.system]

    @property
    def ratio(self) -> Ratio | None:
        return self.row.ratios.get(self.system)

    @property
    def shown_ratio(self) -> str | None:
        """The ratio, or that the results differ too much."""
        if self.system in self.row.different:
            return "DIFFERENT"
        return factor(self.ratio.median) if self.ratio else None


@dataclass(frozen=True, kw_only=True)
class SystemsStep(Systems):
    """The training step of a config in each system."""

    config: str
    overrides: list[str]
    batch_size: int
    members: int | None = None

    @property
    def batch(self) -> str:
        members = f", {self.members:,} members" if self.members else ""
        return f"batch {self.batch_size}{members}"

    @property
    def name(self) -> Markup:
        return page.named(self.config, self.batch)


@dataclass(frozen=True, kw_only=True)
class SystemsOperation(Systems):
    """An operation in each system; `flops` is None where they are not counted."""

    op: str
    size: str
    phase: str
    flops: int | None

    @property
    def name(self) -> Markup:
        return page.named(self.op, f"{self.size}, {self.phase}")


def _of_operation(of: Callable[[SystemsOperation], str]) -> Callable[[SystemTime], str]:
    """A column of the operation, in the row of adtrain only."""
    return lambda row: of(cast(SystemsOperation, row.row)) if row.system == ADTRAIN else ""


TIMES: tuple[Column[SystemTime], ...] = (
    Column("system", lambda row: row.system, TEXT),
    Column("ms", lambda row: row.time, MS),
    Column("ratio", lambda row: row.shown_ratio),
)
STEP: tuple[Column[SystemTime], ...] = (
    *TIMES,
    Column("95% interval", lambda row: row.ratio, rank=3),
    Column("loss error", lambda row: row.row.off.get(row.system), ERROR, rank=4),
    Column("MiB", lambda row: row.row.peak_mib[row.system], COUNT, rank=5),
)
OPERATION: tuple[Column[SystemTime], ...] = (
    Column("operation", _of_operation(lambda row: row.op), TEXT),
    Column("size", _of_operation(lambda row: row.size), TEXT),
    Column("phase", _of_operation(lambda row: row.phase), TEXT, rank=1),
    *TIMES,
    Column("95% interval", lambda row: row.ratio, rank=2),
    Column("error", lambda row: row.row.off.get(row.system), ERROR, rank=3),
)
COLOURS = ("series-2", "series-3", "series-4", "series-5", "series-6", "series-1")
"""CSS classes with the colours of the peers, in the order of the result."""


@dataclass(frozen=True, kw_only=True)
class Against(TimedResult):
    """The result of `adtrain bench against`: of steps, or of operations."""

    kind = "against"
    steps: list[SystemsStep] | None = None
    operations: list[SystemsOperation] | None = None

    @property
    def rows(self) -> list[SystemsStep | SystemsOperation]:
        return [*(self.steps or ()), *(self.operations or ())]

    @property
    def peers(self) -> list[str]:
        return list(dict.fromkeys(system for row in self.rows for system in row.times if system != ADTRAIN))

    @property
    def is_different(self) -> bool:
        """Whether the results of any system differ too much."""
        return any(row.different for row in self.rows)

    def times(self) -> Iterator[NamedTime]:
        for step in self.steps or ():
            members = [f"{step.members} members"] if step.members else []
            what = ", ".join([step.config, *step.overrides, *members, f"batch {step.batch_size}"])
            for system, time in step.times.items():
                yield named(f"{what}: {system}", time, whole=True)
        for row in self.operations or ():
            for system, time in row.times.items():
                yield named(f"{joined(row.op, row.size, row.phase)}: {system}", time)

    def view(self) -> View:
        steps, operations = self.steps or [], self.operations or []
        scale = Scale(ratio for row in self.rows for ratio in row.ratios.values())
        why = list(dict.fromkeys(line for row in operations for line in absent(row.skipped, row.failed)))
        parts: list[Part] = [
            Tiles(list(_fastest(steps))),
            Note("ratio: a system's time over adtrain's, round by round, in interleaved samples; above 1 adtrain is "
                 "faster"),
            Note("The line across a point is the 95% interval of the median.", where="page"),
        ]  # fmt: skip
        if len(self.rows) > 1 or not steps:
            parts.append(Section("Ratios", [*self._ratios(scale), *(Note(line) for line in why)], where="page"))
        parts += [_section(step, scale) for step in steps]
        if operations:
            parts.append(Note("error: relative error of the result, or of the worst gradient, against float64", "text"))
            rows = [SystemTime(row, system) for row in operations for system in row.times]
            parts.append(Table(OPERATION, rows, why, where="text"))
        packages = dict.fromkeys(peer.split("-")[0] for peer in self.peers)
        return View(f"{ADTRAIN} against {' and '.join(packages) or 'no peer'}", parts)

    def _ratios(self, scale: Scale) -> list[Part]:
        """A line for each config, or each operation's phase, with a point for each peer."""
        colours = dict(zip(self.peers, cycle(COLOURS), strict=False))

        def lane(row: SystemsStep | SystemsOperation) -> Markup:
            return scale.lane((colours.get(peer, "series-1"), peer, ratio) for peer, ratio in row.ratios.items())

        def cell(peer: str) -> Callable[[SystemsStep | SystemsOperation], Markup | str]:
            def drawn(row: SystemsStep | SystemsOperation) -> Markup | str:
                found = row.ratios.get(peer)
                if peer in row.different:
                    return "different"
                return page.two_lines(factor(found.median), str(found)) if found else ""

            return drawn

        as_it_is = CellFormat(lambda value: value)
        columns: list[Column[SystemsStep | SystemsOperation]] = [
            Column("", lambda row: row.name, CellFormat(lambda name: name, left=True)),
            Column(f"{ADTRAIN}, ms", lambda row: row.times.get(ADTRAIN), MS),
            Column("", drawn=lane, foot=scale.axis),
            *(Column(peer, cell(peer), as_it_is, rank=3) for peer in colours),
        ]
        keys = Picture(lambda: page.keys([(colour, peer) for peer, colour in colours.items()]))
        return [keys, Table(columns, self.rows, kind="ratios")]


def _fastest(steps: Sequence[SystemsStep]) -> Iterator[tuple[str, ...]]:
    for row in steps:
        if same := [peer for peer in row.ratios if precision_of(peer, row.precision) == row.precision]:
            peer = min(same, key=lambda peer: row.ratios[peer].median)
            name = f"{row.config}, the fastest peer: {peer}"
            yield ratio_headline(name, row.ratios[peer], lambda x: f"{factor(x)} x")


def _other_precisions(row: SystemsStep) -> Iterator[str]:
    """The systems that compute in another precision than that of the config, and the tolerance of their losses."""
    for system in row.times:
        precision = precision_of(system, row.precision)
        if precision != row.precision:
            tolerance = comparison.loss_tolerance(system, row.precision)
            yield f"{system} computes in {precision}; its losses must be within a relative {tolerance:g}"


def _section(row: SystemsStep, scale: Scale) -> Section:
    """The systems of a config's step, a line each."""

    def lane(found: SystemTime) -> Markup:
        if not found.ratio:
            return scale.lane([])
        low, high = found.ratio.low, found.ratio.high
        kind = "ahead" if low > 1 else "behind" if high < 1 else "even"
        return scale.lane([(kind, found.system, found.ratio)])

    lanes: Column[SystemTime] = Column("", drawn=lane, foot=scale.axis, where="page")
    members = f", a step of all {row.members:,} members" if row.members else ""
    same = f"the first losses must equal adtrain's within a relative {row.tolerance:g}"
    notes = [f"{row.precision}, data on the device; {same}", *_other_precisions(row), *absent(row.skipped, row.failed)]
    table = Table(
        [*STEP[:4], lanes, *STEP[4:]], [SystemTime(row, system) for system in row.times], notes,
        title=f"{', '.join([row.config, *row.overrides])}: batch {row.batch_size}{members}", kind="systems",
    )  # fmt: skip
    return Section(row.config, [table, Note(f"{row.batch}, {', '.join(row.overrides)}", where="page")])


def of_configs(
    names: Sequence[str],
    overrides: Sequence[str],
    device: str,
    choice: Choice,
    autotune: str,
    progress: Progress,
    members: int | None = None,
) -> Against:
    """The result for the training step of each config.

    Args:
        members: the number of networks that are trained together; None: one network.

    Raises:
        ConfigError, DataError: a config is wrong. All are checked before any process is started.
        WorkerFailed: adtrain itself fails.
    """
    overrides = [*overrides, "schedule=constant"]
    configs = []
    for name in names:
        cfg = config.load(name, overrides)
        training.check_precision(cfg, device)
        training.check_whole_batches(cfg)
        configs.append((name, cfg, training.prepare(cfg).full_batch))
    rows, load = [], observed_load(progress)
    for name, cfg, batch in configs:
        precision = cfg.training.precision
        seeds = [] if members is None else [with_seeds(cfg.training.seed, members)]
        systems = ", ".join([ADTRAIN, *(peer.name for peer in choice.runnable)])
        progress(f"bench: {cfg.name} in {systems}: setting up, then timing in interleaved samples")
        with _workers(device, choice, autotune) as workers:
            do = "step" if members is None else "members"
            losses = comparison.compare_losses(workers, choice, name, [*overrides, *seeds], precision, do)
            found = comparison.step_times(workers, losses, precision)
        about: dict[str, Any] = {"config": cfg.name, "overrides": overrides, "batch_size": batch, "members": members}
        rows.append(SystemsStep(**about, **vars(found)))
    return Against(protocol=_conditions(comparison.STEPS, device, load, choice), steps=rows)


def of_operations(cases: Sequence[OpCase], device: str, choice: Choice, autotune: str, progress: Progress) -> Against:
    """The result for single operations. Raises WorkerFailed if adtrain itself fails."""
    rows, load = [], observed_load(progress)
    with _workers(device, choice, autotune) as workers:
        for i, case in enumerate(cases, 1):
            progress(f"bench: {case.name} ({i} of {len(cases)})")
            for phase in case.phases:
                found = comparison.compare_operation(workers, choice, case, phase)
                about: dict[str, Any] = {"op": case.op, "size": case.size, "phase": phase, "flops": case.flops(phase)}
                rows.append(SystemsOperation(**about, **vars(found)))
    return Against(protocol=_conditions(comparison.OPERATIONS, device, load, choice), operations=rows)


def _workers(device: str, choice: Choice, autotune: str) -> AbstractContextManager[dict[str, WorkerProcess]]:
    return started([ADTRAIN, *(peer.name for peer in choice.runnable)], device, thread_count(), autotune)


def _conditions(budget: comparison.Budget, device: str, load: float | None, choice: Choice) -> Protocol:
    clock = dict.fromkeys(("operations", "steps"), "the host's in each process, until the device has finished")
    samples = comparison.MIN_ROUNDS, comparison.MAX_ROUNDS
    found = comparison.conditions(device, load, choice)
    return replace(found, samples=samples, min_sample_ms=budget.sample * 1e3, clock=clock)
