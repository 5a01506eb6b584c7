"""The training step of a config in each mode: whole, by layer and by operation; its memory and its timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import sqrt
from statistics import mean
from time import perf_counter
from typing import Any

from markupsafe import Markup

from adtrain import config, templates, training
from adtrain.bench import page
from adtrain.bench.machine import Progress, Rates, Roofline, known_or_measured, observed_load, protocol, rates
from adtrain.bench.page import Dot, Line
from adtrain.bench.profile import Key, OpTimer, Totals, held_bytes, timed_step, trace_step
from adtrain.bench.result import NamedTime, TimedResult, named
from adtrain.bench.sampling import Time, Timing, Workload, alternate
from adtrain.bench.view import (
    KERNELS,
    MS,
    NAMES,
    RANGE,
    RATES,
    Column,
    Note,
    Part,
    Picture,
    Section,
    Table,
    Tiles,
    View,
    cache_note,
    duration,
    factor,
    headline,
    joined,
    milliseconds,
    of_peak,
)
from adtrain.core.backend import KernelRun, backend
from adtrain.core.errors import AdtrainError
from adtrain.core.program import costs, label
from adtrain.core.staging import Staged
from adtrain.table import COUNT, PERCENT, TEXT, CellFormat
from adtrain.text import mebibytes
from adtrain.training import Experiment, Mode, continuation
from adtrain.training.costs import PHASES, planned_peak


@dataclass(frozen=True, kw_only=True)
class LayerTime(Rates):
    """The times of a layer, the phases apart; None for a phase that it does not have."""

    layer: str
    forward: Time | None
    backward: Time | None
    update: Time | None
    share: float

    @property
    def name(self) -> str:
        return self.layer or "(no layer)"

    @property
    def phases(self) -> Mapping[str, Time | None]:
        return {phase: getattr(self, phase) for phase in PHASES}

    @property
    def ms(self) -> float:
        return sum(time.median_ms for time in self.phases.values() if time)


@dataclass(frozen=True, kw_only=True)
class OpTime(Rates):
    """The time of an operation of a step, all its calls together."""

    op: str
    scope: str
    phase: str
    time: Time
    calls: int
    share: float
    kernels: list[KernelRun]

    @property
    def about(self) -> str:
        return f"{self.op} of {self.scope or 'no layer'}, {self.phase}: {duration(self.time.median_ms)}"


@dataclass(frozen=True, kw_only=True)
class BatchTime(Rates):
    """The fused step with a batch size."""

    step: Time
    images_per_second: float
    planned_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModeTimes(Rates):
    """The step in one mode; see `ModeBench`."""

    step: Time
    images_per_second: float
    host: Time
    parts: Time
    parts_to_step: float
    idle_share: float
    layers: list[LayerTime]
    ops: list[OpTime]

    @property
    def ops_ms(self) -> float:
        return sum(op.time.median_ms for op in self.ops)


@dataclass(frozen=True)
class Modes:
    eager: ModeTimes
    staged: ModeTimes
    fused: ModeTimes


@dataclass(frozen=True)
class Memory:
    """Planned and measured bytes; None where they cannot be measured."""

    planned_bytes: int
    held_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Step(TimedResult):
    """The result of `adtrain bench step`. `batch_sizes` is by number of examples."""

    kind = "step"
    config: str
    precision: str
    batch_size: int
    memory: Memory
    modes: Modes
    batch_sizes: dict[str, BatchTime]

    def times(self) -> Iterator[NamedTime]:
        for mode in ("fused", "staged", "eager"):
            yield named(f"{mode} step", getattr(self.modes, mode).step, whole=True)
        for size, found in self.batch_sizes.items():
            yield named(f"fused step, batch {size}", found.step, whole=True)
        for layer in self.modes.staged.layers:
            for phase, time in layer.phases.items():
                if time is not None:
                    yield named(f"layer {layer.name}, {phase}", time)
        for row in self.modes.fused.ops:
            yield named(f"{row.op}, {joined(row.scope, row.phase)}", row.time)

    def view(self) -> View:
        fused, layers, modes, peak = self.modes.fused, self.modes.staged.layers, vars(self.modes), self.protocol.peak
        memory = self.memory
        held = "" if memory.held_bytes is None else f", {mebibytes(memory.held_bytes)} measured"
        shown = [*layers, *fused.ops, *modes.values(), *self.batch_sizes.values()]
        sums = [sum(time.median_ms for row in layers if (time := row.phases[phase])) for phase in PHASES]
        longest = max((row.ms for row in layers), default=0.0) or 1.0
        keys = Picture(lambda: page.keys(list(zip(PHASES, PHASES, strict=True))))
        stacks: Column[LayerTime] = Column(
            ", ".join(PHASES), drawn=lambda row: page.stack(_phase_bars(row, longest)), where="page"
        )
        what = f"{self.batch_size} examples a step, {self.precision}"
        tables = "layers with a kernel for each operation, then the operations of the fused step, then whole steps"
        layer_table = Table([LAYERS[0], stacks, *LAYERS[1:]], layers, kind="layers",
                            sums=["sum", *map(milliseconds, sums), "100.0%", "", "", ""])  # fmt: skip
        by_time = sorted(fused.ops, key=lambda row: -row.time.median_ms)
        parts: list[Part] = [
            Tiles(list(self._tiles())),
            Note(what, where="page"),
            Note(f"{self.config}, {self.precision}, {self.batch_size} examples a step; {tables}", where="text"),
            Section("Timeline of the fused step", [Picture(lambda: _timeline(fused))], where="page"),
            Section("Layers, with a kernel for each operation", [keys, layer_table]),
            Section("Operations of the fused step", [keys, Table(OPERATIONS, by_time)], where="page"),
            Table(OPERATIONS, fused.ops, where="text"),
            Section("In each mode", [Picture(lambda: _bars(self.modes)), Table(
                STEPS, list(modes.items()),
                [f"memory of the fused step: {mebibytes(memory.planned_bytes)} planned{held}"],
            )]),
            Section("Roofline", [Picture(lambda: _roofline(self.modes, peak, self.precision))], where="page"),
        ]  # fmt: skip
        if batches := self.batch_sizes:
            table = Table(BATCHES, list(batches.items()))
            parts.append(Section("Over the batch size", [Picture(lambda: _over_batches(batches)), table]))
        parts += [Note(line) for line in cache_note(shown)]
        return View(f"{self.config}: a training step", parts)

    def _tiles(self) -> Iterator[tuple[str, ...]]:
        time, eager = self.modes.fused.step, self.modes.eager.step.median_ms
        yield headline("step, fused", time, duration)
        yield headline("examples/s", time, lambda ms: f"{self.batch_size / ms * 1e3:,.0f}", rate=True)
        yield headline("faster than eager", time, lambda ms: f"{factor(eager / ms)} x", rate=True)
        yield "of peak", of_peak(self.modes.fused)
        yield "memory planned", mebibytes(self.memory.planned_bytes)
        if self.memory.held_bytes is not None:
            yield "memory measured", mebibytes(self.memory.held_bytes)


LAYERS: tuple[Column[LayerTime], ...] = (
    Column("layer", lambda row: row.name, TEXT),
    Column("forward ms", lambda row: row.forward, MS, minor=True),
    Column("backward ms", lambda row: row.backward, MS, minor=True),
    Column("update ms", lambda row: row.update, MS, rank=1, minor=True),
    Column("share", lambda row: row.share, PERCENT, rank=2),
    *RATES,
)
OPERATIONS: tuple[Column[OpTime], ...] = (
    Column("fused operation", lambda row: row.op, NAMES),
    Column("layers", lambda row: row.scope, NAMES),
    Column("phase", lambda row: row.phase, TEXT, rank=7),
    Column("ms", lambda row: row.time, MS, bar=lambda row: (row.time.median_ms, row.phase)),
    Column("share", lambda row: row.share, PERCENT, rank=1),
    *RATES,
    *KERNELS,
)


def _of_second(column: Column[Any]) -> Column[Any]:
    """The column of the second of each pair."""
    return replace(column, of=lambda row: column.of(row[1]))


WHOLE: list[Column[Any]] = [
    _of_second(column)
    for column in (
        Column("ms", lambda row: row.step, MS),
        Column("95% interval", lambda row: row.step, RANGE, rank=7),
        Column("examples/s", lambda row: row.images_per_second, COUNT),
        *RATES,
    )
]
STEPS: tuple[Column[tuple[str, ModeTimes]], ...] = (
    Column("step", lambda row: row[0], TEXT),
    *WHOLE,
    Column("host ms", lambda row: row[1].host, MS, rank=3),
    Column("idle", lambda row: row[1].idle_share, PERCENT, rank=2),
    Column("parts ms", lambda row: row[1].parts, MS, rank=6),
    Column("parts", lambda row: row[1].parts_to_step, PERCENT),
)
BATCHES: tuple[Column[tuple[str, BatchTime]], ...] = (
    Column("batch", lambda row: row[0]),
    *WHOLE,
    Column("memory planned", lambda row: row[1].planned_bytes, CellFormat(mebibytes), rank=2),
)


def result(
    path: str, overrides: Sequence[str], device: str, batch_sizes: Sequence[int], progress: Progress
) -> tuple[Step, Callable[[], dict[str, Any]]]:
    """The result, and a function that runs one step in each mode and returns the timeline.

    Raises:
        AdtrainError: a batch size exceeds the number of training examples.
        ConfigError, DataError: the config is wrong, or its batch size exceeds the number of training examples.
    """
    experiment, *others = _prepared(path, overrides, device, batch_sizes)
    # First of all, because other arrays would count as well.
    memory = Memory(planned_peak(experiment, device), held_bytes(experiment, device))
    load = observed_load(progress)
    peak, precision = known_or_measured(device, progress), experiment.config.training.precision
    conditions = protocol(device, load, peak, SAMPLE_MS)
    progress(f"bench: timing steps of {experiment.config.name} in each mode, some seconds")
    modes = bench_modes(experiment, device)
    found = Step(
        protocol=conditions,
        config=experiment.config.name,
        precision=precision,
        batch_size=experiment.full_batch,
        memory=memory,
        modes=Modes(**{name: record(mode, peak, precision) for name, mode in modes.items()}),
        batch_sizes=bench_batches({e.full_batch: e for e in others}, peak, device) if others else {},
    )
    return found, lambda: {"traceEvents": _traced(experiment, modes, device), "otherData": found.to_json()["protocol"]}


def _prepared(path: str, overrides: Sequence[str], device: str, batch_sizes: Sequence[int]) -> list[Experiment]:
    """The config's experiment, and one for each batch size."""
    changes = [[], *([f"data.batch_size={n}"] for n in batch_sizes)]
    configs = [config.load(path, [*overrides, *change]) for change in changes]
    training.check_precision(configs[0], device)
    first = training.prepare(configs[0])
    if (size := configs[0].data.batch_size) > (count := len(first.train)):
        expected = f"expected at most {count:,}, the number of training examples"
        raise configs[0].error_at(("data", "batch_size"), f"found {size}, {expected}")
    for n in batch_sizes:
        if n > count:
            raise AdtrainError(f"--batch-sizes {n}: there are {count:,} training examples")
    return [first, *map(training.prepare, configs[1:])]


def _traced(experiment: Experiment, modes: Mapping[str, ModeBench], device: str) -> list[dict[str, Any]]:
    """The events of one step in each mode."""
    events = []
    for pid, (name, mode) in enumerate(modes.items(), 1):
        same = replace(experiment, mode=Mode(name))
        run_steps = training.continuation(same, same.initial_state("cpu"), device)
        run_steps(1)
        kernels = {key: [kernel.name for kernel in found] for key, found in mode.kernels.items()}
        events += trace_step(pid, name, run_steps, kernels, device)
    return events


BUDGET_MS = 6000.0
"""Target for all samples of a config together."""

PAUSE_S = {"cpu": 0.04, "gpu": 0.0}
"""Pause between modes. The threads of OpenBLAS, which eager steps use, spin for about 30 ms after their work."""

SAMPLE_MS = 50.0
"""Minimum duration of a sample, so that it behaves like training, which runs thousands of steps: the host's work every
hundred steps overlaps with the steps before, and the scheduler has spread the CPU's threads over the cores."""


@dataclass(frozen=True)
class ModeBench:
    """The step in one mode.

    Attributes:
        images: the number of images in a step.
        step: end to end, without hooks.
        host: the host's time: on a GPU until the step is enqueued, on the CPU the step less its operations, or 0 where
            these take longer, because they are timed one after the other.
        timers: for each sample, a timer for each of its steps.
        kernels: the kernels of each operation; empty where operations run eagerly.
    """

    images: int
    step: Timing
    host: Timing
    timers: Sequence[Sequence[OpTimer]]
    kernels: Mapping[Key, Sequence[KernelRun]]

    @property
    def totals(self) -> Mapping[Key, Totals]:
        """Calls, FLOPs and bytes of each operation of a step, in the order of their first run."""
        return self.timers[0][0].totals

    def of(self, keys: Sequence[Key]) -> Timing:
        """The time of these operations of a step together."""
        return operations(self.timers, keys)

    @property
    def parts(self) -> Timing:
        """The time of all operations of a step together."""
        return self.of(list(self.totals))

    @property
    def ratio(self) -> float:
        """The operations' time over the step's. Below 1, the device waits for the host. It can be above 1, because
        operations that overlap in the step are timed one after the other."""
        return self.parts.median_ms / self.step.median_ms


def bench_modes(experiment: Experiment, device: str = "cpu") -> dict[str, ModeBench]:
    """The step of `experiment` in every mode, whole and by operation, in interleaved samples."""
    experiments = {mode.value: replace(experiment, mode=mode) for mode in Mode}
    last: dict[str, Any] = {}
    kept: dict[str, list[Any]] = defaultdict(list)

    def whole(workload: str, run_steps: Callable[[int], object], times: int) -> None:
        """Notes the host's milliseconds a step until the steps are enqueued."""
        start = perf_counter()
        run_steps(times)
        last[workload] = (perf_counter() - start) * 1e3 / times

    def by_operation(workload: str, run_steps: Callable[[int], object], times: int) -> None:
        """Notes a timer for each step."""
        last[workload] = [timed_step(run_steps) for _ in range(times)]

    def sampled(workload: str) -> None:
        kept[workload].append(last[workload])

    workloads: dict[str, Workload] = {}
    for name, e in experiments.items():
        run_steps = continuation(e, e.initial_state("cpu"), device)
        workloads[f"{name} whole"] = partial(whole, f"{name} whole", run_steps)
        workloads[f"{name} parts"] = partial(by_operation, f"{name} parts", run_steps)
    finish = backend(device).synchronize
    found = alternate(workloads, finish, perf_counter, BUDGET_MS, SAMPLE_MS, PAUSE_S[device], sampled)
    benches = {}
    for name, e in experiments.items():
        step, timers = found[f"{name} whole"], kept[f"{name} parts"]
        host = Timing(kept[f"{name} whole"], step.repeats)
        if device == "cpu":
            parts = operations(timers, list(timers[0][0].totals))
            host = Timing([max(a - b, 0.0) for a, b in zip(step.ms, parts.ms, strict=True)], step.repeats)
        benches[name] = ModeBench(experiment.full_batch, step, host, timers, kernels_of(e))
    return benches


def operations(timers: Sequence[Sequence[OpTimer]], keys: Sequence[Key]) -> Timing:
    """The time of these operations of a step together. A sample is the mean over its steps."""
    ms = [mean(sum(timer.seconds[key] for key in keys) for timer in steps) * 1e3 for steps in timers]
    return Timing(ms, len(timers[0]))


def bench_batches(experiments: Mapping[int, Experiment], peak: Roofline, device: str = "cpu") -> dict[str, BatchTime]:
    """The fused step by batch size, in interleaved samples."""
    finish = backend(device).synchronize
    workloads = {str(n): continuation(e, e.initial_state("cpu"), device) for n, e in experiments.items()}
    found = {}
    timings = alternate(workloads, finish, budget_ms=BUDGET_MS, min_sample_ms=SAMPLE_MS)
    for (n, e), timing in zip(experiments.items(), timings.values(), strict=True):
        program = e.step_program(device)
        totals = [Totals(1, *cost) for cost in costs(program.equations)]
        found[str(n)] = BatchTime(
            step=timing.record(),
            images_per_second=n / timing.median_ms * 1e3,
            planned_bytes=planned_peak(e, device),
            **_rates(totals, timing.median_ms, peak, e.config.training.precision),
        )
    return found


def record(bench: ModeBench, peak: Roofline, precision: str) -> ModeTimes:
    """The step, its layers and its operations."""
    whole, total = bench.step, bench.parts.median_ms
    keys = [key for key, each in bench.totals.items() if each.flops or each.bytes]  # without views, which do nothing

    def rates_of(keys: Sequence[Key], ms: float) -> Mapping[str, Any]:
        return _rates([bench.totals[key] for key in keys], ms, peak, precision)

    def layers() -> Iterator[LayerTime]:
        for scope in dict.fromkeys(scope for _, scope, _ in keys):
            own = [key for key in keys if key[1] == scope]
            phases = {phase: [key for key in own if key[2] == phase] for phase in PHASES}
            ms = bench.of(own).median_ms
            forward, backward, update = (bench.of(each).record() if each else None for each in phases.values())
            times: dict[str, Any] = {"forward": forward, "backward": backward, "update": update}
            yield LayerTime(layer=scope, **times, share=_share(ms, total), **rates_of(own, ms))

    def ops() -> Iterator[OpTime]:
        for key in keys:
            timing, (op, scope, phase) = bench.of([key]), key
            yield OpTime(
                op=op,
                scope=scope,
                phase=phase,
                time=timing.record(),
                calls=bench.totals[key].calls,
                share=_share(timing.median_ms, total),
                kernels=list(bench.kernels.get(key, ())),
                **rates_of([key], timing.median_ms),
            )

    return ModeTimes(
        step=whole.record(),
        images_per_second=bench.images / whole.median_ms * 1e3,
        host=bench.host.record(),
        parts=bench.parts.record(),
        parts_to_step=bench.ratio,
        idle_share=max(0.0, 1.0 - bench.ratio),
        layers=list(layers()),
        ops=list(ops()),
        **rates_of(keys, whole.median_ms),
    )


def _rates(totals: Sequence[Totals], ms: float, peak: Roofline, precision: str) -> Mapping[str, Any]:
    """The fields of `Rates`, of all totals together in `ms` milliseconds."""
    flops, moved = sum(each.flops for each in totals), sum(each.bytes for each in totals)
    return vars(rates(flops, moved, ms, peak, precision))


def _share(ms: float, total: float) -> float:
    return ms / total if total > 0 else 0.0


def kernels_of(experiment: Experiment) -> Mapping[Key, Sequence[KernelRun]]:
    """The kernels of each operation of the step that was last compiled; empty for an eager step."""
    step = experiment.logged_step
    if not isinstance(step, Staged) or step.latest is None:
        return {}
    found: dict[Key, list[KernelRun]] = {}
    for e, kernels in zip(step.latest.program.equations, step.latest.executable.kernels, strict=True):
        found.setdefault((label(e), e.scope, e.phase), []).extend(kernels)
    return found


MIN_SHARE = 0.005
"""Share of the step below which an operation is not drawn in the roofline."""

MIN_NAMED_SHARE = 0.03

NAMED, NAMED_ON_PHONES = 4, 15
"""Percent of the timeline that an operation must take to be named in it."""


def _bars(modes: Modes) -> Markup:
    """A bar of all operations for each mode, on one scale."""
    found: Mapping[str, ModeTimes] = vars(modes)
    longest = max(max(row.step.median_ms, row.ops_ms) for row in found.values())
    bars = {name: page.stack(_op_bars(row, longest)) for name, row in found.items()}
    return page.rows(bars) + page.keys([*zip(PHASES, PHASES, strict=True), ("host", "outside of operations")])


def _op_bars(row: ModeTimes, longest: float) -> list[tuple[str, float, str]]:
    """The operations of a step in order, and the time outside of them: class, percent, tooltip."""
    rest = max(0.0, row.step.median_ms - row.ops_ms)
    bars = [(op.phase, op.time.median_ms / longest * 100, op.about) for op in row.ops if op.time.median_ms > 0]
    return [*bars, ("host", rest / longest * 100, f"outside of operations: {duration(rest)}")]


def _phase_bars(row: LayerTime, longest: float) -> list[tuple[str, float, str]]:
    times = {phase: time.median_ms if time else 0.0 for phase, time in row.phases.items()}
    return [(phase, ms / longest * 100, f"{phase} {milliseconds(ms)} ms") for phase, ms in times.items()]


def _timeline(step: ModeTimes) -> Markup:
    """The operations one after the other, with a lane for each phase."""
    ends, whole = accumulate(op.time.median_ms for op in step.ops), step.ops_ms
    lanes: dict[str, list[dict[str, Any]]] = {}
    for op, end in zip(step.ops, ends, strict=True):
        ms = op.time.median_ms
        width = ms / whole * 100
        name, details = (op.scope or op.op, op.op) if width >= NAMED else ("", "")
        bar = {"left": (end - ms) / whole * 100, "width": width, "tooltip": op.about}
        lanes.setdefault(op.phase, []).append(
            {**bar, "name": name, "details": details, "wide": width >= NAMED_ON_PHONES}
        )
    ticks = [duration(whole * i / 4) if i else "0" for i in range(5)]
    note = "Operations in the order in which they first run, each as long as its median; repeated calls are one."
    drawn = page.timeline({phase: lanes[phase] for phase in PHASES if phase in lanes}, ticks)
    return drawn + templates.note(note)


def _roofline(modes: Modes, peak: Roofline, precision: str) -> Markup:
    """The operations of both steps, with arrows from the staged operations to the fused ones that they are part of."""
    staged, fused = (
        [(row, dot) for row in mode.ops if row.share >= MIN_SHARE and (dot := _dot(row, name)).drawn]
        for name, mode in (("staged", modes.staged), ("fused", modes.fused))
    )
    arrows = [
        (start, end)
        for row, start in staged
        for into, end in fused
        if row.phase == into.phase and row.scope in into.scope.split("+") and row.op in into.op.split("+")
    ]
    dots = [dot for _, dot in staged + fused]
    note = "Rings are operations of the staged step; arrows lead to the fused operations that they are part of. The "
    note += f"larger a point, the larger its share of the step; below {MIN_SHARE:.1%} it is left out."
    return page.rooflines({"staged and fused": dots}, peak, precision, arrows) + templates.note(note)


def _dot(row: OpTime, mode: str) -> Dot:
    """The point of an operation; the larger ones of the fused step have names."""
    first, *others = row.scope.split("+")
    named = mode == "fused" and row.share >= MIN_NAMED_SHARE
    name = f"{first}{'+…' if others else ''} {row.phase}" if named else ""
    radius = 2.5 + 10 * sqrt(row.share)
    return Dot(name, row.about, row.flops, row.bytes, row.time.median_ms, radius, mode)


def _over_batches(batches: Mapping[str, BatchTime]) -> Markup:
    points = sorted((int(size), row.images_per_second) for size, row in batches.items())
    if len(points) < 2:
        return Markup()
    line = Line("examples/s", "forward", points)
    return page.figures([page.figure("Over the batch size", "examples a step", "examples/s", [line])])
