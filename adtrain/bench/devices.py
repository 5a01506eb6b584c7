"""Operations and training steps on the CPU and the GPU: times and speed-ups, and the sizes at which each is faster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from markupsafe import Markup

from adtrain import config, training
from adtrain.backends.cpu import naive
from adtrain.bench import candidates, page
from adtrain.bench.machine import Progress, Protocol, observed_load, protocol
from adtrain.bench.op_table import Naive, TimedOp
from adtrain.bench.page import Line, Scale
from adtrain.bench.peers.numpy_system import naive_step
from adtrain.bench.peers.systems import Unsupported
from adtrain.bench.profile import timed_step
from adtrain.bench.result import NamedTime, TimedResult, named
from adtrain.bench.sampling import Time, Timing, Workload, alternate, in_turns, ratio, repeatedly
from adtrain.bench.step import SAMPLE_MS
from adtrain.bench.view import (
    FACTOR,
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
    factor,
    milliseconds,
    ratio_headline,
)
from adtrain.core.array import array
from adtrain.core.backend import backend
from adtrain.core.staging import Staged, stage
from adtrain.data import Split
from adtrain.passes import ALL
from adtrain.table import TEXT, CellFormat
from adtrain.training.step import empty_log, repeated


@dataclass(frozen=True)
class Crossover:
    """Where a label is faster than the first device: "always" or "never" at the measured sizes, "from" or "up to" the
    size `at`; and in words."""

    wins: str
    at: float | None
    says: str


def crossover(sizes: Sequence[float], speedups: Sequence[float]) -> Crossover:
    """The size from which the speed-up is at least 1 up to the largest size, or from which it is below 1.

    The logarithm of the speed-up is interpolated linearly in the logarithm of the size, which is exact where times are
    powers of the size.

    Args:
        sizes: ascending, above 0.
        speedups: at each size, the first device's time over the second's.
    """
    faster = [speedup >= 1 for speedup in speedups]
    wins = faster[-1]
    if all(faster) or not any(faster):
        word = "always" if wins else "never"
        return Crossover(word, None, word)
    last = max(i for i, each in enumerate(faster) if each is not wins)
    x0, x1, y0, y1 = (log(x) for x in (*sizes[last : last + 2], *speedups[last : last + 2]))
    word, at = "from" if wins else "up to", exp(x0 - y0 * (x1 - x0) / (y1 - y0))
    return Crossover(word, at, f"{word} {at:,.0f}")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Times by label, and speed-ups over the first device."""

    times: dict[str, Time]
    speedups: dict[str, Ratio]


@dataclass(frozen=True, kw_only=True)
class SizedRow(Compared):
    """Times at a size, which is a number `n`, a batch size, or the width or depth of a network."""

    n: int | None = None
    batch: int | None = None
    width: int | None = None
    depth: int | None = None

    @property
    def sizes(self) -> Mapping[str, int]:
        found = {"n": self.n, "batch": self.batch, "width": self.width, "depth": self.depth}
        return {name: size for name, size in found.items() if size is not None}

    @property
    def size(self) -> int:
        (size,) = self.sizes.values()
        return size


@dataclass(frozen=True, kw_only=True)
class Sized:
    """Rows of ascending sizes."""

    rows: list[SizedRow]
    crossover: dict[str, Crossover]

    @property
    def size_name(self) -> str:
        return next((name for row in self.rows for name in row.sizes), "n")

    @property
    def says(self) -> list[str]:
        return [f"{label} is faster: {where.says}" for label, where in self.crossover.items()]

    def table(self, title: str) -> Table[SizedRow]:
        """A row for each size: times and speed-ups by label."""
        labels = dict.fromkeys(label for row in self.rows for label in row.times)
        faster = dict.fromkeys(label for row in self.rows for label in row.speedups if label != naive.LABEL)
        short = {label: COPIES if label.endswith(COPIES) else label for label in labels} | {naive.LABEL: "naive"}

        def time(label: str) -> Column[SizedRow]:
            return Column(short[label], lambda row: row.times.get(label), MS)

        def speedup(label: str) -> Column[SizedRow]:
            return Column(f"x {short[label]}", lambda row: row.speedups[label].median, FACTOR)

        size: Column[SizedRow] = Column(self.size_name, lambda row: row.size)
        columns = [size, *map(time, labels), *map(speedup, faster)]
        return Table(columns, self.rows, self.says, title=title, where="text")

    def figure(self, title: str) -> Markup:
        """The speed-ups over the size."""
        lines = []
        for label in dict.fromkeys(label for row in self.rows for label in row.speedups):
            found = [(row.size, row.speedups[label]) for row in self.rows if label in row.speedups]
            median, low, high = (
                [(size, getattr(ratio, end)) for size, ratio in found] for end in ("median", "low", "high")
            )
            crosses = self.crossover[label].at if label in self.crossover else None
            lines.append(Line(label, colour(label), median, low, high, crosses))
        note = "; ".join(self.says)
        return page.figure(title, self.size_name, "times faster", lines, level=1.0, note=note)


@dataclass(frozen=True, kw_only=True)
class SizedOperation(Sized):
    """An operation over sizes; `what` is the problem in words."""

    op: str
    what: str

    @property
    def name(self) -> str:
        return f"{self.op}: {self.what}"


@dataclass(frozen=True, kw_only=True)
class Growth(Sized):
    """A step over its batch size, or over the width or depth of its network."""

    of: str
    over: str


@dataclass(frozen=True)
class LayerTimes:
    """The milliseconds of a layer by label."""

    layer: str
    ms: dict[str, float]

    @property
    def name(self) -> str:
        return self.layer or "(no layer)"


@dataclass(frozen=True, kw_only=True)
class DevicesStep(Compared):
    """The step of a config. `without_naive`: why naive loops were skipped."""

    config: str
    overrides: list[str]
    batch_size: int
    layers: list[LayerTimes]
    batches: Growth
    without_naive: str | None = None

    def sections(self, scale: Scale) -> Iterator[Section]:
        what = f"{', '.join([self.config, *self.overrides])}: a step of {self.batch_size} examples"

        def lane(label: str) -> Markup:
            ratio = self.speedups.get(label)
            return scale.lane([(colour(label), label, ratio)] if ratio else [])

        columns: list[Column[str]] = [
            Column("", str, TEXT),
            Column("ms", self.times.get, MS),
            Column("x", lambda label: self.speedups[label].median if label in self.speedups else None, FACTOR),
            Column("95% interval", self.speedups.get, rank=3),
            Column(" ", drawn=lane, foot=scale.axis, where="page"),
        ]
        skipped = [f"{naive.LABEL} skipped: {self.without_naive}"] if self.without_naive else []
        yield Section(self.config, [Table(columns, list(self.times), [*skipped], title=what, kind="systems")])
        largest = max((ms for row in self.layers for ms in row.ms.values()), default=0.0) or 1.0

        def layer_ms(label: str) -> Column[LayerTimes]:
            return Column(f"{label} ms", lambda row: row.ms[label], CellFormat(milliseconds),
                          bar=lambda row: (row.ms[label] / largest, colour(label)))  # fmt: skip

        names: Column[LayerTimes] = Column("layer", lambda row: row.name, TEXT)
        labels = self.layers[0].ms if self.layers else {}
        parts: list[Part] = [
            Table(
                [names, *map(layer_ms, labels)], self.layers, title="ms of each layer, with a kernel for each operation"
            ),
            Picture(lambda: page.figures([self.batches.figure(f"{self.config} over the batch size")])),
            self.batches.table(f"{self.config}: a step over the batch size"),
        ]
        yield Section(f"{self.config} by layer and over the batch size", parts)


@dataclass(frozen=True, kw_only=True)
class Devices(TimedResult):
    """The result of `adtrain bench devices`: of operations and growing networks, or of configs."""

    kind = "devices"
    operations: list[SizedOperation] | None = None
    configs: list[DevicesStep] | None = None
    growing: list[Growth] | None = None
    launch: candidates.Shapes | None = None

    def times(self) -> Iterator[NamedTime]:
        configs = self.configs or []
        for found in configs:
            for label, time in found.times.items():
                yield named(f"{', '.join([found.config, *found.overrides])}: {label}", time, whole=True)
        sized: list[tuple[str, Sized]] = [(found.op, found) for found in self.operations or ()]
        sized += [(found.of, found) for found in (*(each.batches for each in configs), *(self.growing or ()))]
        for name, each in sized:
            for row in each.rows:
                size = " ".join(f"{of} {n}" for of, n in row.sizes.items())
                for label, time in row.times.items():
                    yield named(f"{name}, {size}: {label}", time)
        if self.launch is not None:
            for shape in self.launch.rows:
                yield named(f"{self.launch.kernel}, {shape.blocks} blocks of {shape.threads} threads", shape.time)

    def view(self) -> View:
        configs, operations, growing = self.configs or [], self.operations or [], self.growing or []
        tiles = [
            ratio_headline(f"{found.config}, {label}", speedup, _times_faster)
            for found in configs
            for label, speedup in found.speedups.items()
        ]
        parts: list[Part] = [
            Tiles(tiles),
            Note("times of a call from the host until the device has finished; x: speed-up over the CPU"),
            Note(f"{naive.LABEL}: products and convolutions by their definition, {naive.OPTIMIZATION}; cpu: vector "
                 "code, all cores"),
            Note(f"{COPIES}: with copies of the arguments to the device, and of the result back"),
            Note("The shade around a curve is its 95% interval.", where="page"),
        ]  # fmt: skip
        if operations:
            drawn = Picture(lambda: page.figures([found.figure(found.name) for found in operations]))
            parts.append(Section("Speed-up over the size", [
                drawn, _crossovers(operations), *(found.table(found.name) for found in operations),
            ]))  # fmt: skip
        scale = Scale(speedup for found in configs for speedup in found.speedups.values())
        for each in configs:
            parts += each.sections(scale)
        if growing:
            titles = [f"{found.of}, over the {found.over}" for found in growing]
            parts.append(Section("Over width and depth", [
                Picture(lambda: page.figures([x.figure(name) for x, name in zip(growing, titles, strict=True)])),
                *(found.table(f"{found.of}: a step over the {found.over}") for found in growing),
            ]))  # fmt: skip
        if self.launch is not None:
            parts.append(self.launch.section())
        return View(" against ".join((self.protocol.devices or {}).values()), parts)


COLOURS = {"gpu": "series-2", "gpu+copies": "series-3"}
"""From labels to CSS classes with their colours."""


def colour(label: str) -> str:
    return COLOURS.get(label, "series-1")


def _times_faster(speedup: float) -> str:
    return f"{factor(speedup)} x faster" if speedup >= 1 else f"{factor(1 / speedup)} x slower"


def _crossovers(operations: Sequence[SizedOperation]) -> Table[SizedOperation]:
    """The sizes at which each label is faster than the CPU, a row for each operation."""

    def column(label: str) -> Column[SizedOperation]:
        return Column(f"{label} is faster", lambda found: found.crossover[label].says, TEXT)

    columns: list[Column[SizedOperation]] = [
        Column("operation", lambda found: found.op, TEXT),
        Column("n is", lambda found: found.what, TEXT, rank=3),
    ]
    labels = dict.fromkeys(label for found in operations for label in found.crossover)
    return Table([*columns, *map(column, labels)], operations, where="page")


NAIVE_FLOPS = 3e8
"""Above this many FLOPs, or elements, the naive loop is skipped, because it would take too long."""

COPIES = "+copies"
"""Suffix of the label of times that include copying the arguments to the device, and the result back."""


Labels: TypeAlias = Mapping[str, str]
"""From the labels of times to devices. The first one is the baseline."""


def _first(devices: Labels) -> str:
    return next(iter(devices))


def _naive(op: TimedOp) -> Naive:
    assert op.naive is not None, "`BY_NAIVE_LOOPS` are the rows that have it"
    return op.naive


def measured(op: TimedOp, devices: Labels) -> SizedOperation:
    """Times at each size, speed-ups over the first device, and where they cross 1."""
    about = _naive(op)
    rows = [row(op, n, devices) for n in about.sizes]
    return SizedOperation(op=op.op, what=about.what, rows=rows, crossover=crossovers(rows))


def row(op: TimedOp, n: int, devices: Labels) -> SizedRow:
    """The times at one size, in interleaved samples: of a call from the host until the device has finished."""
    inputs, about = [x.astype(np.float32) for x in op.arrays(n)], _naive(op)
    workloads: dict[str, Workload] = {}
    if about.work(n) <= NAIVE_FLOPS:
        workloads[naive.LABEL] = repeatedly(lambda: about.loop(*inputs))
    for label, device in devices.items():
        workloads[label] = _op_on(device, stage(op.f, ALL), inputs)
        if label != _first(devices):
            workloads[label + COPIES] = _op_with_copies(device, stage(op.f, ALL), inputs)
    return SizedRow(n=n, **compared(alternate(workloads), _first(devices)))


def _op_on(device: str, staged: Staged, inputs: Sequence[np.ndarray]) -> Workload:
    args = [array(x, device=device) for x in inputs]
    return repeatedly(lambda: staged(*args), backend(device).synchronize)


def _op_with_copies(device: str, staged: Staged, inputs: Sequence[np.ndarray]) -> Workload:
    return repeatedly(lambda: staged(*(array(x, device=device) for x in inputs)).numpy())


def compared(times: Mapping[str, Timing], first: str) -> Mapping[str, Any]:
    """The fields of `Compared`: the times, and the speed-up of each over `first` with its 95% interval."""
    speedups = {}
    for label, timing in times.items():
        if label != first:
            found = ratio(times[first], timing).record()
            speedups[label] = Ratio(found.median_ms, found.low_ms, found.high_ms)
    return {"times": {label: timing.record() for label, timing in times.items()}, "speedups": speedups}


def crossovers(rows: Sequence[SizedRow]) -> dict[str, Crossover]:
    """Where each label is faster than the first device."""
    labels = dict.fromkeys(label for each in rows for label in each.speedups if label != naive.LABEL)
    sizes = [each.size for each in rows]
    return {label: crossover(sizes, [each.speedups[label].median for each in rows]) for label in labels}


BATCHES = (32, 128, 512, 2048)
WIDTHS, DEPTHS = (64, 256, 1024, 4096), (1, 2, 4, 8, 16)
WIDTH, DEPTH = 256, 2
"""The fixed width, or depth, of the hidden layers while the other one varies."""

LAYER_STEPS = 9
"""A layer's time is the median over this many steps."""


def hidden_layers(width: int, depth: int) -> str:
    """The override of a config's layers: `depth` hidden linear layers with relu, and 10 classes."""
    hidden = f"{{linear: {width}}}, relu, " * depth
    return f"model.layers=[{hidden}{{linear: 10}}]"


def step(name: str, overrides: Sequence[str], devices: Labels) -> Mapping[str, Any]:
    """The fields of `DevicesStep` that are times of the whole step: by naive loops where these have all layers, on each
    device, and with copies of each batch to the device and of the loss back."""
    experiment = training.prepare(config.load(name, overrides))
    about = {"config": experiment.config.name, "overrides": list(overrides), "batch_size": experiment.full_batch}
    workloads: dict[str, Workload] = {}
    try:
        workloads[naive.LABEL] = repeatedly(naive_step(experiment))
    except Unsupported as reason:
        about["without_naive"] = str(reason)
    workloads |= _workloads(experiment, devices)
    for label, device in list(devices.items())[1:]:
        workloads[label + COPIES] = _with_copies(experiment, device)
    return {**about, **compared(alternate(workloads, min_sample_ms=SAMPLE_MS), _first(devices))}


def over_batches(name: str, overrides: Sequence[str], devices: Labels) -> Growth:
    """The step of a config at each batch size in BATCHES, up to the number of images."""
    experiment = training.prepare(config.load(name, overrides))
    sizes = [size for size in BATCHES if size <= len(experiment.train)]
    changes = {size: [*overrides, f"data.batch_size={size}"] for size in sizes}
    return _over(experiment.config.name, "batch", name, changes, devices)


def over_widths(name: str, devices: Labels) -> Growth:
    """The config's step with DEPTH hidden layers of several widths."""
    changes = {width: [hidden_layers(width, DEPTH)] for width in WIDTHS}
    return _over(f"{DEPTH} hidden layers", "width", name, changes, devices)


def over_depths(name: str, devices: Labels) -> Growth:
    """The config's step with several numbers of hidden layers of WIDTH."""
    changes = {depth: [hidden_layers(WIDTH, depth)] for depth in DEPTHS}
    return _over(f"hidden layers of {WIDTH}", "depth", name, changes, devices)


def _over(of: str, what: str, name: str, changes: Mapping[int, Sequence[str]], devices: Labels) -> Growth:
    """The step at several sizes, each with its overrides."""
    rows = []
    for size, overrides in changes.items():
        experiment = training.prepare(config.load(name, overrides))
        found = alternate(_workloads(experiment, devices), min_sample_ms=SAMPLE_MS)
        sizes: dict[str, Any] = {what: size}
        rows.append(SizedRow(**sizes, **compared(found, _first(devices))))
    return Growth(of=of, over=what, rows=rows, crossover=crossovers(rows))


def layers(name: str, overrides: Sequence[str], devices: Labels) -> list[LayerTimes]:
    """The milliseconds of each layer, all phases together, with a kernel for each operation."""
    experiment = training.prepare(config.load(name, overrides), training.Mode.STAGED)
    timed = in_turns({label: _timed_step(experiment, device) for label, device in devices.items()}, LAYER_STEPS)

    def ms(label: str, scope: str) -> float:
        return median(seconds.get(scope, 0.0) for seconds in timed[label]) * 1e3

    return [LayerTimes(scope, {label: ms(label, scope) for label in timed}) for scope in timed[_first(devices)][0]]


def _workloads(experiment: training.Experiment, devices: Labels) -> dict[str, Workload]:
    """On each device, steps as in training, with the data set on the device."""

    def on(device: str) -> Workload:
        run_steps = training.continuation(experiment, experiment.initial_state("cpu"), device)

        def workload(times: int) -> None:
            run_steps(times)
            backend(device).synchronize()

        return workload

    return {label: on(device) for label, device in devices.items()}


def _with_copies(experiment: training.Experiment, device: str) -> Workload:
    """Steps that each copy a batch of uint8 images and int64 labels to the device, and the loss back."""
    size, train = experiment.full_batch, experiment.train
    batch = Split(np.ascontiguousarray(train.images[:size]), np.ascontiguousarray(train.labels[:size]))
    state, seed, task = experiment.initial_state(device), experiment.seed(device), experiment.network.task

    def workload(times: int) -> None:
        nonlocal state
        for _ in range(times):
            given = training.on_device(batch, device).batches(np.arange(size)[None])
            state, log = repeated(experiment.logged_step, 1, (state, empty_log(task, 1, device)), seed, *given)
            log.loss.numpy()

    return workload


def _timed_step(experiment: training.Experiment, device: str) -> Callable[[], Mapping[str, float]]:
    """A function that takes a step, and returns the seconds of each scope by the device's clock, in the order in which
    they run."""
    run_steps = training.continuation(experiment, experiment.initial_state("cpu"), device)
    run_steps(1)

    def step() -> Mapping[str, float]:
        seconds = defaultdict[str, float](float)
        for (_, scope, _), elapsed in timed_step(run_steps).seconds.items():
            seconds[scope] += elapsed
        return seconds

    return step


BASE_CONFIG = "mlp"
"""The packaged config whose layers are replaced to vary width and depth."""


def of_configs(names: Sequence[str], overrides: Sequence[str], devices: Sequence[str], progress: Progress) -> Devices:
    """The result for configs.

    Raises:
        ConfigError, DataError: a config is wrong. All are checked before the first is measured.
    """
    for name in names:
        cfg = config.load(name, overrides)
        training.check_whole_batches(cfg)
        for device in devices:
            training.check_precision(cfg, device)
        training.prepare(cfg)
    load = observed_load(progress)
    rows = [config_row(name, overrides, dict(zip(devices, devices, strict=True)), progress) for name in names]
    return Devices(protocol=_conditions(devices, load), configs=rows)


def of_operations(ops: Sequence[TimedOp], whole: bool, devices: Sequence[str], progress: Progress) -> Devices:
    """The result for operations; if `whole`, also for networks of varying width and depth, and for
    launch shapes of a GPU."""
    rows, load, labels = [], observed_load(progress), dict(zip(devices, devices, strict=True))
    for op in ops:
        progress(f"bench: {op.op} at {len(_naive(op).sizes)} sizes")
        rows.append(measured(op, labels))
    found: dict[str, Any] = {}
    if whole:
        progress("bench: networks that grow")
        found["growing"] = [over(BASE_CONFIG, labels) for over in (over_widths, over_depths)]
        if "gpu" in devices:
            progress("bench: launch shapes")
            found["launch"] = candidates.launch_shapes()
    return Devices(protocol=_conditions(devices, load), operations=rows, **found)


def config_row(name: str, overrides: Sequence[str], devices: Labels, progress: Progress = str) -> DevicesStep:
    """The step of a config: whole, by layer and over batch sizes."""
    progress(f"bench: {name}, by naive loops and on {', '.join(devices)}")
    whole, by_layer = step(name, overrides, devices), layers(name, overrides, devices)
    return DevicesStep(**whole, layers=by_layer, batches=over_batches(name, overrides, devices))


def _conditions(devices: Sequence[str], load: float | None) -> Protocol:
    return replace(
        protocol(devices[-1], load),
        clock=dict.fromkeys(("operations", "steps"), "the host's, until the device has finished"),
        devices={device: backend(device).device_name() for device in devices},
        naive=f"{naive.LABEL}: {backend('cpu').compiler_name()}, {naive.OPTIMIZATION}",
    )
