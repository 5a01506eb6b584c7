"""Single operations over sizes: the forward pass, and each gradient by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
from markupsafe import Markup

from adtrain.bench import page
from adtrain.bench.machine import Progress, Rates, Roofline, known_or_measured, observed_load, protocol, rates
from adtrain.bench.op_table import ELEMENTS, TimedOp
from adtrain.bench.page import Dot, Line
from adtrain.bench.result import NamedTime, TimedResult, named
from adtrain.bench.sampling import Time, alternate, repeatedly
from adtrain.bench.view import (
    KERNELS,
    MS,
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
    joined,
    milliseconds,
    of_peak,
    rate,
)
from adtrain.core.array import Array, Value, array
from adtrain.core.autodiff import vjp
from adtrain.core.backend import Executable, KernelRun, backend
from adtrain.core.errors import AdtrainError, DTypeError, OptionError
from adtrain.core.primitive import Cost
from adtrain.core.program import Program, costs
from adtrain.core.staging import stage
from adtrain.custom_ops import OwnOp
from adtrain.passes import fuse, merge_common_subexpressions, remove_dead_code, simplify_reshapes
from adtrain.report.plot import Point
from adtrain.samplers import Sampler
from adtrain.table import TEXT, CellFormat

PASSES = (simplify_reshapes, merge_common_subexpressions, remove_dead_code, fuse)
"""The passes of a training step without `fold_constants`, because a gradient's residuals are constants here."""

DTYPES = ("float32", "float64", "uint8", "int32", "int64")

MIN_SAMPLE_MS = 0.02
"""Short, because the device's own clock excludes the host between two runs."""


@dataclass(frozen=True, kw_only=True)
class OpTime(Rates):
    """The time of one operation at one size in one phase; FLOPs and bytes are those of one run."""

    op: str
    variant: str
    n: int
    size: str
    phase: str
    dtype: str
    time: Time
    kernels: list[KernelRun]

    @property
    def name(self) -> str:
        return joined(self.op, self.variant)


COLUMNS: tuple[Column[OpTime], ...] = (
    Column("operation", lambda row: row.name, CellFormat(left=True, breaks="_")),
    Column("size", lambda row: row.size, TEXT),
    Column("phase", lambda row: row.phase, TEXT, rank=1),
    Column("ms", lambda row: row.time, MS),
    Column("95% interval", lambda row: row.time, RANGE, rank=7),
    Column("p20-p80", lambda row: f"{milliseconds(row.time.p20_ms)}-{milliseconds(row.time.p80_ms)}", rank=9,
           where="text"),
    *RATES[:2],
    Column("of peak", of_peak, rank=2, bar=lambda row: (min(row.of_roofline or 0.0, 1.0), "")),
    *KERNELS,
)  # fmt: skip
PHASE_COLOURS = ("forward", "backward", "update", "series-4", "series-6")
MAX_CURVES = 12


@dataclass(frozen=True, kw_only=True)
class Ops(TimedResult):
    """The result of `adtrain bench ops`."""

    kind = "ops"
    ops: list[OpTime]

    def times(self) -> Iterator[NamedTime]:
        for row in self.ops:
            dtype = "" if row.dtype == "float32" else row.dtype
            yield named(joined(row.op, row.variant, row.size, row.phase, dtype), row.time)

    def view(self) -> View:
        rows, peak = self.ops, self.protocol.roofline
        largest: dict[tuple[str, str, str], OpTime] = {}
        for row in sorted(rows, key=lambda row: row.n):
            largest[row.op, row.variant, row.phase] = row
        worst = sorted(largest.values(), key=lambda row: row.of_roofline or float("inf"))
        best = {
            "GFLOP/s": max((row.gflops_per_s or 0.0 for row in rows), default=0.0),
            "GB/s": max((row.gbytes_per_s or 0.0 for row in rows), default=0.0),
        }
        tiles = [("operations", f"{len({row.op for row in rows})}"), ("times", f"{len(rows)}")]
        first = Note("The operations furthest from the peak come first.")
        table = partial(Table, COLUMNS, kind="operations")
        parts: list[Part] = [Tiles([*tiles, *((f"most {unit}", f"{most:,.1f}") for unit, most in best.items())])]
        if peak:
            parts.append(Section("Roofline", [Picture(lambda: _roofline(rows, peak))], where="page"))
        parts += [
            Section("At the largest size", [table(worst), first], where="page"),
            Section("Share of the peak over the size", list(_curves(worst, rows)), where="page"),
            Section("At every size", [table(rows, cache_note(rows))], folded=f"{len(rows)} times"),
        ]
        return View("Operations", parts)


def _roofline(rows: Sequence[OpTime], peak: Roofline) -> Markup:
    groups: dict[str, list[Dot]] = {"forward": [], "backward": []}
    for row in rows:
        of = of_peak(row)
        of += " of peak" if of.endswith("%") else ""
        tooltip = f"{row.name} {row.size}, {row.phase}: {rate(row.gflops_per_s or 0.0)} GFLOP/s, {of}"
        groups[row.phase.split()[0]].append(Dot(row.op, tooltip, row.flops, row.bytes, row.time.median_ms))
    return page.rooflines(groups, peak, rows[0].dtype)


def _curves(order: Iterable[OpTime], rows: Sequence[OpTime]) -> Iterator[Part]:
    """A chart for each operation that was timed at several sizes, with a line for each phase."""
    drawn: list[Callable[[], Markup]] = []
    for op, variant in dict.fromkeys((row.op, row.variant) for row in order):
        points: dict[str, list[Point]] = {}
        for row in sorted(rows, key=lambda row: row.n):
            if (row.op, row.variant) == (op, variant) and row.of_roofline:
                points.setdefault(row.phase, []).append((row.n, row.of_roofline * 100))
        several = {phase: found for phase, found in points.items() if len(found) > 1}
        lines = [Line(phase, PHASE_COLOURS[i % len(PHASE_COLOURS)], several[phase]) for i, phase in enumerate(several)]
        if lines:
            drawn.append(partial(page.figure, joined(op, variant), "n", "% of peak", lines, level=100.0))
    shown, hidden = drawn[:MAX_CURVES], drawn[MAX_CURVES:]
    yield Picture(lambda: page.figures([draw() for draw in shown]))
    if hidden:
        summary = f"{len(hidden)} more operations"
        yield Picture(lambda: page.details(summary, page.figures([draw() for draw in hidden])))


def result(
    benches: Sequence[TimedOp],
    sizes: Sequence[int] | None,
    dtype: str,
    device: str,
    strict: bool,
    progress: Progress,
    track: Callable[[Sequence[tuple[TimedOp, int]]], Iterable[tuple[TimedOp, int]]],
) -> Ops:
    """The result of `adtrain bench ops`.

    Args:
        sizes: of the arrays, by default each bench's own.
        strict: whether it is an error if an operation does not take `dtype`; otherwise the operation is left out.
        track: wraps the problems in a progress bar.

    Raises:
        DTypeError: `strict`, and an operation does not take `dtype`.
        AdtrainError: no operation takes it.
    """
    load = observed_load(progress)
    peak = known_or_measured(device, progress)
    conditions = protocol(device, load, peak, MIN_SAMPLE_MS)
    problems = [(each, n) for each in benches for n in sizes or each.sizes[device]]
    count = len(problems)
    what = "1 operation" if count == 1 else f"{count} operations and sizes"
    progress(f"bench: timing {what} in {dtype}, forward and backward")
    found: list[OpTime] = []
    refused: dict[str, None] = {}
    for each, n in track(problems):
        if each.op in refused:
            continue
        try:
            found += rows(each, n, peak, dtype, device)
        except DTypeError:
            if strict:
                raise
            refused[each.op] = None
    if refused:
        progress(f"bench: {len(refused)} operations do not take {dtype} and are left out: {', '.join(refused)}")
    if not found:
        raise AdtrainError(f"--dtype {dtype}: none of these operations takes it")
    return Ops(protocol=conditions, ops=found)


def rows(each: TimedOp, n: int, peak: Roofline, dtype: str = "float32", device: str = "cpu") -> list[OpTime]:
    """A row for each phase at the size `n`, timed in interleaved samples; FLOPs and bytes are of fused equations.

    Raises:
        DTypeError: the operation does not take elements of this type.
        ValueError: a result is not finite, so that the time would not be typical.
    """
    inputs = sample(each, n, dtype, device)
    size = " ".join("x".join(map(str, x.shape)) for x in inputs)
    clock = DeviceClock()
    runs = {phase: TimedProgram(program(f, args), args, clock) for phase, (f, args) in phases(each, inputs).items()}
    runs = {phase: run for phase, run in runs.items() if run.kernels}  # without kernels it returns its argument
    for run in runs.values():
        if not all(np.isfinite(x).all() for x in run.results() if x.dtype.kind == "f"):
            raise ValueError(f"bench: {each.op} {size}: a result is not finite")
    workloads = {phase: repeatedly(run) for phase, run in runs.items()}
    timings = alternate(workloads, clock=clock.now, min_sample_ms=MIN_SAMPLE_MS)
    return [
        OpTime(
            op=each.op,
            variant=each.variant,
            n=n,
            size=size,
            phase=phase,
            dtype=dtype,
            time=timings[phase].record(),
            kernels=run.kernels,
            **vars(rates(*cost(run.program), timings[phase].median_ms, peak, dtype)),
        )
        for phase, run in runs.items()
    ]


def program(f: Callable[..., Any], args: Sequence[Any]) -> Program:
    """The function as a fused Program, without constant folding."""
    return stage(f, PASSES).program(*args)


def cost(program: Program) -> Cost:
    """The cost of all equations, and of writing outputs that repeat an input: `costs` counts a broadcast only where an
    equation reads it."""
    flops, moved = map(sum, zip(*costs(program.equations), strict=True))
    views = [(v, e.inputs) for e in program.equations if e.primitive.view for v in e.outputs]
    repeated = [v for v, shown in views if v in program.outputs and v.size > sum(x.size for x in shown)]
    return Cost(flops, moved + sum(v.size * v.type.dtype.itemsize for v in repeated))


def sample(each: TimedOp, n: int, dtype: str = "float32", device: str = "cpu") -> list[Array]:
    """The inputs, the same at every call. Floating-point ones become `dtype`; of integer types they are 0 to 9."""
    drawn = each.arrays(n)
    if np.dtype(dtype).kind != "f":
        drawn = [np.minimum(np.abs(x) * 4, 9) if x.dtype.kind == "f" else x for x in drawn]
    return [array(x.astype(dtype) if x.dtype.kind == "f" else x, device=device) for x in drawn]


def phases(each: TimedOp, inputs: Sequence[Value]) -> dict[str, tuple[Callable[..., Value], Sequence[Value]]]:
    """Phases to time, each as a function and its arguments: "forward", and "backward NAME" for the gradient of each
    floating-point input from a random cotangent. The residuals of gradients are computed here, before timing."""

    def forward(*args: Value) -> Any:
        out = each.f(*args)
        return out[0] if isinstance(out, tuple) else out

    found: dict[str, tuple[Callable[..., Value], Sequence[Value]]] = {"forward": (forward, inputs)}
    names = list(inspect.signature(each.f).parameters)
    for i, x in enumerate(inputs):
        if each.differentiable and x.dtype.kind == "f":
            out, pullback = vjp(lambda x, i=i: forward(*inputs[:i], x, *inputs[i + 1 :]), x)
            numbers = np.random.default_rng(i).standard_normal(out.shape, out.dtype.type)
            gradient = lambda ct, pullback=pullback: pullback(ct)[0]  # noqa: E731
            found[f"backward {names[i]}"] = gradient, [array(numbers, device=out.device)]
    return found


class DeviceClock:
    """Seconds that the device computed, as the compiled Program's clock or CUDA events measure them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


class TimedProgram:
    """A Program with its arguments, compiled. Calling it runs it, and adds the device's seconds to the clock."""

    def __init__(self, program: Program, args: Sequence[Any], clock: DeviceClock) -> None:
        device = program.outputs[0].device
        self.program, self.args, self.clock = program, args, clock
        self.executable: Executable = backend(device).compile(program)
        self.kernels = [kernel for kernels in self.executable.kernels for kernel in kernels]
        self.fetch = backend(device).to_numpy

    def __call__(self) -> Sequence[Any]:
        results, seconds = self.executable.run([x.buffer for x in self.args], timed=True)
        self.clock.seconds += sum(seconds)
        return results

    def results(self) -> list[np.ndarray]:
        return [self.fetch(buffer) for buffer in self()]


def own_bench(op: OwnOp) -> TimedOp:
    """The operation on its samples: at the sizes of ELEMENTS if the samples have one, otherwise at their own.

    Raises OptionError where it has no samples, or a size is asked for and its samples have one size only.
    """
    if op.samples is None:
        raise OptionError(f"{op.place}: custom_op {op.name} has no samples to time it with; give samples=")
    samples = op.samples
    sized = len(inspect.signature(samples).parameters) > 1

    def drawn(*size: int) -> list[np.ndarray]:
        return [np.asarray(x) for x in samples(np.random.default_rng(0), *size)]

    def inputs(n: int) -> tuple[Sampler, ...]:
        arrays = drawn(n) if sized else drawn()
        if not sized and n != sizes["cpu"][0]:
            raise OptionError(f"{op.place}: the samples of {op.name} have one size; give them a second parameter")
        return tuple(lambda rng, x=x: x for x in arrays)

    largest = 0 if sized else max(x.size for x in drawn())
    sizes = ELEMENTS if sized else {"cpu": (largest,), "gpu": (largest,)}
    differentiable = op.custom is None or op.custom.has_vjp
    return TimedOp(op.name, "samples", sizes, inputs, _named(op), differentiable)


def _named(op: OwnOp) -> Callable[..., Any]:
    """The operation with named parameters, which name the gradients."""
    if op.custom is None:
        return op.f
    return wraps(op.custom.primitive.reference)(lambda *args: op.f(*args))
