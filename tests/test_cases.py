"""The case table is complete, and its derivatives agree with finite differences and transposes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sweeps import cases_of

import adtrain as ad
from adtrain import ops
from adtrain.cases import CASES, Case
from adtrain.core.precision import TERMS, TF32
from adtrain.core.primitive import PRIMITIVES
from adtrain.core.trace import Call, Hook, hook
from adtrain.gradcheck import check_cases


def name_of(case: Case) -> str:
    return f"{case.op}, {case.name}"


ids = list(map(name_of, CASES))
SMOOTH = [case for case in CASES if case.order]
FIRST_SMOOTH = {case.op: case for case in reversed(SMOOTH)}
"""The first of the smooth cases of each operation."""
MADE_BY_PASSES = {
    "to_bfloat16",
    "from_bfloat16",
    "matmul_bfloat16",
    "bfloat16_rest",
    *(f"conv2d_{terms}" for terms in TERMS),
    *(f"conv2d_input_grad_{terms}" for terms in TERMS),
    *(f"conv2d_weight_grad_{terms}" for terms in TERMS if terms != TF32),
    *(f"{pool}_channels_last" for pool in ("max_pool2d", "max_pool2d_put", "max_pool2d_pick", "avg_pool2d")),
    "avg_pool2d_put_channels_last",
    "fused",
    "split_members",
    "stack_members",
    "fusion_barrier",
    "exchange_done",
    "subview",
    "concat_view",
}  # the tests of passes and Programs cover these
EXEMPT = {"arange", "ones", "ones_like", "zeros", "zeros_like", "full", "matmul_precision", "rng_state"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", SMOOTH, ids=map(name_of, SMOOTH))
def test_derivatives_of_all_orders_agree(case: Case) -> None:
    rows = list(check_cases([case], orders=(1, 2, 3, 4)))
    assert len(rows) == 2 * case.order
    assert [row for row in rows if not row.passed] == []


def test_elementwise_primitives_are_checked_to_order_4_and_all_cases_to_order_3() -> None:
    checked: set[str] = set()

    class Recorder(Hook):
        def after(self, call: Call) -> None:
            checked.add(call.primitive.name)

    with hook(Recorder()):
        for case in CASES:
            assert case.order in (0, 3, 4)
            if case.order == 4:
                case.f(*case.sample())
    smooth = {p.name for p in PRIMITIVES.values() if p.expression is not None and p.differentiable}
    assert smooth - checked == {"astype", "gelu_derivative"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name_of(case), marks=() if case is FIRST_SMOOTH[case.op] else pytest.mark.exhaustive)
        for case in SMOOTH
    ],
)
def test_derivatives_agree_with_finite_differences_and_forward_with_reverse_mode(case: Case) -> None:
    orders = {1, case.order}  # the highest order differentiates the rules of all orders below
    rows = list(check_cases([case], orders=tuple(orders)))
    assert len(rows) == 2 * len(orders)
    assert [row for row in rows if not row.passed] == []


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.linear], ids=[i for i, c in zip(ids, CASES, strict=True) if c.linear]
)
def test_the_pullback_of_a_linear_map_is_its_transpose(case: Case) -> None:
    inputs = case.sample()
    rng = np.random.default_rng(5)
    for position in case.linear:

        def apply(x: Any, position: Any = position) -> Any:
            return case.f(*inputs[:position], x, *inputs[position + 1 :])

        x = ad.array(rng.normal(size=inputs[position].shape))
        _, pullback = ad.vjp(apply, inputs[position])  # not at x: the derivative is the same everywhere
        image = apply(x).numpy()
        y = rng.normal(size=image.shape)
        left, right = np.vdot(image, y), np.vdot(x.numpy(), pullback(y)[0].numpy())
        assert left == pytest.approx(right, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("case", cases_of(CASES))
def test_float32_results_are_float32_and_close_to_float64(case: Case) -> None:
    exact, single = (case.f(*case.sample(dtype)) for dtype in ("float64", "float32"))
    for a, b in zip(*(out if isinstance(out, tuple) else (out,) for out in (exact, single)), strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=2e-5, atol=2e-5)
        if case.op not in ("astype", "create", "one_hot", "random_uniform", "random_normal"):
            assert b.dtype == np.float32 or a.dtype != np.float64


@pytest.mark.parametrize("case", cases_of([c for c in CASES if c.order]))
def test_float32_gradients_are_float32_and_close_to_float64(case: Case) -> None:
    found = []
    for dtype in ("float64", "float32"):
        args = case.sample(dtype)
        floats = [i for i, x in enumerate(args) if x.dtype.kind == "f"]

        def f(*values: Any, args: Any = args, floats: Any = floats) -> Any:
            replaced = dict(zip(floats, values, strict=True))
            out = case.f(*(replaced.get(i, x) for i, x in enumerate(args)))
            return out[0] if isinstance(out, tuple) else out

        out, pullback = ad.vjp(f, *(args[i] for i in floats))
        found.append(pullback(ops.ones_like(out)))
    for exact, single in zip(*found, strict=True):
        assert single.dtype == np.float32
        np.testing.assert_allclose(single.numpy(), exact.numpy(), rtol=1e-4, atol=1e-4)


def test_conversions_between_floating_point_types_are_differentiable() -> None:
    def there_and_back(x: Any) -> Any:
        return ops.astype(ops.square(ops.astype(x, "float32")), "float64").sum()

    value, slope = ad.value_and_grad(there_and_back)(np.ones(2))
    assert (value.dtype, slope.dtype, slope.numpy().tolist()) == (np.float64, np.float64, [2, 2])


KNOWN_COSTS = [
    (lambda: ops.matmul(np.ones((3, 4)), np.ones((4, 5))), 2 * 3 * 4 * 5, 8 * (12 + 20 + 15)),
    (lambda: ops.conv2d(np.ones((2, 4, 5, 5)), np.ones((6, 2, 3, 3)), stride=2, groups=2), 2 * 2 * 6 * 2 * 2 * 2 * 9,
     8 * (200 + 108 + 48)),
    (lambda: ops.sum(np.ones((3, 4)), 0), 12, 8 * (12 + 4)),
    (lambda: ops.add(np.ones((3, 4)), np.ones((3, 4))), 12, 8 * 36),
    (lambda: ops.avg_pool2d(np.ones((1, 2, 4, 4)), 2), 8 * 4, 8 * (32 + 8)),
    (lambda: ops.transpose(np.ones((3, 4))), 0, 8 * 24),
    (lambda: ops.reshape(np.ones((3, 4)), (12,)), 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("run", "flops", "moved"), KNOWN_COSTS)
def test_costs_equal_hand_counts(run: Any, flops: int, moved: int) -> None:
    calls: list[Call] = []

    class Recorder(Hook):
        def after(self, call: Call) -> None:
            calls.append(call)

    with hook(Recorder()):
        run()
    costs = [call.primitive.cost(call.args, call.params) for call in calls]
    assert (sum(c.flops for c in costs), sum(c.bytes for c in costs)) == (flops, moved)


def test_names_are_unique() -> None:
    assert len(set(ids)) == len(ids)


def test_every_public_operation_has_a_case() -> None:
    named = {case.op for case in CASES}
    assert set(ops.__all__) - named - EXEMPT == set()
    assert named - set(ops.__all__) == {"custom_vjp", "create"}


@pytest.mark.exhaustive
def test_every_primitive_runs_in_some_case() -> None:
    ran: set[str] = set()

    class Recorder(Hook):
        def after(self, call: Call) -> None:
            ran.add(call.primitive.name)

    with hook(Recorder()):
        for case in CASES:
            case.f(*case.sample())
        list(check_cases(CASES, orders=(2,)))
    of_backends = {p.name for p in PRIMITIVES.values() if p.shape.__module__.startswith("adtrain.backends")}
    assert set(PRIMITIVES) - ran - of_backends == MADE_BY_PASSES


@pytest.mark.parametrize(
    ("op", "rule"),
    [
        ("exp", lambda out, x: lambda ct: ct * out * 1.0001),  # a wrong factor
        ("tanh", lambda out, x: lambda ct: ct * (1.0 - ops.stop_gradient(out * out))),  # wrong from order 2 on
        ("sin", lambda out, x: lambda ct: ct.sum()),  # a wrong shape
    ],
)
def test_gradcheck_detects_a_wrong_derivative(op: Any, rule: Any) -> None:
    primitive = PRIMITIVES[op]
    right = primitive.vjp
    object.__setattr__(primitive, "vjp", [rule])
    try:
        rows = list(check_cases([case for case in CASES if case.op == op]))
    finally:
        object.__setattr__(primitive, "vjp", right)
    assert any(not row.passed for row in rows)
