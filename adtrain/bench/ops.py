"""Single operations over sizes: the forward pass, and each gradient by itself."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

from adtrain.bench.op_table import ELEMENTS, Bench
from adtrain.bench.timing.protocol import observed_load, protocol
from adtrain.bench.timing.roofline import Roofline, known_or_measured, limits
from adtrain.bench.timing.sampling import Timing, alternate, rate, repeatedly
from adtrain.core.array import Array, Value, array
from adtrain.core.autodiff import vjp
from adtrain.core.backend import Executable, KernelRun, backend
from adtrain.core.costs import costs
from adtrain.core.errors import AdtrainError, DTypeError, OptionError
from adtrain.core.primitive import Cost
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.custom_op import OwnOp
from adtrain.passes import fuse, merge_common_subexpressions, remove_dead_code, simplify_reshapes
from adtrain.samplers import Sampler

PASSES = (simplify_reshapes, merge_common_subexpressions, remove_dead_code, fuse)
"""The passes of a training step without `fold_constants`, because a gradient's residuals are constants here."""

DTYPES = ("float32", "float64", "uint8", "int32", "int64")

MIN_SAMPLE_MS = 0.02
"""Short, because the device's own clock excludes the host between two runs."""


class BenchRow(NamedTuple):
    """One operation at one size in one phase, as a Program of its own. `cost` is that of its fused equations."""

    op: str
    variant: str
    n: int
    size: str
    phase: str
    dtype: str
    timing: Timing
    cost: Cost
    kernels: Sequence[KernelRun]

    def record(self, peak: Roofline) -> dict[str, Any]:
        """JSON values: FLOPs and bytes of one run, rates, and the share of the device's roofline."""
        ms = self.timing.median_ms
        return {
            **{name: getattr(self, name) for name in ("op", "variant", "n", "size", "phase", "dtype")},
            "time": self.timing.record(),
            "flops": self.cost.flops,
            "bytes": self.cost.bytes,
            "gflops_per_s": rate(self.cost.flops, ms),
            "gbytes_per_s": rate(self.cost.bytes, ms),
            **limits(*self.cost, ms, peak, self.dtype)._asdict(),
            "kernels": [kernel._asdict() for kernel in self.kernels],
        }


def result(
    benches: Sequence[Bench],
    sizes: Sequence[int] | None,
    dtype: str,
    device: str,
    strict: bool,
    progress: Callable[[str], object],
    track: Callable[[Sequence[tuple[Bench, int]]], Iterable[tuple[Bench, int]]],
) -> dict[str, Any]:
    """The result of `adtrain bench ops`, as JSON values.

    Args:
        sizes: of the arrays, by default each bench's own.
        strict: whether it is an error if an operation does not take `dtype`; otherwise the operation is left out.
        progress: called with lines for the user.
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
    found: list[BenchRow] = []
    refused: dict[str, None] = {}
    for each, n in track(problems):
        if each.op in refused:
            continue
        try:
            found += rows(each, n, dtype, device)
        except DTypeError:
            if strict:
                raise
            refused[each.op] = None
    if refused:
        progress(f"bench: {len(refused)} operations do not take {dtype} and are left out: {', '.join(refused)}")
    if not found:
        raise AdtrainError(f"--dtype {dtype}: none of these operations takes it")
    return {"kind": "ops", "protocol": conditions, "ops": [row.record(peak) for row in found]}


def rows(each: Bench, n: int, dtype: str = "float32", device: str = "cpu") -> list[BenchRow]:
    """A row for each phase at the size `n`, timed in interleaved samples.

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
        BenchRow(each.op, each.variant, n, size, phase, dtype, timings[phase], cost(run.program), run.kernels)
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


def sample(each: Bench, n: int, dtype: str = "float32", device: str = "cpu") -> list[Array]:
    """The inputs, the same at every call. Floating-point ones become `dtype`; of integer types they are 0 to 9."""
    rng = np.random.default_rng(zlib.crc32(f"{each.op}/{each.variant}/{n}".encode()))
    drawn = [make(rng) for make in each.inputs(n)]
    if np.dtype(dtype).kind != "f":
        drawn = [np.minimum(np.abs(x) * 4, 9) if x.dtype.kind == "f" else x for x in drawn]
    return [array(x.astype(dtype) if x.dtype.kind == "f" else x, device=device) for x in drawn]


def phases(each: Bench, inputs: Sequence[Value]) -> dict[str, tuple[Callable[..., Value], Sequence[Value]]]:
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


def own_bench(op: OwnOp) -> Bench:
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
    return Bench(op.name, "samples", sizes, inputs, _named(op), differentiable)


def _named(op: OwnOp) -> Callable[..., Any]:
    """The operation with named parameters, which name the gradients."""
    if op.custom is None:
        return op.f
    return wraps(op.custom.primitive.reference)(lambda *args: op.f(*args))
