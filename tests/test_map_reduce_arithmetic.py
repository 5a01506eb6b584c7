"""Map-reduce kernels compute the terms as the function is written: the same overflow, zeros, infinities and maxima."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from sweeps import check_examples, examples
from test_map_reduce import FORMULAS, STEPS, M, N, arguments, differ, few_pairs, gaussian, pairs_of

import adtrain as ad
from adtrain import ops
from adtrain.codegen.map_reduce import map_reduce
from adtrain.core import tree
from adtrain.core.program import body_of
from adtrain.core.staging import stage
from adtrain.passes import ALL

__all__ = ["few_pairs"]

pytestmark = pytest.mark.compiled

X, Y = (np.abs(np.random.default_rng(i).normal(size=n)).astype("float32") for i, n in enumerate((N, M)))

X2, Y2 = (np.random.default_rng(i).normal(size=(n, 2)).astype("float32") for i, n in enumerate((N, M)))


def both(f: Callable[..., Any], *given: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each result of a function, eager and by a map-reduce kernel."""
    arrays = [ad.array(x) for x in given]
    staged = stage(f, ALL)
    assert "map_reduce" in [e.name for e in staged.program(*arrays).equations]
    pairs = zip(tree.leaves(f(*arrays)), tree.leaves(staged(*arrays)), strict=True)
    return [(expected.numpy(), found.numpy()) for expected, found in pairs]


@pytest.mark.parametrize("f", FORMULAS)
def test_compiled_values_and_gradients_match_the_formula(f: Callable[..., Any]) -> None:
    eager, xs = ad.value_and_grad(f, argnums=(0, 1, 2)), arguments(f)
    assert differ(eager(*xs), stage(eager, ALL)(*xs)) < 1e-12


def test_sums_overflow_only_where_their_terms_do() -> None:
    def f(x: Any, y: Any, c: Any) -> Any:
        pairs = x[:, None] * y[None]
        sums = [c * x[:, None] * y[None], pairs * (c * c), ops.exp(pairs * 0.0 + 88.0) * c, 0.25 * pairs]
        return [ops.sum(z, axis) for z in sums for axis in (0, 1)]

    for size, factor in ((1e15, 1e-10), (1e-15, 1e10), (1e18, 1e-20), (1.0, 1e-10)):
        for expected, found in both(f, X * np.float32(size), Y * np.float32(size), np.float32(factor)):
            np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("c", [0.0, -0.0, np.inf, -np.inf, np.nan, 3.0, 1e-37, 1e38])
def test_a_quotient_by_a_number_has_the_zeros_infinities_and_nan_of_the_formula(c: float) -> None:
    def f(x: Any, y: Any, c: Any) -> Any:
        pairs = x[:, None] * y[None]
        return ops.sum(pairs / c, 1), ops.sum(pairs * c / c, 0), ops.max((x[:, None] - y[None]) / c, 1)

    for expected, found in both(f, X, Y, np.float32(c)):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_differences_that_are_0_have_the_sign_of_the_formula() -> None:
    def f(x: Any, y: Any) -> Any:
        d, e = x[:, None] - y[None], y[None] - x[:, None]
        terms = [d, e, -d, -e, 2.0 * e, e * 0.5, e * (x[:, None] + y[None]), e * d, e * e, d * -1.0]
        return [reduce(1.0 / z, axis) for z in terms for reduce in (ops.max, ops.min) for axis in (0, 1)]

    for expected, found in both(f, X, X):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("code", ["quick_compiler", pytest.param("optimised", marks=pytest.mark.exhaustive)])
def test_the_gradient_of_a_maximum_reaches_every_row(dtype: str, code: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(code)

    def f(x: Any, y: Any, s: Any, rows: Any, columns: Any) -> Any:
        d = ops.sum(ops.square(x[:, None] - y[None] * s), 2) * s + rows[:, None] + columns[None]
        return ops.sum(ops.min(d, 1)) + ops.sum(ops.max(ops.exp(-d / s) * 0.7 - d, 0))

    rng = np.random.default_rng(0)
    xs = [rng.normal(size=size).astype(dtype) for size in ((N, 3), (M, 3), (), (N,), (M,))]
    for expected, found in both(ad.grad(f, (0, 1, 3, 4)), *xs):
        np.testing.assert_allclose(found, expected, rtol=1e-3 if dtype == "float32" else 1e-10, atol=1e-5)


@examples(1, 8)
def test_the_largest_element_of_a_random_expression_is_found_again_by_its_gradient(examples: int) -> None:
    """The derivative by a number that is added to a row is 1, also if its elements are computed by two kernels."""

    def check(drawn: list[list[tuple[int, int]]]) -> None:
        def f(x: Any, y: Any, s: Any, rows: Any, columns: Any) -> Any:
            pairs = [pairs_of(steps, x, y, s) + rows[:, None] + columns[None] for steps in drawn]
            return sum((ops.sum(ops.max(z, 1)) + ops.sum(ops.min(z, 0)) for z in pairs), start=ops.zeros(()))

        given = X2, Y2, np.float32(0.6), np.zeros(N, "float32"), np.zeros(M, "float32")
        gradients = stage(lambda *xs: [ad.grad(f, 3)(*xs), ad.grad(f, 4)(*xs)], ALL)(*map(ad.array, given))
        for found in gradients:
            total = float(found.numpy().sum())
            assert total == pytest.approx(len(drawn) * (N + M), rel=1e-5)

    check_examples(examples, check, st.lists(STEPS, min_size=4, max_size=4))


def test_a_kernel_norm_needs_no_more_sums_than_numbers_of_its_results() -> None:
    """Sums over rows and over columns share the loop, although their terms differ in sign and in a factor of two."""
    program = stage(ad.value_and_grad(gaussian, (0, 1)), ALL).program(*arguments(gaussian, "float32"))
    (fused,) = (e for e in program.equations if e.name == "map_reduce")
    loop = map_reduce(body_of(fused))
    assert (len(loop.results), len(loop.accumulators)) == (12, 6)
    assert len(list(loop.nodes("ij"))) == 14
