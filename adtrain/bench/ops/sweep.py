"""How fast each operation is, forward and each gradient by itself, over sizes and element types."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from adtrain.bench.ops.table import Bench
from adtrain.bench.steps.profile import rate
from adtrain.bench.timing.roofline import Roofline
from adtrain.bench.timing.sampling import Timing, alternate, prefetch_batch
from adtrain.core.array import Array, Value, array
from adtrain.core.autodiff import vjp
from adtrain.core.backend import Executable, KernelRun, backend
from adtrain.core.costs import costs
from adtrain.core.primitive import Cost
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.passes import fuse, merge_common_subexpressions, remove_dead_code, simplify_reshapes

PASSES = (simplify_reshapes, merge_common_subexpressions, remove_dead_code, fuse)
"""Those of a training step, but for `fold_constants`: what a gradient keeps from the forward run is a constant here."""

DTYPES = ("float32", "float64", "uint8", "int32", "int64")

MIN_SAMPLE_MS = 0.02
"""The device's own clock needs no long samples: it does not see the host between two runs."""


class BenchRow(NamedTuple):
    """One operation at one size in one phase, as a Program of its own; the cost is that of its fused equations."""

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
        """For programs: FLOPs and bytes of one run, and the share of the device's roofline."""
        ms = self.timing.median_ms
        return {
            **{name: getattr(self, name) for name in ("op", "variant", "n", "size", "phase", "dtype")},
            "time": self.timing.record(),
            "flops": self.cost.flops,
            "bytes": self.cost.bytes,
            "gflops_per_s": rate(self.cost.flops, ms),
            "gbytes_per_s": rate(self.cost.bytes, ms),
            "of_roofline": peak.share(*self.cost, ms, self.dtype) if ms > 0 else None,
            "kernels": [kernel._asdict() for kernel in self.kernels],
        }


def rows(each: Bench, n: int, dtype: str = "float32", device: str = "cpu") -> list[BenchRow]:
    """A row for each phase at the size `n`; they are timed in turn.

    Raises:
        DTypeError: the operation does not take elements of this type.
        ValueError: a result is not finite; no such numbers are timed.
    """
    inputs = sample(each, n, dtype, device)
    size = " ".join("x".join(map(str, x.shape)) for x in inputs)
    clock = DeviceClock()
    works = {phase: OnDevice(program(f, args), args, clock) for phase, (f, args) in phases(each, inputs).items()}
    works = {phase: work for phase, work in works.items() if work.kernels}  # else it is the cotangent itself
    for work in works.values():
        if not all(np.isfinite(x).all() for x in work.results() if x.dtype.kind == "f"):
            raise ValueError(f"bench: {each.op} {size} gives numbers that are not finite")
    turns = {phase: prefetch_batch(work.run) for phase, work in works.items()}
    timings = alternate(turns, clock=clock.now, min_sample_ms=MIN_SAMPLE_MS)
    return [
        BenchRow(each.op, each.variant, n, size, phase, dtype, timings[phase], cost(work.program), work.kernels)
        for phase, work in works.items()
    ]


def program(f: Callable[..., Any], args: Sequence[Any]) -> Program:
    """The function as it runs in a training step: fused, but nothing computed beforehand."""
    return stage(f, PASSES).program(*args)


def cost(program: Program) -> Cost:
    """Of all equations, and of writing what is handed out repeated: `costs` has a repetition read where it is used."""
    flops, moved = map(sum, zip(*costs(program.equations), strict=True))
    views = [(v, e.inputs) for e in program.equations if e.primitive.view for v in e.outputs]
    repeated = [v for v, shown in views if v in program.outputs and v.size > sum(x.size for x in shown)]
    return Cost(flops, moved + sum(v.size * v.type.dtype.itemsize for v in repeated))


def sample(each: Bench, n: int, dtype: str = "float32", device: str = "cpu") -> list[Array]:
    """The inputs, always the same ones: the floating-point ones as `dtype`; where those are integers, from 0 to 9."""
    rng = np.random.default_rng(zlib.crc32(f"{each.op}/{each.variant}/{n}".encode()))
    drawn = [make(rng) for make in each.inputs(n)]
    if np.dtype(dtype).kind != "f":
        drawn = [np.minimum(np.abs(x) * 4, 9) if x.dtype.kind == "f" else x for x in drawn]
    return [array(x.astype(dtype) if x.dtype.kind == "f" else x, device=device) for x in drawn]


def phases(each: Bench, inputs: Sequence[Value]) -> dict[str, tuple[Callable[..., Value], Sequence[Value]]]:
    """What is timed, each as a function and its arguments: forward, and for each floating-point input its gradient from
    a random cotangent. What a gradient needs of the forward run is computed here."""

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
    """A clock that goes only while the device computes: as the compiled Program reads it, or CUDA events."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


class OnDevice:
    """A Program and its arguments, whose runs a clock counts."""

    def __init__(self, program: Program, args: Sequence[Any], clock: DeviceClock) -> None:
        device = program.outputs[0].device
        self.program, self.args, self.clock = program, args, clock
        self.executable: Executable = backend(device).compile(program)
        self.kernels = [kernel for kernels in self.executable.kernels for kernel in kernels]
        self.fetch = backend(device).to_numpy

    def run(self) -> Sequence[Any]:
        results, seconds = self.executable.run([x.buffer for x in self.args], timed=True)
        self.clock.seconds += sum(seconds)
        return results

    def results(self) -> list[np.ndarray]:
        return [self.fetch(buffer) for buffer in self.run()]
