"""Weak and strong scaling of a config, its exchanges alone, and a model of more GPUs than were measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from math import ceil, log2
from statistics import median

from markupsafe import Markup

from adtrain.bench import page
from adtrain.bench.machine import Progress, observed_load, protocol
from adtrain.bench.page import Line
from adtrain.bench.peers.systems import ADTRAIN, last_line
from adtrain.bench.result import NamedTime, TimedResult
from adtrain.bench.sampling import MIN_COUNT, median_interval
from adtrain.bench.scaling_worker import PEERS, SAMPLE_SECONDS, SAMPLES, Measured, Request
from adtrain.bench.view import Column, Note, Part, Picture, Section, Table, Tiles, View
from adtrain.config.problems import known
from adtrain.core.errors import AdtrainError, OptionError
from adtrain.distributed import launch
from adtrain.table import COUNT, PERCENT, TEXT, CellFormat

WORKER_SECONDS = 600
SCALINGS = ("weak", "strong")
"""Weak: the batch grows with the ranks. Strong: it stays."""


@dataclass(frozen=True)
class Point:
    """The time of a step with a number of ranks.

    Attributes:
        system: adtrain or a peer.
        weak: whether the batch grows with the ranks; otherwise it stays.
        step_us: the median, microseconds.
        efficiency: 1 is ideal. Weak, or strong on the CPU, where all numbers of ranks use the same cores: the time of
            a step with the first number of ranks, divided by this time. Strong on GPUs: also divided by the factor by
            which the number of ranks has grown.
        exchange_us: the sum over all ranks of a vector as long as the gradients, alone; 0 where it was not measured.
        hidden: the fraction of the exchanges that other work hides: 1 minus the growth of a step divided by
            `exchange_us`; only for weak scaling.
        step_interval_us: the confidence interval of `step_us`; None for few samples.
    """

    system: str
    weak: bool
    ranks: int
    batch_size: int
    step_us: float
    efficiency: float
    exchange_us: float
    hidden: float | None
    step_interval_us: tuple[float, float] | None = None

    @property
    def scaling(self) -> str:
        return "weak" if self.weak else "strong"

    @property
    def hidden_share(self) -> float | None:
        return None if self.hidden is None else max(0.0, min(1.0, self.hidden))


@dataclass(frozen=True, kw_only=True)
class Points:
    """A config's points, and what they were measured on."""

    config: str
    device_name: str
    gradient_bytes: int
    points: list[Point]


COLUMNS: tuple[Column[Point], ...] = (
    Column("system", lambda point: point.system, TEXT),
    Column("scaling", lambda point: point.scaling, TEXT),
    Column("ranks", lambda point: point.ranks),
    Column("batch", lambda point: point.batch_size, COUNT),
    Column("step us", lambda point: point.step_us, CellFormat("{:,.1f}".format)),
    Column("exchange us", lambda point: point.exchange_us or None, CellFormat("{:,.1f}".format)),
    Column("hidden", lambda point: point.hidden_share, CellFormat("{:.0%}".format)),
    Column("efficiency", lambda point: point.efficiency, PERCENT),
)


@dataclass(frozen=True, kw_only=True)
class Scaling(Points, TimedResult):
    """The result of `adtrain bench scaling`."""

    kind = "scaling"

    def times(self) -> Iterator[NamedTime]:
        for point in self.points:
            low, high = (end * 1e-3 for end in point.step_interval_us) if point.step_interval_us else (None, None)
            name = f"{point.system}, {point.scaling} scaling, {point.ranks} ranks, batch {point.batch_size}"
            yield NamedTime(f"{name}: step", point.step_us * 1e-3, low, high, whole=True)
            if point.exchange_us:
                yield NamedTime(f"{name}: exchanges", point.exchange_us * 1e-3, None, None)

    def view(self) -> View:
        own, others = ([p for p in self.points if (p.system == ADTRAIN) is which] for which in (True, False))
        weak, strong = ([p for p in own if p.weak is which] for which in (True, False))
        tiles, drawn = list[tuple[str, ...]](), list[Callable[[], Markup]]()
        for name, points in (("weak", weak), ("strong", strong)):
            if points:
                tiles.append((f"{name} efficiency", f"{points[-1].efficiency:.1%}"))
                beside = [p for p in others if p.weak is points[0].weak]
                drawn.append(partial(_times, f"{name.capitalize()} scaling", points, beside))
        if weak and weak[-1].hidden_share is not None:
            tiles.append(("exchanges hidden", f"{weak[-1].hidden_share:.0%}"))
        parts: list[Part] = [
            Tiles([("ranks", f"{max(p.ranks for p in self.points)}"), *tiles] if self.points else []),
            Note(f"{self.config} on {self.device_name}, gradients of {self.gradient_bytes:,} bytes"),
            Note("Weak scaling: the batch grows with the ranks. Strong scaling: it stays. Hidden is the part of the "
                 "exchanges that other work covers."),
            Section("Measured", [
                Picture(lambda: page.figures([draw() for draw in drawn])), Table(COLUMNS, self.points)
            ]),
        ]  # fmt: skip
        if self.protocol.device == "gpu" and len(weak) > 1:
            predicted = Picture(lambda: _predicted(self.gradient_bytes, weak))
            parts.append(Section("Arithmetic, not measured", [predicted], where="page"))
        return View(f"Scaling of {self.config}", parts)


def scaling(
    config: str,
    overrides: Sequence[str],
    device: str,
    batch_size: int,
    ranks: Sequence[int],
    systems: Sequence[str] = (ADTRAIN,),
    scalings: Sequence[str] = SCALINGS,
) -> Points:
    """Measure a config on these numbers of ranks of this machine; weak scaling with `batch_size` images a rank.

    On the CPU each rank has the machine's cores divided by the largest number of ranks in weak scaling, and by its own
    number of ranks in strong scaling, so that strong scaling uses the same cores.

    Args:
        systems: adtrain, and names in `PEERS`. They are measured one after another with each number of ranks.
        scalings: of `SCALINGS`.

    Raises:
        AdtrainError: a measurement fails.
    """
    most, cores = max(ranks), os.cpu_count() or 1
    points, about = list[Point](), None
    exchanges: dict[int, float] = {}
    for weak in (name == "weak" for name in scalings):
        first: dict[str, tuple[int, float]] = {}
        for count, system in product(ranks, systems):
            size = batch_size * count if weak else batch_size
            threads = max(1, cores // (most if weak else count))
            request = Request(config, overrides, device, size, system=system)
            measured = run(request, count, threads)
            step = median(measured.microseconds)
            exchange = 0.0
            if about is None or system == ADTRAIN:
                about = measured
            if system == ADTRAIN and count > 1:
                if count not in exchanges or device == "cpu":  # on the CPU the number of cores of a rank differs
                    alone = run(request._replace(exchange_bytes=measured.gradient_bytes), count, threads)
                    exchanges[count] = median(alone.microseconds)
                exchange = exchanges[count]
            first_count, first_us = first.setdefault(system, (count, step))
            ideal = first_us if weak or device == "cpu" else first_us * first_count / count
            hidden = None if not weak or not exchange else 1 - (step - first_us) / exchange
            ends = median_interval(measured.microseconds) if len(measured.microseconds) >= MIN_COUNT else None
            points.append(Point(system, weak, count, size, step, ideal / step, exchange, hidden, ends))
    assert about is not None
    return Points(config=config, device_name=about.device, gradient_bytes=about.gradient_bytes, points=points)


def _check(ranks: Sequence[int], peers: Sequence[str], device: str) -> None:
    if odd := [count for count in ranks if count & (count - 1)]:
        raise OptionError(f"--ranks: found {odd[0]}, expected powers of two")
    for name in peers:
        if name not in PEERS:
            raise OptionError(f"{name}: no such peer; {known(name, list(PEERS))}")
    if peers and find_spec("torch") is None:
        raise OptionError(f"{', '.join(peers)}: torch is not installed (pip install torch)")
    for name in peers:
        if device not in PEERS[name]:
            raise OptionError(f"{name}: runs on {' and '.join(PEERS[name])} only")


def run(request: Request, ranks: int, threads: int) -> Measured:
    """The measurement of a number of ranks. Raises AdtrainError with the last line of its output where it fails."""
    worker = [sys.executable, "-m", "adtrain.bench.scaling_worker", json.dumps(request._asdict())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = launch.start(ranks, worker, {"OMP_NUM_THREADS": str(threads)}, **pipes)
    try:
        output, errors = processes[0].communicate(timeout=WORKER_SECONDS)
    except subprocess.TimeoutExpired:
        raise AdtrainError(f"{ranks} ranks took longer than {WORKER_SECONDS} s") from None
    finally:
        code = launch.end(processes)[0]
        for process in processes:
            process.__exit__(None, None, None)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if code or not lines:
        raise AdtrainError(f"{ranks} ranks: exit code {code}: {last_line(errors, output, 'no output')}")
    return Measured(**json.loads(lines[-1]))


def result(
    config: str, overrides: Sequence[str], device: str, batch_size: int, ranks: Sequence[int],
    peers: Sequence[str], progress: Progress,
) -> Scaling:  # fmt: skip
    """The result of `scaling`, with the protocol.

    Raises:
        AdtrainError: a measurement fails.
        OptionError: a number of ranks is no power of two, torch is not installed, or a peer does not run on the device.
    """
    _check(ranks, peers, device)
    conditions = protocol(device, observed_load(progress), min_sample_ms=1e3 * SAMPLE_SECONDS)
    conditions = replace(conditions, samples=(SAMPLES, SAMPLES))
    progress(f"bench: timing steps of {config} on {' and '.join(map(str, ranks))} ranks, about a minute")
    found = scaling(config, overrides, device, batch_size, ranks, (ADTRAIN, *peers))
    return Scaling(protocol=conditions, **vars(found))


# The time of an exchange on more GPUs than were measured, by arithmetic: the alpha-beta model
# T = a0 + 2 n (g-1) / (g B1) + 2 (n/g) (k-1) / (k B2) + 2 ceil(log2 k) a2, for n bytes on k nodes of g GPUs (R. Thakur,
# R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH, 2005). a0 is fitted to a
# measured point; B1, B2 and a2 are published figures.
GPUS_PER_NODE = 8
NODE_BYTES_PER_US = 344e3
"""B1: of one GPU through NVLink, NCCL on H100."""
NETWORK_BYTES_PER_US = 47e3
"""B2: of one network card of 400 Gbit/s."""
HOP_US = 14.0
"""a2: the latency between two nodes; 8.5 to 14 were published."""
MOST_GPUS = 1024


def exchange_us(size: int, gpus: int, start_us: float = 0.0) -> float:
    """Microseconds to exchange gradients of `size` bytes; `start_us` is a0."""
    beside = min(gpus, GPUS_PER_NODE)
    nodes = ceil(gpus / GPUS_PER_NODE)
    inside = 2 * size * (beside - 1) / (beside * NODE_BYTES_PER_US)
    between = 2 * size / beside * (nodes - 1) / (nodes * NETWORK_BYTES_PER_US)
    return start_us + inside + between + 2 * ceil(log2(nodes)) * HOP_US


def fitted_start_us(size: int, gpus: int, measured_us: float) -> float:
    """a0, fitted to a measured time; 0 if the model without a0 is slower than the measurement."""
    return max(0.0, measured_us - exchange_us(size, gpus))


def weak_efficiency(step_us: float, size: int, gpus: int, start_us: float, hidden: float) -> float:
    """The time of a step on one GPU divided by that on `gpus`, if the fraction `hidden` of each exchange is hidden."""
    exposed = (1 - hidden) * exchange_us(size, gpus, start_us) if gpus > 1 else 0.0
    return step_us / (step_us + exposed)


COUNTS = [2**i for i in range(MOST_GPUS.bit_length())]


def _times(title: str, points: Sequence[Point], others: Sequence[Point]) -> Markup:
    """Times of steps, of exchanges alone, of a step that scales ideally, and of other systems."""
    first = points[0]
    growth = [1.0 if p.weak else first.ranks / p.ranks for p in points]
    ideal = [(p.ranks, first.step_us * x) for p, x in zip(points, growth, strict=True)]
    lines = [Line("step", "series-2", [(p.ranks, p.step_us) for p in points]), Line("ideal step", "series-1", ideal)]
    if exchanges := [(p.ranks, p.exchange_us) for p in points if p.exchange_us]:
        lines.append(Line("exchanges alone", "series-3", exchanges))
    for number, system in enumerate(dict.fromkeys(p.system for p in others), 4):
        lines.append(Line(system, f"series-{number}", [(p.ranks, p.step_us) for p in others if p.system == system]))
    return page.figure(title, "ranks", "µs", lines)


def _predicted(size: int, weak: Sequence[Point]) -> Markup:
    """The efficiency of weak scaling by the alpha-beta model, beside the measured points."""
    last, measured = weak[-1], weak[-1].hidden_share or 0.0
    start = fitted_start_us(size, last.ranks, last.exchange_us)

    def percent(hidden: float) -> list[tuple[float, float]]:
        return [(n, 100 * weak_efficiency(weak[0].step_us, size, n, start, hidden)) for n in COUNTS]

    lines = [
        Line("model, nothing hidden", "series-1", percent(0.0)),
        Line(f"model, {measured:.0%} hidden as measured", "series-3", percent(measured)),
        Line("measured", "series-2", [(p.ranks, 100 * p.efficiency) for p in weak]),
    ]
    note = (
        f"The alpha-beta model with {GPUS_PER_NODE} GPUs a node. Its start-up time of {start:.1f} µs fits the measured "
        "exchange; 344 GB/s inside a node, 47 GB/s and 14 µs between nodes are published figures."
    )
    return page.figures([page.figure("Weak scaling by a model", "GPUs", "% efficiency", lines, note=note)])
