"""Times one GPU kernel at many launch shapes, and all candidates for one matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from markupsafe import Markup

from adtrain import ops
from adtrain.bench.page import charts
from adtrain.bench.timing.sampling import Time, Timing, in_turns
from adtrain.bench.view import RATE, TEXT, CellFormat, Column, Picture, Section, Table
from adtrain.core.array import Array, array
from adtrain.core.backend import backend
from adtrain.core.errors import DeviceError
from adtrain.core.staging import stage
from adtrain.report import parts

ELEMENTS = 2**24
THREADS, BLOCKS = (32, 64, 128, 256, 512, 1024), (1, 2, 4, 8, 16, 32)
"""Threads a block, and blocks a multiprocessor."""

PRODUCT = 1024
"""Rows and columns of the square matrices whose product is computed by each candidate."""

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

    @property
    def mark(self) -> str:
        return "rule" if self.rule else ""


MAX_SHAPES = 12
SHAPES: tuple[Column[Shape], ...] = (
    Column("threads", lambda row: row.threads),
    Column("blocks", lambda row: row.blocks),
    Column("us", lambda row: row.time.median_ms * 1e3, CellFormat("{:.2f}".format)),
    Column("GB/s", lambda row: row.gbytes_per_s, RATE),
    Column("", lambda row: row.mark, TEXT),
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

        matrix = charts.matrix(threads, [(f"{n:,}", [cell((n, each)) for each in threads]) for n in blocks])
        rules = "; ".join(
            f"{row.threads} threads and {row.blocks:,} blocks, {row.gbytes_per_s:,.0f} GB/s"
            for row in self.rows if row.rule
        )  # fmt: skip
        note = f"GB/s by threads a block, across, and blocks, down. The rule chooses {rules}."
        return matrix + parts.note(note)


@dataclass(frozen=True)
class Candidate:
    """A kernel: its short name, its label, and microseconds; whether the tuner, or the rule, takes it."""

    kernel: str
    label: str
    us: float
    taken: bool
    rule: bool


CANDIDATES: tuple[Column[Candidate], ...] = (
    Column("candidate", lambda row: row.kernel, TEXT),
    Column("us", lambda row: row.us, CellFormat("{:.2f}".format), bar=lambda row: (row.us, "")),
    Column("", lambda row: ", ".join(mark for mark in ("taken", "rule") if getattr(row, mark)), TEXT),
)


@dataclass(frozen=True)
class Candidates:
    """The candidates for a matrix product, the fastest first."""

    problem: str
    rows: list[Candidate]

    def section(self) -> Section:
        table = Table(CANDIDATES, self.rows, title=f"{self.problem}: candidates")
        return Section(f"Candidates: {self.problem}", [table])


def launch_shapes() -> Shapes:
    """Times of adding two arrays of ELEMENTS at each launch shape, by CUDA events."""
    from adtrain.backends.cuda.launch_plan import LaunchPlan
    from adtrain.backends.cuda.runtime.graph import Graphs
    from adtrain.backends.cuda.runtime.launch import Launch
    from adtrain.backends.cuda.runtime.loaded_kernel import Shape as LaunchShape
    from adtrain.backends.cuda.runtime.loaded_kernel import ShapedLaunch

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


def candidates() -> Candidates:
    """Microseconds of each candidate for a matrix product, the fastest first."""
    from adtrain.backends.cuda.tuner.measure import distinct
    from adtrain.bench.candidates import of_equations

    args = [array(np.zeros((PRODUCT, PRODUCT), np.float32), device="gpu")] * 2
    (problem,) = of_equations(stage(ops.matmul).program(*args).equations)
    labels = [each.kernel for each in problem.candidates]
    rows = [
        Candidate(name, label, each.us, each.chosen, each.rule)
        for name, label, each in zip(distinct(labels), labels, problem.candidates, strict=True)
    ]
    return Candidates(f"matmul {PRODUCT}x{PRODUCT}x{PRODUCT}, float32", rows)
