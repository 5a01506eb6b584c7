"""Times the kernels of a GPU: every candidate for the operations of the table, and one at many launch shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from markupsafe import Markup

from adtrain import ops, templates
from adtrain.backends.cuda.lower import fastest
from adtrain.backends.cuda.tuner.autotune import Mode, Tuner, tuning_problems
from adtrain.backends.cuda.tuner.measure import described, distinct
from adtrain.bench import page
from adtrain.bench.machine import Progress, observed_load, protocol
from adtrain.bench.op_table import TimedOp
from adtrain.bench.ops import phases, sample
from adtrain.bench.result import NamedTime, TimedResult
from adtrain.bench.sampling import Time, Timing, in_turns, rate
from adtrain.bench.view import RATE, Column, Picture, Section, Table, View
from adtrain.core.array import Array, array
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError, DeviceError
from adtrain.core.program import Equation
from adtrain.core.staging import stage
from adtrain.table import TEXT, CellFormat


@dataclass(frozen=True)
class Candidate:
    """A kernel for a problem.

    Attributes:
        us: microseconds.
        rule: whether it is the choice without measurements.
        chosen: whether it is the tuner's choice.
    """

    kernel: str
    us: float
    gflops_per_s: float | None
    gbytes_per_s: float | None
    rule: bool
    chosen: bool


@dataclass(frozen=True)
class Problem:
    """An equation and its candidates, the fastest first."""

    problem: str
    params: dict[str, str]
    candidates: list[Candidate]

    @property
    def name(self) -> str:
        return ", ".join([self.problem, *(f"{name} {value}" for name, value in self.params.items())])

    def table(self) -> Table[tuple[str, Candidate]]:
        """Kernels are named without what all of the problem have in common."""
        names = distinct([each.kernel for each in self.candidates])
        fastest_us = self.candidates[0].us if self.candidates else 0.0
        columns: list[Column[tuple[str, Candidate]]] = [
            Column("kernel", lambda row: row[0], TEXT),
            Column("us", lambda row: row[1].us, CellFormat("{:.2f}".format), bar=lambda row: (row[1].us, "")),
            Column("GFLOP/s", lambda row: row[1].gflops_per_s, RATE, rank=3),
            Column("GB/s", lambda row: row[1].gbytes_per_s, RATE, rank=4),
            Column("of fastest", lambda row: fastest_us / row[1].us, CellFormat("{:.0%}".format), rank=5),
            Column("", lambda row: ", ".join(mark for mark in ("chosen", "rule") if getattr(row[1], mark)), TEXT),
        ]
        rows = list(zip(names, self.candidates, strict=True))
        return Table(columns, rows, title=self.name, kind="operations")


@dataclass(frozen=True, kw_only=True)
class Candidates(TimedResult):
    """The result of `adtrain bench ops --candidates`."""

    kind = "candidates"
    candidates: list[Problem]

    def times(self) -> Iterator[NamedTime]:
        for problem in self.candidates:
            for each in problem.candidates:
                yield NamedTime(f"{problem.name}: {each.kernel}", each.us * 1e-3, None, None)

    def view(self) -> View:
        return View("Kernel candidates", [Section(each.name, [each.table()]) for each in self.candidates])


def result(benches: Sequence[TimedOp], sizes: Sequence[int] | None, progress: Progress) -> Candidates:
    """For each distinct problem of the benches its candidates, the fastest first.

    Args:
        sizes: of the arrays, by default each bench's own.

    Raises:
        AdtrainError: every problem has a single kernel.
    """
    conditions, equations = protocol("gpu", observed_load(progress)), list[Equation]()
    for each in benches:
        for n in sizes or each.sizes["gpu"]:
            for f, args in phases(each, sample(each, n, device="gpu")).values():
                equations += stage(f).program(*args).equations
    tuner: Tuner = cast(Any, backend("gpu")).tuner
    problems = list(tuning_problems(tuner.lowering, equations))
    if not problems:
        raise AdtrainError("--candidates: each of these operations has only one kernel")
    progress(f"bench: measuring the candidates of {len(problems)} problems")
    rows = []
    for problem, times in tuner.times(problems, measured=True):
        equation, rule = problem.equation, problem.labels[0]
        cost = equation.cost
        chosen = rule if tuner.mode is Mode.OFF else fastest(problem.labels, times)
        found = [
            Candidate(name, us, rate(cost.flops, us * 1e-3), rate(cost.bytes, us * 1e-3), name == rule, name == chosen)
            for name, us in sorted(times.items(), key=lambda item: item[1])
        ]
        params = {name: str(value) for name, value in equation.params.items()}
        rows.append(Problem(described(equation), params, found))
    return Candidates(protocol=conditions, candidates=rows)


ELEMENTS = 2**24
THREADS, BLOCKS = (32, 64, 128, 256, 512, 1024), (1, 2, 4, 8, 16, 32)
"""Threads a block, and blocks a multiprocessor."""

SAMPLES, LAUNCHES = 9, 20
"""Interleaved samples of each launch shape, and launches in a sample, which are one CUDA graph."""


@dataclass(frozen=True)
class Shape:
    """A launch shape; `rule` marks the one that adtrain uses."""

    threads: int
    blocks: int
    time: Time
    gbytes_per_s: float
    rule: bool


MAX_SHAPES = 12
SHAPES: tuple[Column[Shape], ...] = (
    Column("threads", lambda row: row.threads),
    Column("blocks", lambda row: row.blocks),
    Column("us", lambda row: row.time.median_ms * 1e3, CellFormat("{:.2f}".format)),
    Column("GB/s", lambda row: row.gbytes_per_s, RATE),
    Column("", lambda row: "rule" if row.rule else "", TEXT),
)


@dataclass(frozen=True)
class Shapes:
    """The launch shapes of a kernel."""

    kernel: str
    rows: list[Shape]

    def section(self) -> Section:
        rows = sorted(self.rows, key=lambda row: row.time.median_ms)
        shown = [row for i, row in enumerate(rows) if i < MAX_SHAPES or row.rule]
        title = f"{self.kernel}: launch shapes, the {MAX_SHAPES} fastest and the rule's"
        table = Table(SHAPES, shown, title=title, where="text")
        return Section(f"Launch shapes: {self.kernel}", [Picture(self._matrix), table])

    def _matrix(self) -> Markup:
        """GB/s by threads a block (across) and blocks (down); darker is faster."""
        free = [row for row in self.rows if not row.rule]
        threads, blocks = sorted({row.threads for row in free}), sorted({row.blocks for row in free})
        by_shape = {(row.blocks, row.threads): row.gbytes_per_s for row in self.rows}
        best = max(by_shape.values())

        def cell(shape: tuple[int, int]) -> tuple[float, str] | None:
            found = by_shape.get(shape)
            return None if found is None else (found / best, f"{found:,.0f}")

        matrix = page.matrix(threads, [(f"{n:,}", [cell((n, each)) for each in threads]) for n in blocks])
        rules = "; ".join(
            f"{row.threads} threads and {row.blocks:,} blocks, {row.gbytes_per_s:,.0f} GB/s"
            for row in self.rows if row.rule
        )  # fmt: skip
        note = f"GB/s by threads a block, across, and blocks, down. The rule chooses {rules}."
        return matrix + templates.note(note)


def launch_shapes() -> Shapes:
    """Times of adding two arrays of ELEMENTS at each launch shape, by CUDA events."""
    from adtrain.backends.cuda.launch_plan import LaunchPlan
    from adtrain.backends.cuda.runtime.driver import Shape as LaunchShape
    from adtrain.backends.cuda.runtime.driver import ShapedLaunch
    from adtrain.backends.cuda.runtime.launch import Graphs, Launch

    gpu: Any = backend("gpu")
    device = gpu.device
    rng = np.random.default_rng(0)
    args = [array(rng.standard_normal(ELEMENTS, np.float32), device="gpu") for _ in range(2)]
    (equation,) = stage(ops.add).program(*args).equations
    (task,) = gpu.lowering.launches(equation)
    assert isinstance(task, LaunchPlan)
    out = gpu.empty(equation.outputs[0].type)
    addresses = [*(x.buffer.address for x in args), out.address]
    launch = Launch(device, task)
    rule = launch.alone.shape
    grid = {
        LaunchShape((blocks * device.multiprocessors, 1, 1), (threads, 1, 1), 0): None
        for threads in THREADS
        for blocks in BLOCKS
        if threads <= launch.kernel.max_threads
    }
    graphs = Graphs(device)

    def milliseconds(shape: LaunchShape) -> float:
        launch.alone = ShapedLaunch(launch.kernel, shape)

        def record() -> None:
            for _ in range(LAUNCHES):
                launch.enqueue(addresses, 0, 0)  # without overlap of consecutive launches

        graphs.run(shape, record)  # keeps the device busy while the timed launches are enqueued
        before = device.event()
        graphs.run(shape, record)
        after = device.event()
        after.synchronize()
        return float(after.time_since(before)) / LAUNCHES

    ms = in_turns({shape: partial(milliseconds, shape) for shape in (rule, *grid)}, SAMPLES)
    expected = args[0].numpy() + args[1].numpy()
    if not np.array_equal(Array(out, *equation.outputs[0].type, "gpu").numpy(), expected):
        raise DeviceError("add: the result depends on the launch shape")
    rows = [
        Shape(
            shape.block[0],
            shape.grid[0],
            Timing(found, LAUNCHES).record(),
            3 * 4 * ELEMENTS / float(np.median(found)) * 1e-6,
            shape == rule,
        )
        for shape, found in ms.items()
    ]
    return Shapes(f"add of {ELEMENTS:,} float32", rows)
