from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from adtrain import ops
from adtrain.bench import ops as bench_ops
from adtrain.bench import sampling
from adtrain.bench.machine import Roofline, rates
from adtrain.bench.op_table import BENCHES, VIEWS, TimedOp
from adtrain.cases import CASES
from adtrain.config.records import plain
from adtrain.core.array import Value
from adtrain.core.errors import DTypeError
from adtrain.core.primitive import Primitive
from adtrain.core.trace import Call, Hook, Tracer, base_trace, hook
from adtrain.core.types import ArrayType
from adtrain.samplers import integers, normal

FIELDS = [
    "op", "variant", "n", "size", "phase", "dtype", "time", "flops", "bytes", "gflops_per_s", "gbytes_per_s",
    "of_roofline", "from_cache", "kernels",
]  # fmt: skip
CREATE = {"arange", "full", "ones", "ones_like", "zeros", "zeros_like", "rng_state", "matmul_precision"}
EXCHANGES = {"all_gather", "all_reduce", "all_to_all", "gather_shards"}
"""Timed by `bench --ranks`."""
PEAK = Roofline(1e-3, {"float32": 1e-3})
PRODUCT = TimedOp("matmul", "", {"cpu": (5,)}, lambda n: (normal(n, 6), normal(6, 7)), ops.matmul)


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_ops, "MIN_SAMPLE_MS", 0.0)
    monkeypatch.setattr(sampling, "MAX_SAMPLES", sampling.MIN_SAMPLES)
    monkeypatch.setattr(sampling, "WARMUP_RUNS", 0)


def one_of(op: str, *shapes: tuple[int, ...], f: Any = None) -> TimedOp:
    return TimedOp(op, "", {"cpu": (1,)}, lambda n: tuple(normal(*shape) for shape in shapes), f or getattr(ops, op))


def test_every_public_operation_has_sizes() -> None:
    assert set(ops.__all__) - {each.op for each in BENCHES} - set(VIEWS) - CREATE - EXCHANGES == set()
    assert {each.op for each in BENCHES} <= set(ops.__all__)


def test_names_are_unique_and_ladders_ascend() -> None:
    assert len({(each.op, each.variant) for each in BENCHES}) == len(BENCHES)
    sizes = [each.sizes[device] for each in BENCHES for device in ("cpu", "gpu")]
    assert all(3 <= len(each) <= 5 and list(each) == sorted(set(each)) for each in sizes)


def test_exactly_the_differentiable_operations_have_a_backward_phase() -> None:
    differentiable = {case.op for case in CASES if case.order}
    assert {each.op for each in BENCHES if each.differentiable} <= differentiable
    assert {each.op for each in BENCHES if not each.differentiable} & differentiable == set()


class Shapes(Tracer):
    """A value that has a type and no elements."""

    __slots__ = ("device", "dtype", "shape", "trace")

    def __init__(self, trace: Costs, type_: ArrayType) -> None:
        self.trace, self.shape, self.dtype, self.device = trace, type_.shape, type_.dtype, "cpu"


class Costs:
    """A base trace that sums up bytes and computes nothing."""

    level = 0
    live = True
    bytes = 0

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        self.bytes += primitive.cost(args, params).bytes
        outputs = tuple(Shapes(self, t) for t in primitive.output_types(args, params))
        return outputs[0] if len(outputs) == 1 else outputs


class Constant:
    """Stands in for a random generator, without using memory."""

    def normal(self, size: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(np.float32(1), size)

    def uniform(self, low: float, high: float, size: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(np.float32(low), size)

    def integers(self, low: int, high: int, size: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(np.int64(low), size)


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.exhaustive), 8])
@pytest.mark.parametrize("each", BENCHES, ids=[f"{each.op} {each.variant}" for each in BENCHES])
def test_every_bench_traces_at_any_size_and_moves_bytes(each: TimedOp, n: int) -> None:
    costs = Costs()
    drawn = [make(Constant()) for make in each.inputs(n)]  # type: ignore[arg-type]
    names = list(inspect.signature(each.f).parameters)
    with base_trace(costs):
        inputs = [Shapes(costs, ArrayType(x.shape, x.dtype)) for x in drawn]
        floats = [name for name, x in zip(names, inputs, strict=False) if x.dtype.kind == "f" and each.differentiable]
        forward, *_ = (found := bench_ops.phases(each, inputs)).values()
        assert list(found) == ["forward", *(f"backward {name}" for name in floats)]
        costs.bytes = 0
        forward[0](*forward[1])
    assert costs.bytes > 0


def test_rows_of_all_phases_have_the_fields_of_json() -> None:
    rows = bench_ops.rows(PRODUCT, 5, PEAK)
    records = [plain(row, sparse=True) for row in rows]
    assert [(record["size"], record["phase"]) for record in records] == [
        ("5x6 6x7", "forward"), ("5x6 6x7", "backward a"), ("5x6 6x7", "backward b"),
    ]  # fmt: skip
    assert all(sorted(record) == sorted(FIELDS) for record in records)
    assert [record["flops"] for record in records] == [2 * 5 * 6 * 7] * 3
    assert records[0]["bytes"] == 4 * (5 * 6 + 6 * 7 + 5 * 7)
    ms = records[0]["time"]["median_ms"]
    assert records[0]["gflops_per_s"] == pytest.approx(records[0]["flops"] / ms / 1e6)
    assert records[0]["of_roofline"] == pytest.approx(max(420, 428) / 1e6 / 1e-3 / ms)
    assert records[0]["kernels"] == [{"name": "NumPy", "launch": {}}]
    assert json.loads(json.dumps(records, allow_nan=False)) == records


@pytest.mark.exhaustive
@pytest.mark.compiled
def test_compiled_rows_name_kernel_and_threads() -> None:
    names = [[kernel.name for kernel in row.kernels] for row in bench_ops.rows(PRODUCT, 5, PEAK, "float64")]
    assert names == [["gemm_float64"]] * 3
    (row, *_) = bench_ops.rows(one_of("gelu", (7,)), 1, PEAK)
    assert [kernel.name for kernel in row.kernels] == ["loops"]
    assert row.kernels[0].launch.keys() == {"threads"}


def test_gradient_without_kernels_has_no_row() -> None:
    assert [row.phase for row in bench_ops.rows(one_of("add", (4,), (4,)), 1, PEAK)] == ["forward"]


def test_inputs_are_reproducible_and_have_the_requested_dtype() -> None:
    each = TimedOp("take", "", {"cpu": (5,)}, lambda n: (normal(n, 6), integers(5, 3)), ops.take)
    first, second = (bench_ops.sample(each, 5, "float64") for _ in range(2))
    assert [x.dtype for x in first] == [np.float64, np.int64]
    assert all((a.numpy() == b.numpy()).all() for a, b in zip(first, second, strict=True))
    whole = bench_ops.sample(each, 500, "uint8")[0].numpy()
    assert whole.dtype == np.uint8
    assert 4 < whole.max() <= 9


def test_integer_inputs_have_a_forward_phase_only() -> None:
    assert [(row.phase, row.dtype) for row in bench_ops.rows(one_of("mul", (4,), (4,)), 1, PEAK, "uint8")] == [
        ("forward", "uint8")
    ]
    with pytest.raises(DTypeError, match="exp"):
        bench_ops.rows(one_of("exp", (4,)), 5, PEAK, "int32")


def test_backward_computes_one_gradient_from_residuals() -> None:
    each = one_of("where", (9,), (9,), f=lambda a, b: ops.where(ops.less(a, b), a * b, b))
    ran: list[str] = []

    class Recorder(Hook):
        def before(self, call: Call) -> None:
            ran.append(call.primitive.name)

    inputs = bench_ops.sample(each, 1)
    found = bench_ops.phases(each, inputs)
    with hook(Recorder()):
        for name, i in (("backward a", 0), ("backward b", 1)):
            f, (ct,) = found[name]
            a, b, cotangent = inputs[0].numpy(), inputs[1].numpy(), ct.numpy()
            expected = [np.where(a < b, b, 0), np.where(a < b, a, 1)][i] * cotangent
            np.testing.assert_allclose(f(ct).numpy(), expected, rtol=1e-6)
    assert "less" not in ran
    assert "mul" in ran


def test_clock_counts_only_the_program() -> None:
    """Time between two runs does not count."""
    (row, *_) = bench_ops.rows(one_of("exp", (1 << 16,)), 1, PEAK)
    assert 0 < row.time.median_ms < 1e3
    x = ops.ones((3,))
    clock = bench_ops.DeviceClock()
    run = bench_ops.TimedProgram(bench_ops.program(ops.exp, [x]), [x], clock)
    assert clock.now() == 0
    run()
    assert (first := clock.now()) > 0
    assert clock.now() == first


def test_result_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ValueError, match="bench: log 4: a result is not finite"):
        bench_ops.rows(one_of("log", (4,), f=lambda x: ops.log(ops.abs(x) * -1.0)), 1, PEAK)


def test_row_of_no_measured_time_has_no_share_of_the_roofline() -> None:
    assert rates(1, 8, 0.0, PEAK).of_roofline is None
