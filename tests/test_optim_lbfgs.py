"""L-BFGS finds known minima by the BFGS formula and PyTorch's points; a sequence is one optimizer, then another."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops, optim
from adtrain.core.array import Value
from adtrain.core.autodiff import value_and_grad
from adtrain.core.custom import custom_vjp
from adtrain.core.errors import OptionError
from adtrain.optim.lbfgs import CURVATURE, SUFFICIENT, product_with_inverse

pytestmark = pytest.mark.unfused


def rosenbrock(params: dict[str, Value]) -> Value:
    x = params["x"]
    return ops.sum(100.0 * ops.square(x[1:] - ops.square(x[:-1])) + ops.square(1.0 - x[:-1]))


def minimised(f: Any, x: np.ndarray, optimizer: optim.Optimizer, steps: int) -> list[dict[str, Any]]:
    """The states after each step."""
    params = {"x": ad.array(x)}
    state = optimizer.init(params)
    found = []

    def step(params: Any, state: Any) -> Any:
        loss, grads = value_and_grad(f)(params)
        return optimizer.update(params, grads, state, loss=loss)

    staged = ad.jit(step)
    for _ in range(steps):
        params, state = staged(params, state)
        found.append({name: x["x"].numpy() if isinstance(x, dict) else x.numpy() for name, x in state.items()})
    return found


def test_the_minimum_of_rosenbrocks_function_is_found() -> None:
    last = minimised(rosenbrock, np.full(2, -0.7), optim.LBFGS(history=5), 70)[-1]
    assert last["accepted"] == pytest.approx(np.ones(2), abs=1e-7)
    assert last["loss"] == pytest.approx(0.0, abs=1e-14)


@settings(max_examples=4)
@given(st.integers(0, 100), st.integers(1, 6))
def test_the_minimum_of_a_convex_quadratic_is_that_of_a_linear_system(seed: int, history: int) -> None:
    rng = np.random.default_rng(seed)
    root, b = rng.normal(size=(5, 5)), rng.normal(size=5)
    a = root @ root.T + np.eye(5)

    def f(params: dict[str, Value]) -> Value:
        x = params["x"]
        return 0.5 * ops.sum(x * ops.reshape(ops.matmul(ad.array(a), ops.reshape(x, (-1, 1))), (-1,))) - ops.sum(b * x)

    last = minimised(f, rng.normal(size=5), optim.LBFGS(history=history), 50)[-1]
    assert last["accepted"] == pytest.approx(np.linalg.solve(a, b), rel=1e-5, abs=1e-5)


def test_the_product_with_the_inverse_hessian_is_that_of_the_bfgs_formula() -> None:
    rng = np.random.default_rng(0)
    points, gradients = rng.normal(size=(2, 4, 6))
    gradients[:3] += 3 * points[:3]
    inner = (points * gradients).sum(axis=1)
    inner[0] = 0.0  # not used yet
    scale, vector = 0.3, rng.normal(size=6)
    inverse = scale * np.eye(6)
    for s, y, rho in zip(points, gradients, inner, strict=True):
        if rho > 0:
            left = np.eye(6) - np.outer(s, y) / rho
            inverse = left @ inverse @ left.T + np.outer(s, s) / rho
    triangle = np.zeros((4, 4))
    triangle[1:, 1:] = np.linalg.inv(np.triu(points[1:] @ gradients[1:].T))
    given = {"points": points, "gradients": gradients, "inner": inner, "triangle": triangle}
    pairs = {name: ad.array(x) for name, x in given.items()}
    found = product_with_inverse(ad.array(vector), pairs, ad.array(np.float64(scale))).numpy()
    assert found == pytest.approx(inverse @ vector, rel=1e-12)


def test_accepted_points_fulfil_the_wolfe_conditions_and_the_loss_never_rises() -> None:
    states = minimised(rosenbrock, np.array([-1.2, 1.0, 0.3]), optim.LBFGS(history=5), 50)
    losses = [float(state["loss"]) for state in states]
    assert losses == sorted(losses, reverse=True)
    for before, after in itertools.pairwise(states):
        if int(after["evaluations"]) == 0 and float(after["loss"]) < float(before["loss"]):
            t, slope = float(before["step_length"]), float(before["slope"])
            assert float(after["loss"]) <= float(before["loss"]) + SUFFICIENT * t * slope
            assert after["gradient"] @ before["direction"] >= CURVATURE * slope


@pytest.mark.parametrize("history", [1, 4])
def test_the_triangle_is_the_inverse_of_that_of_the_stored_differences(history: int) -> None:
    for state in minimised(rosenbrock, np.array([-1.2, 1.0, 0.3]), optim.LBFGS(history=history), 30)[::6]:
        used = state["inner"] > 0
        products = np.triu(state["points"][used] @ state["gradients"][used].T)
        found = state["triangle"][np.ix_(used, used)]
        np.testing.assert_allclose(found @ products, np.eye(used.sum()), atol=1e-8)
        assert not state["triangle"][~used].any()
        assert not state["triangle"][:, ~used].any()


def test_a_trial_point_with_an_infinite_loss_is_rejected() -> None:
    def barrier(params: dict[str, Value]) -> Value:
        x = params["x"]
        return ops.sum(x - ops.log(x))  # NaN below 0, where the first steps lead

    last = minimised(barrier, np.array([1e-3, 5.0]), optim.LBFGS(history=3), 50)[-1]
    assert last["accepted"] == pytest.approx(np.ones(2), abs=1e-5)


def turning(x: Value) -> Value:
    """|x|² with a gradient whose sign is wrong within the unit circle: no line search from there succeeds."""
    right = lambda residuals, ct: (ct * ops.where(ops.sum(residuals * residuals) > 1, 2.0, -2.0) * residuals,)  # noqa: E731
    return custom_vjp(lambda x: (ops.sum(x * x), x), right)(x)


def test_a_failed_search_is_repeated_along_the_gradient_and_then_the_optimizer_stops() -> None:
    optimizer = optim.LBFGS(0.4, history=5, max_evaluations=6)
    states = minimised(lambda params: turning(params["x"]), np.array([3.0, 1.0]), optimizer, 25)
    known = [bool(state["inner"][-1] > 0) for state in states]
    assert sorted(set(known)) == [False, True]
    stopped = [bool(state["stopped"]) for state in states]
    first = stopped.index(True)
    assert stopped == [False] * first + [True] * (25 - first)
    assert known[first - 6 : first + 1] == [False] * 7, "the last search begins without differences"
    assert known[first - 7], "the search before had some"
    for state in states[first:]:
        np.testing.assert_array_equal(state["accepted"], states[first]["accepted"])
        assert (state["loss"], state["step_length"]) == (min(x["loss"] for x in states), 0.0)


def test_a_loss_that_rounding_hides_is_accepted_by_its_slope() -> None:
    """Near the minimum of 1 + |x|² the loss is 1 in float32, and only the slope tells points apart."""
    f = lambda params: ops.astype(1.0 + ops.sum(params["x"] * params["x"]), np.float32)  # noqa: E731
    last = minimised(f, np.array([1e-5, -2e-5]), optim.LBFGS(0.3, history=3), 40)[-1]
    assert last["accepted"] == pytest.approx(np.zeros(2), abs=1e-8)


def test_a_sequence_equals_its_first_optimizer_and_then_minimises() -> None:
    adam = optim.Adam(0.05)
    alone = {"x": ad.array(np.array([-1.2, 1.0]))}
    state = adam.init(alone)
    for _ in range(10):
        alone, state = adam.update(alone, value_and_grad(rosenbrock)(alone)[1], state)
    found = minimised(
        rosenbrock, np.array([-1.2, 1.0]), optim.Sequence(first=adam, steps=10, then=optim.LBFGS(history=5)), 70
    )
    np.testing.assert_allclose(found[9]["accepted"], alone["x"].numpy(), rtol=1e-12)
    assert found[-1]["accepted"] == pytest.approx(np.ones(2), abs=1e-6)


def test_a_sequence_of_optimizers_without_a_line_search_needs_no_loss() -> None:
    sequence = optim.Sequence(0.5, first=optim.SGD(0.1), steps=1, then=optim.SGD(1.0))
    params, grads = {"x": ad.array(np.array([1.0]))}, {"x": ad.array(np.array([1.0]))}
    state = sequence.init(params)
    params, state = sequence.update(params, grads, state)
    assert params["x"].numpy() == pytest.approx([0.95])
    params, state = sequence.update(params, grads, state)
    assert params["x"].numpy() == pytest.approx([0.45])


def test_a_missing_loss_and_a_first_optimizer_with_a_line_search_are_refused() -> None:
    params = {"x": ad.array(np.zeros(1))}
    lbfgs = optim.LBFGS()
    with pytest.raises(OptionError, match="the loss is missing"):
        lbfgs.update(params, params, lbfgs.init(params))
    with pytest.raises(OptionError, match="first is lbfgs, expected an optimizer without a line search"):
        optim.Sequence(first=lbfgs)


@pytest.mark.needs_torch
def test_the_first_points_equal_pytorchs_where_unit_steps_are_accepted() -> None:
    import torch

    rng = np.random.default_rng(4)
    scale, start = np.linspace(0.5, 1.5, 6), 0.1 * rng.normal(size=6)

    def f(params: dict[str, Value]) -> Value:
        return 0.5 * ops.sum(scale * ops.square(params["x"]))

    x = torch.tensor(start, requires_grad=True)
    other = torch.optim.LBFGS([x], lr=1.0, max_iter=1, history_size=10)
    theirs = []
    for _ in range(6):

        def closure() -> torch.Tensor:
            other.zero_grad()
            loss = 0.5 * (torch.tensor(scale) * x * x).sum()
            loss.backward()
            return loss

        other.step(closure)
        theirs.append(x.detach().numpy().copy())
    ours = minimised(f, start, optim.LBFGS(history=10), 7)
    for mine, reference in zip(ours[1:], theirs, strict=True):
        np.testing.assert_allclose(mine["accepted"], reference, rtol=1e-9, atol=1e-12)
