"""How fast each operation is, forward and backward, at the sizes of `bench_sizes`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np

from adtrain.core.array import Array, Value, array
from adtrain.core.autodiff import vjp
from adtrain.core.backend import backend
from adtrain.core.hooks import Call, Hook, hook
from adtrain.core.primitive import Cost
from adtrain.measure.bench_sizes import Bench
from adtrain.measure.profile import rate
from adtrain.measure.timing import Timing, measure


class BenchRow(NamedTuple):
    """One operation at one size in one phase. Cost is the sum over the primitives that run."""

    op: str
    size: str
    phase: str
    dtype: str
    timing: Timing
    cost: Cost

    @property
    def gflops_per_s(self) -> float | None:
        return rate(self.cost.flops, self.timing.median_ms)

    @property
    def gbytes_per_s(self) -> float | None:
        return rate(self.cost.bytes, self.timing.median_ms)


class BenchRecord(TypedDict):
    """A `BenchRow` for programs: times in ms, flops and bytes of one run."""

    op: str
    size: str
    phase: str
    dtype: str
    ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    repeats: int
    flops: int
    bytes: int
    gflops_per_s: float | None
    gbytes_per_s: float | None


def bench(benches: Iterable[Bench], device: str = "cpu") -> Iterator[list[BenchRow]]:
    """For each bench its rows, forward and, where there is a derivative, backward; in float32.

    Forward is a call of the operation outside of any differentiation; backward is a call of its pullback, with respect
    to all floating-point inputs, on residuals kept from an earlier forward run.

    Raises ValueError where a result is not finite, so that no such numbers are timed.
    """
    for each in benches:
        yield _rows(each, device)


def record(row: BenchRow) -> BenchRecord:
    timing = row.timing
    return {
        "op": row.op,
        "size": row.size,
        "phase": row.phase,
        "dtype": row.dtype,
        "ms": timing.median_ms,
        "p20_ms": timing.p20_ms,
        "p80_ms": timing.p80_ms,
        "samples": timing.samples,
        "repeats": timing.repeats,
        "flops": row.cost.flops,
        "bytes": row.cost.bytes,
        "gflops_per_s": row.gflops_per_s,
        "gbytes_per_s": row.gbytes_per_s,
    }


def _rows(each: Bench, device: str) -> list[BenchRow]:
    finish = backend(device).synchronize
    rows = []
    for phase, work in works(each, sample(each, device)).items():
        cost = _cost(each, work)
        rows.append(BenchRow(each.op, each.size, phase, "float32", measure(work, finish), cost))
    return rows


def sample(each: Bench, device: str = "cpu") -> list[Array]:
    """The inputs, floating-point ones as float32: always the same ones."""
    rng = np.random.default_rng(zlib.crc32(f"{each.op}/{each.size}".encode()))
    drawn = [make(rng) for make in each.inputs]
    return [array(x.astype(np.float32) if x.dtype.kind == "f" else x, device=device) for x in drawn]


def works(each: Bench, inputs: Sequence[Value]) -> dict[str, Callable[[], Any]]:
    """What is timed, by phase. The pullback's residuals and cotangent are computed here."""

    def forward(*floats: Value) -> Any:
        given = iter(floats)
        out = each.f(*(next(given, x) if x.dtype.kind == "f" else x for x in inputs))
        return out[0] if isinstance(out, tuple) else out

    found: dict[str, Callable[[], Any]] = {"forward": forward}
    if each.differentiable:
        out, pullback = vjp(forward, *(x for x in inputs if x.dtype.kind == "f"))
        numbers = np.random.default_rng(0).normal(size=out.shape).astype(np.float32)
        ct = array(numbers, device=out.device)
        found["backward"] = lambda: pullback(ct)
    return found


class _CostCounter(Hook):
    def __init__(self) -> None:
        self.flops = self.bytes = 0

    def before(self, call: Call) -> None:
        cost = call.primitive.cost(call.args, call.params)
        self.flops += cost.flops
        self.bytes += cost.bytes


def _cost(each: Bench, work: Callable[[], Any]) -> Cost:
    counter = _CostCounter()
    with hook(counter):
        out = work()
    for x in out if isinstance(out, tuple) else (out,):
        if x.dtype.kind == "f" and not np.isfinite(x.numpy()).all():
            raise ValueError(f"bench: {each.op} {each.size} gives numbers that are not finite")
    return Cost(counter.flops, counter.bytes)
