from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from adtrain import ops
from adtrain.cases import CASES, integers, normal
from adtrain.core.array import ArrayType, Value
from adtrain.core.hooks import Call, Hook, hook
from adtrain.core.primitive import Primitive
from adtrain.core.trace import Tracer, base_trace
from adtrain.measure import bench_ops, timing
from adtrain.measure.bench_ops import BenchRow
from adtrain.measure.bench_sizes import BENCHES, VIEWS, Bench
from adtrain.measure.profile import profile_steps

FIELDS = [
    "op", "size", "phase", "dtype", "ms", "p20_ms", "p80_ms", "samples", "repeats", "flops", "bytes", "gflops_per_s",
    "gbytes_per_s",
]  # fmt: skip
CREATE = {"arange", "full", "ones", "ones_like", "zeros", "zeros_like", "rng_state", "matmul_precision"}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few runs as the protocol allows."""
    monkeypatch.setattr(timing, "MIN_SAMPLE_MS", 0.0)
    monkeypatch.setattr(timing, "MIN_SAMPLES", 1)
    monkeypatch.setattr(timing, "MAX_SAMPLES", 1)
    monkeypatch.setattr(timing, "WARMUP_RUNS", 0)


def rows_of(bench: Bench) -> list[BenchRow]:
    (rows,) = bench_ops.bench([bench])
    return rows


def test_every_public_operation_has_a_size() -> None:
    assert set(ops.__all__) - {each.op for each in BENCHES} - set(VIEWS) - CREATE == set()
    assert {each.op for each in BENCHES} <= set(ops.__all__)


def test_names_are_unique() -> None:
    assert len({(each.op, each.size) for each in BENCHES}) == len(BENCHES)


def test_exactly_the_operations_with_a_derivative_have_a_backward() -> None:
    differentiable = {case.op for case in CASES if case.order}
    assert {each.op for each in BENCHES if each.differentiable} <= differentiable
    assert {each.op for each in BENCHES if not each.differentiable} & differentiable == set()


class Shapes(Tracer):
    """A value of which only the type is known."""

    __slots__ = ("device", "dtype", "shape", "trace")

    def __init__(self, trace: Costs, type_: ArrayType) -> None:
        self.trace, self.shape, self.dtype, self.device = trace, type_.shape, type_.dtype, "cpu"


class Costs:
    """A base trace that adds up costs and computes nothing."""

    level = 0
    live = True
    bytes = 0

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        self.bytes += primitive.cost(args, params).bytes
        outputs = tuple(Shapes(self, t) for t in primitive.output_types(args, params))
        return outputs[0] if len(outputs) == 1 else outputs


class Constant:
    """A random generator in name, whose numbers cost nothing."""

    def normal(self, size: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(np.float32(1), size)

    def uniform(self, low: float, high: float, size: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(np.float32(low), size)

    def integers(self, low: int, high: int, size: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(np.int64(low), size)


@pytest.mark.parametrize("each", BENCHES, ids=[f"{each.op}, {each.size}" for each in BENCHES])
def test_every_size_fits_its_operation(each: Bench) -> None:
    costs = Costs()
    drawn = [make(Constant()) for make in each.inputs]  # type: ignore[arg-type]
    with base_trace(costs):
        works = bench_ops.works(each, [Shapes(costs, ArrayType(x.shape, x.dtype)) for x in drawn])
        assert list(works) == ["forward", "backward"][: 1 + each.differentiable]
        costs.bytes = 0
        for work in works.values():
            work()
    assert costs.bytes > 0


def test_a_row_a_phase_with_the_fields_that_json_gives() -> None:
    rows = rows_of(Bench("matmul", "small", ops.matmul, (normal(5, 6), normal(6, 7))))
    records = [bench_ops.record(row) for row in rows]
    assert [(record["op"], record["size"], record["phase"]) for record in records] == [
        ("matmul", "small", "forward"),
        ("matmul", "small", "backward"),
    ]
    assert all(list(record) == FIELDS for record in records)
    assert [record["flops"] for record in records] == [2 * 5 * 6 * 7, 2 * 2 * 5 * 6 * 7]
    assert records[0]["bytes"] == 4 * (5 * 6 + 6 * 7 + 5 * 7)
    assert records[0]["gflops_per_s"] == pytest.approx(records[0]["flops"] / records[0]["ms"] / 1e6)
    assert json.loads(json.dumps(records, allow_nan=False)) == records


def test_inputs_are_float32_and_always_the_same() -> None:
    each = Bench("take", "small", ops.take, (normal(5, 6), integers(5, 3)))
    first, second = bench_ops.sample(each), bench_ops.sample(each)
    assert [x.dtype for x in first] == [np.float32, np.int64]
    assert all((a.numpy() == b.numpy()).all() for a, b in zip(first, second, strict=True))


def test_the_backward_is_the_pullback_alone_and_reaches_every_floating_point_input() -> None:
    each = Bench("where", "small", lambda c, a, b: ops.where(ops.equal(c, 1), a * b, b), (
        integers(2, 9), normal(9), normal(9)))  # fmt: skip
    works = bench_ops.works(each, bench_ops.sample(each))
    assert [x.shape for x in works["backward"]()] == [(9,), (9,)]
    ran: list[tuple[str, str]] = []

    class Recorder(Hook):
        def before(self, call: Call) -> None:
            ran.append((call.primitive.name, call.phase))

    with hook(Recorder()):
        works["backward"]()
    assert ("equal", "forward") not in ran
    assert ("mul", "backward") in ran


def test_costs_are_the_same_as_in_a_profile() -> None:
    each = Bench("softmax", "small", ops.softmax, (normal(4, 9),))
    forward, backward = rows_of(each)
    for row, work in ((forward, "forward"), (backward, "backward")):
        run = bench_ops.works(each, bench_ops.sample(each))[work]
        profile = profile_steps(lambda times, run=run: [run() for _ in range(times)], 1)  # type: ignore[misc]
        assert sum(found["flops"] for found in profile.rows) == row.cost.flops
        assert sum(found["bytes"] for found in profile.rows) == row.cost.bytes


def test_numbers_that_are_not_finite_are_not_timed() -> None:
    with pytest.raises(ValueError, match="bench: log negative gives numbers that are not finite"):
        rows_of(Bench("log", "negative", lambda x: ops.log(ops.abs(x) * -1.0), (normal(4),)))
