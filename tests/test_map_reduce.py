"""Reductions over pairs of rows and columns: the results of the formula as written, without the array of pairs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops
from adtrain.core import tree
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.passes import ALL

N, M = 300, 260


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["adtrain.passes.fuse_map_reduce"], "MIN_PAIRS", N * M)


def gaussian(q: Any, p: Any, s: Any) -> Any:
    d = ops.sum((q[:, None] - q[None]) ** 2, axis=2)
    return 0.5 * ops.sum(p * (ops.exp(-d / (2 * s * s)) @ p))


def of_two_clouds(x: Any, y: Any, w: Any) -> Any:
    d = ops.sum(ops.abs(x[:, None] - y[None]), axis=2)
    return ops.sum(ops.square(ops.exp(-d) @ w)) + ops.sum(ops.square(ops.exp(-d).T @ x))


def soft_assignment(x: Any, y: Any, w: Any) -> Any:
    return ops.sum(ops.logsumexp(x @ y.T, axis=1)) + ops.sum(ops.logsumexp(x @ y.T, axis=0) * w[:, 0])


def farthest(x: Any, y: Any, w: Any) -> Any:
    d = ops.sum(ops.square(x[:, None] - y[None]), axis=2)
    return ops.sum(ops.max(d, axis=1)) + ops.sum(ops.min(d, axis=0) * w[:, 1])


def cloud(rows: int, seed: int, dtype: str = "float64") -> ad.Array:
    return ad.array(np.random.default_rng(seed).normal(size=(rows, 3)).astype(dtype))


def arguments(f: Callable[..., Any], dtype: str = "float64") -> list[ad.Array]:
    if f is gaussian:
        return [cloud(N, 0, dtype), cloud(N, 1, dtype), ad.array(np.array(0.7, dtype))]
    return [cloud(N, 0, dtype), cloud(M, 1, dtype), cloud(M, 2, dtype)]


def largest(program: Program) -> int:
    """Elements of the largest array of a Program."""
    return max(v.size for e in program.equations for v in e.outputs)


def differ(a: Any, b: Any) -> float:
    """The largest difference of two trees of arrays over the largest element of each array."""
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return max(float(np.abs(x.numpy() - y.numpy()).max() / np.abs(x.numpy()).max()) for x, y in pairs)


FORMULAS = [gaussian, of_two_clouds, soft_assignment, farthest]


@pytest.mark.parametrize("f", FORMULAS)
def test_values_and_gradients_match_the_formula_without_its_pairs_in_memory(f: Callable[..., Any]) -> None:
    given = arguments(f)
    eager = ad.value_and_grad(f, argnums=(0, 1, 2))
    staged = stage(eager, ALL)
    assert differ(eager(*given), staged(*given)) < 1e-12
    assert largest(staged.program(*given)) <= 8 * max(N, M)


@pytest.mark.parametrize("f", [gaussian, of_two_clouds, soft_assignment])
def test_gradients_of_gradients_match_the_formula(f: Callable[..., Any]) -> None:
    given = arguments(f)

    def twice(*args: Any) -> Any:
        return ad.grad(lambda *a: ops.sum(ops.square(ad.grad(f)(*a))), argnums=(0, 1, 2))(*args)

    staged = stage(twice, ALL)
    assert differ(twice(*given), staged(*given)) < 1e-11
    assert largest(staged.program(*given)) <= 8 * max(N, M)


@pytest.mark.parametrize("f", FORMULAS)
def test_float32_is_as_exact_as_the_formula(f: Callable[..., Any]) -> None:
    exact = stage(f, ALL)(*arguments(f)).item()
    assert stage(f, ALL)(*arguments(f, "float32")).item() == pytest.approx(exact, rel=2e-6)


def test_infinities_and_nan_reach_the_results() -> None:
    x, y = (np.random.default_rng(i).normal(size=(N, 1)) for i in range(2))
    x[0], x[1], x[2], y[3] = np.inf, -np.inf, np.nan, 0.0

    def f(x: Any, y: Any) -> Any:
        z = x - y.T
        return ops.sum(z, axis=1), ops.max(z, axis=1), ops.min(z, axis=0), ops.logsumexp(z, axis=1)

    given = ad.array(x), ad.array(y)
    for expected, found in zip(f(*given), stage(f, ALL)(*given), strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-12)


def test_pairs_that_the_caller_gets_are_stored_and_used() -> None:
    f = stage(lambda x, y: (lambda k: (k, k @ y))(ops.exp(x @ y.T)), ALL)
    given = cloud(N, 0), cloud(M, 1)
    assert differ((np_exp := ops.exp(given[0] @ given[1].T), np_exp @ given[1]), f(*given)) < 1e-12
    assert not [e for e in f.program(*given).equations if e.name == "map_reduce"]


UNARY = [ops.exp, ops.tanh, ops.square, ops.abs, lambda x: -x, lambda x: x / 3.0, lambda x: 2.0 * x]
BINARY = [ops.add, ops.sub, ops.mul, ops.maximum]


STEPS = st.lists(st.tuples(st.sampled_from(range(len(UNARY) + len(BINARY))), st.integers(0, 9)), max_size=6)


def pairs_of(steps: list[tuple[int, int]], x: Any, y: Any, s: Any) -> Any:
    """The elements of an expression of x (N, 2), y (M, 2) and a number, (N, M)."""
    values = [x[:, None, 0] - y[None, :, 0], ops.tanh(x[:, None, 1]) * y[None, :, 1], x[:, None, 1] / (s * s + 1.0)]
    for which, at in steps:
        a, b = ops.tanh(values[at % len(values)]), values[(at + 1) % len(values)]
        values.append(UNARY[which](a) if which < len(UNARY) else BINARY[which - len(UNARY)](a, b))
    return values[-1] * s + ops.tanh(values[0])


@st.composite
def formulas(draw: st.DrawFn) -> tuple[str, Callable[..., Any]]:
    """A function of x (N, 2), y (M, 2) and a number: a reduction of a random expression of pairs."""
    steps = draw(STEPS)
    end = draw(st.sampled_from(["sum of rows", "sum of columns", "sum", "max", "product", "transposed product"]))

    def f(x: Any, y: Any, s: Any) -> Any:
        z = pairs_of(steps, x, y, s)
        ends: dict[str, Callable[[], Any]] = {
            "sum of rows": lambda: ops.sum(z, axis=0),
            "sum of columns": lambda: ops.sum(z, axis=1),
            "sum": lambda: ops.sum(z),
            "max": lambda: ops.max(z, axis=1),
            "product": lambda: z @ y,
            "transposed product": lambda: z.T @ x,
        }
        return ops.sum(ops.square(ends[end]()))

    return f"{steps} {end}", f


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(formulas(), st.sampled_from([N, M]))
def test_random_formulas_and_their_gradients_match(formula: tuple[str, Callable[..., Any]], columns: int) -> None:
    _, f = formula
    rng = np.random.default_rng(0)
    x, y = (ad.array(rng.normal(size=(n, 2))) for n in (N, columns))
    eager = ad.value_and_grad(f, argnums=(0, 1, 2))
    given = x, y, ad.array(np.array(0.6))
    expected, found = eager(*given), stage(eager, ALL)(*given)
    for a, b in zip(tree.leaves(expected), tree.leaves(found), strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=1e-9, atol=1e-9 * np.abs(a.numpy()).max())
