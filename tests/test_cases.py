"""The case table: complete, and right at every order by differences and by transposition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops
from adtrain.cases import CASES, Case
from adtrain.core.hooks import Call, Hook, hook
from adtrain.core.primitive import PRIMITIVES
from adtrain.measure.gradcheck import check_cases

ids = [f"{case.op}, {case.name}" for case in CASES]
COMPOSED_OF_CASES = {"arange", "ones", "ones_like", "zeros", "zeros_like", "full", "rng_state"}


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_derivatives_agree_with_differences(case: Case) -> None:
    rows = list(check_cases([case], orders=(1, 2, 3)))
    assert len(rows) == case.order
    assert [row for row in rows if not row.passed] == []


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.linear], ids=[i for i, c in zip(ids, CASES, strict=True) if c.linear]
)
def test_the_pullback_of_a_linear_map_is_its_transpose(case: Case) -> None:
    drawn = case.sample()
    rng = np.random.default_rng(5)
    for position in case.linear:

        def apply(x: Any, position: Any = position) -> Any:
            return case.f(*drawn[:position], x, *drawn[position + 1 :])

        x = ad.array(rng.normal(size=drawn[position].shape))
        _, pullback = ad.vjp(apply, drawn[position])  # at another point: the derivative is the same everywhere
        image = apply(x).numpy()
        y = rng.normal(size=image.shape)
        left, right = np.vdot(image, y), np.vdot(x.numpy(), pullback(y)[0].numpy())
        assert left == pytest.approx(right, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_float32_computes_the_same_in_float32(case: Case) -> None:
    exact, single = (case.f(*case.sample(dtype)) for dtype in ("float64", "float32"))
    for a, b in zip(*(out if isinstance(out, tuple) else (out,) for out in (exact, single)), strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=2e-5, atol=2e-5)
        if case.op not in ("astype", "create", "one_hot", "random_uniform"):
            assert b.dtype == np.float32 or a.dtype != np.float64


def test_names_are_unique() -> None:
    assert len(set(ids)) == len(ids)


def test_every_public_operation_has_a_case() -> None:
    named = {case.op for case in CASES}
    assert set(ops.__all__) - named - COMPOSED_OF_CASES == set()
    assert named - set(ops.__all__) == {"custom_vjp", "create"}


def test_every_primitive_runs_in_some_case() -> None:
    ran: set[str] = set()

    class Recorder(Hook):
        def after(self, call: Call) -> None:
            ran.add(call.primitive.name)

    with hook(Recorder()):
        for case in CASES:
            case.f(*case.sample())
        list(check_cases(CASES, orders=(2,)))
    assert set(PRIMITIVES) - ran == set()


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_costs_are_whole_numbers_and_bytes_cover_the_result(case: Case) -> None:
    calls: list[Call] = []

    class Recorder(Hook):
        def after(self, call: Call) -> None:
            calls.append(call)

    with hook(Recorder()):
        case.f(*case.sample())
    for call in calls:
        cost = call.primitive.cost(call.args, call.params)
        written = sum(int(np.prod(t.shape)) * t.dtype.itemsize for t in call.outputs)
        assert isinstance(cost.flops, int)
        assert cost.flops >= 0
        assert cost.bytes >= written or call.primitive.view


@pytest.mark.parametrize(
    ("op", "rule"),
    [
        ("exp", lambda out, x: lambda ct: ct * out * 1.0001),  # a wrong factor
        ("tanh", lambda out, x: lambda ct: ct * (1.0 - ops.stop_gradient(out * out))),  # wrong from order 2 on
        ("sin", lambda out, x: lambda ct: ct.sum()),  # a wrong shape
    ],
)
def test_a_broken_rule_is_caught(op: Any, rule: Any) -> None:
    primitive = PRIMITIVES[op]
    right = primitive.vjp
    object.__setattr__(primitive, "vjp", [rule])
    try:
        rows = list(check_cases([case for case in CASES if case.op == op]))
    finally:
        object.__setattr__(primitive, "vjp", right)
    assert any(not row.passed for row in rows)
