"""Staged functions: the same bits as eager ones, traced again only for new types, and errors."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from sweeps import cases_of

import adtrain as ad
from adtrain import nn, ops, optim
from adtrain.cases import CASES, Case
from adtrain.core import tree
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.core.trace import Call, Hook, hook
from adtrain.passes import ALL, SIMPLIFY


def value_and_gradients(case: Case, args: list[Any]) -> Any:
    floats = [i for i, x in enumerate(args) if x.dtype.kind == "f"]

    def f(*values: Any) -> Any:
        given = dict(zip(floats, values, strict=True))
        return case.f(*(given.get(i, x) for i, x in enumerate(args)))

    out, pullback = ad.vjp(f, *(args[i] for i in floats))
    return out, pullback(tree.map(ops.ones_like, out))


@pytest.mark.parametrize("case", cases_of(CASES))
def test_every_case_computes_the_same_bits_staged_and_eagerly(case: Case) -> None:
    args = case.sample()
    work = (lambda *xs: value_and_gradients(case, list(xs))) if case.order else case.f
    eager = tree.leaves(work(*args))
    staged = tree.leaves(stage(work, SIMPLIFY)(*args))
    assert len(eager) == len(staged)
    for a, b in zip(eager, staged, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def training() -> tuple[Any, Any]:
    """A step with Adam, a cosine schedule, dropout and batch norm, and its first state."""
    body = (nn.Conv2d(4, kernel_size=3), nn.BatchNorm2d(), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    model = nn.Sequential(*body, nn.Dropout(0.5), nn.Linear(3))
    params, statistics = model.init((1, 8, 8), np.random.default_rng(0), np.dtype("float32"))
    optimizer, schedule = optim.Adam(lr=0.01), optim.schedules.Cosine(total_steps=20)

    def step(state: Any, x: Any, labels: Any, rng: Any) -> Any:
        params, statistics, averages = state

        def loss(params: Any) -> Any:
            out, new = model.forward(params, statistics, x, nn.Mode(training=True, rng=rng))
            return ops.cross_entropy(out, labels), new

        (value, new), grads = ad.value_and_grad(loss, has_aux=True)(params)
        params, averages = optimizer.update(params, grads, averages, schedule(averages["step"]) * 0.01)
        return (params, new, averages), value

    return step, (params, statistics, optimizer.init(params))


def test_twenty_training_steps_have_identical_losses_and_one_program() -> None:
    step, state = training()
    staged = stage(step, SIMPLIFY)
    rng = np.random.default_rng(1)
    eager_state = staged_state = state
    for i in range(20):
        batch = ad.array(rng.normal(size=(6, 1, 8, 8)).astype("float32")), ad.array(rng.integers(0, 3, 6))
        eager_state, expected = step(eager_state, *batch, ops.rng_state(3, i))
        staged_state, found = staged(staged_state, *batch, ops.rng_state(3, i))
        assert found.item() == expected.item()
    assert len(staged.compiled) == 1


def test_a_function_is_traced_again_only_for_new_types_or_static_values() -> None:
    traced = []

    def f(x: Any, factor: Any) -> Any:
        traced.append(x.shape)
        return x * factor

    staged = stage(f)
    for x in (np.ones(3), np.zeros(3), np.ones(4), np.ones(3, "float32"), np.ones(3)):
        assert staged(x, 2).numpy().tolist() == (x * 2).tolist()
    staged(np.ones(3), 3)
    assert traced == [(3,), (4,), (3,), (3,)]


def test_equal_static_values_of_different_types_have_different_programs() -> None:
    staged = stage(lambda x, factor: x * factor)
    x = np.array([1, 2])
    assert [staged(x, f).dtype for f in (1, 1.0, True)] == [np.int64, np.float32, np.int64]
    assert len(staged.compiled) == 3
    with pytest.raises(ad.DTypeError, match="jit: found an argument of type set, expected arrays and numbers"):
        staged(x, {1, 2})


def test_a_staged_function_inside_another_folds_its_own_constants() -> None:
    inner = stage(lambda x: x + ops.exp(np.zeros(3)), SIMPLIFY)
    outer = stage(lambda x: inner(x) * 2.0, SIMPLIFY)
    assert outer(np.ones(3)).numpy().tolist() == [4, 4, 4]
    assert [e.name for e in outer.program(np.ones(3)).equations] == ["add", "mul"]


def test_a_value_that_is_being_differentiated_must_be_an_argument() -> None:
    with pytest.raises(ad.TraceError, match="uses a traced value of another function; pass it as an argument"):
        ad.grad(lambda c: stage(lambda x: (x * c).sum())(np.ones(2)))(np.array(2.0))
    assert ad.grad(lambda c: stage(lambda x, c: (x * c).sum())(np.ones(2), c))(np.array(2.0)).item() == 2.0


def test_a_program_reads_as_text() -> None:
    program = stage(ad.grad(lambda x: (x * x).sum()), SIMPLIFY).program(np.ones(2, "float32"))
    assert str(program).splitlines() == [
        "input  in0: float32[2]",
        "v0: float32[] = full(shape=(), value=1, dtype=float32, device=cpu)  # backward",
        "v1: float32[1] = reshape(v0, shape=(1,))  # backward",
        "v2: float32[2] = broadcast_to(v1, shape=(2,))  # backward",
        "v3: float32[2] = mul(v2, in0)  # backward",
        "v4: float32[2] = add(v3, v3)  # backward",
        "return v4",
    ]


def test_a_staged_function_can_be_differentiated_and_staged_again() -> None:
    cube = stage(lambda x: (x * x * x).sum(), SIMPLIFY)
    x = np.array([1.0, 2.0])
    assert ad.grad(cube)(x).numpy().tolist() == [3, 12]
    assert ad.hessian(cube)(x).numpy().tolist() == [[6, 0], [0, 12]]
    assert stage(lambda x: cube(x) + 1.0)(x).item() == 10.0


def test_hooks_see_the_equations_with_scope_and_phase() -> None:
    step, state = training()
    seen: dict[bool, set[Any]] = {True: set(), False: set()}

    class Names(Hook):
        def __init__(self, staged: bool) -> None:
            self.seen = seen[staged]

        def after(self, call: Call) -> None:
            self.seen.add((call.primitive.name, call.scope, call.phase))

        def program(self, program: Program, seconds: Sequence[float]) -> None:
            assert len(seconds) == len(program.equations)
            self.seen.update((e.name, e.scope, e.phase) for e in program.equations)

    batch = np.ones((6, 1, 8, 8), "float32"), np.arange(6) % 3, ops.rng_state(0)
    for staged in (False, True):
        with hook(Names(staged)):
            (stage(step) if staged else step)(state, *map(ad.array, batch))
    assert seen[True] == seen[False]
    assert ("conv2d_weight_grad", "0.conv2d", "backward") in seen[True]


def test_evaluation_frees_each_value_after_its_last_use() -> None:
    megabyte = 1 << 20

    def chain(x: Any) -> Any:
        for _ in range(20):
            x = ops.exp(-x)
        return x

    x = ad.array(np.ones(megabyte // 8))
    staged = stage(chain)
    staged(x)
    tracemalloc.start()
    try:
        staged(x)
        assert tracemalloc.get_traced_memory()[1] < 4 * megabyte
    finally:
        tracemalloc.stop()


def test_a_branch_on_data_is_refused_with_its_line() -> None:
    def f(x: Any) -> Any:
        return x if x.sum() > 0 else -x

    line = f.__code__.co_firstlineno + 1
    message = rf"test_core_staging.py:{line}: the jitted function reads the elements of a traced value bool\[\]"
    with pytest.raises(ad.TraceError, match=message):
        stage(f)(np.ones(3))


def test_a_traced_value_appended_to_an_outer_list_is_refused_with_its_line() -> None:
    stored: list[Any] = []

    def f(x: Any) -> Any:
        stored.append(x * 2.0)
        return x + 1.0

    with pytest.raises(
        ad.TraceError, match=rf"test_core_staging\.py:{f.__code__.co_firstlineno + 1}: .* is stored outside"
    ):
        stage(f)(np.ones(2))


def test_an_assignment_outside_the_function_is_refused_with_its_line() -> None:
    calls = 0

    def f(x: Any) -> Any:
        def inner(y: Any) -> Any:
            nonlocal calls
            calls += 1
            return y * 2.0

        total = 0.0
        for _ in range(2):
            total = inner(x) + total
        return total

    line = f.__code__.co_firstlineno + 3
    with pytest.raises(ad.TraceError, match=rf"test_core_staging\.py:{line}: a jitted function assigns 'calls'"):
        stage(f)(np.ones(2))
    assert calls == 0


def test_a_donated_array_cannot_be_used_again() -> None:
    staged = stage(lambda x, y: x + y, donate=(0,))
    x, y = ad.array([1.0, 2.0]), ad.array([3.0, 4.0])
    assert staged(x, y).numpy().tolist() == [4, 6]
    assert y.numpy().tolist() == [3, 4]
    with pytest.raises(ad.TraceError, match=r"float32\[2\]\) was donated to a jitted function"):
        x.numpy()
    with pytest.raises(ad.TraceError, match="was donated"):
        x + y


def test_a_result_that_is_not_an_array_is_refused() -> None:
    with pytest.raises(
        ad.DTypeError, match="jit: the function returned a value of type float, expected adtrain arrays"
    ):
        stage(lambda x: 1.0)(np.ones(2))


def test_repeat_passes_results_as_the_next_arguments() -> None:
    def step(*given: Any) -> Any:
        x, n, scale = given
        return x * scale + 1.0, n + 1

    start = np.arange(4, dtype=np.float32)
    for passes in ((), ALL):
        repeated = stage(step, passes, donate=(0, 1))
        x, n = repeated.repeat(5, ad.array(start), ad.array(np.int64(0)), ad.array(np.float32(0.5)))
        expected: Any = (ad.array(start), ad.array(np.int64(0)))
        for _ in range(5):
            expected = step(*expected, ad.array(np.float32(0.5)))
        assert int(n) == 5
        np.testing.assert_array_equal(x.numpy(), expected[0].numpy())


def test_repeat_needs_new_values_of_the_donated_arguments() -> None:
    for f, donate in ((lambda x: x[:2], (0,)), (lambda x: x + 1.0, ()), (lambda x: (x, x), (0,))):
        step = stage(f, donate=donate)
        step(ad.array(np.ones(3)))
        with pytest.raises(ad.DTypeError, match="returns new values for its donated arguments, in their order"):
            step.repeat(2, ad.array(np.ones(3)))


def test_garbage_is_collected_again_after_passes_and_after_an_error_in_one() -> None:
    seen: list[bool] = []

    def failing(program: Program) -> Program:
        seen.append(gc.isenabled())
        raise RuntimeError("a pass")

    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="a pass"):
        stage(lambda x: x + 1, (failing,))(ad.array([1.0]))
    assert seen == [False]
    assert gc.isenabled()
