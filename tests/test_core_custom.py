"""custom_vjp: the user's derivative at first order; second derivatives are correct or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops
from adtrain.core.custom import custom_vjp
from adtrain.core.staging import stage

X = np.array([0.3, -1.2, 2.0])


def make(forward: Any, backward: Any) -> Any:
    return ad.custom_vjp(forward, backward)


def test_backward_replaces_the_vjp_rules() -> None:
    tripled = make(lambda x: (x * 2.0, None), lambda _, ct: (ct * 3.0,))
    out, pullback = ad.vjp(tripled, X)
    np.testing.assert_array_equal(out.numpy(), X * 2)
    assert pullback(np.ones(3))[0].numpy().tolist() == [3, 3, 3]


def test_products_of_backward_have_the_precision_of_the_call() -> None:
    f = custom_vjp(
        lambda x, w: (ops.matmul(x, w), (x, w)), lambda xw, ct: (ops.matmul(ct, xw[1], transpose_b=True), None)
    )

    def gradient(x: Any, w: Any) -> Any:
        def loss(x: Any) -> Any:
            with ops.matmul_precision("tf32"):
                return ops.sum(f(x, w))

        return ad.grad(loss)(x)

    program = stage(gradient).program(np.ones((2, 3), np.float32), np.ones((3, 4), np.float32))
    assert [e.params["precision"] for e in program.equations if e.name == "matmul"] == ["tf32", "tf32"]


def test_second_derivatives_through_computed_residuals_are_right() -> None:
    # the residual is an intermediate value of forward, and its derivative is a term of the second derivative
    def forward(x: Any) -> Any:
        e = ops.exp(x)
        return e * e, (e,)

    square_exp = make(forward, lambda res, ct: (ct * 2.0 * res[0] * res[0],))
    second = ad.grad(lambda x: ad.grad(lambda x: square_exp(x).sum())(x).sum())(X)
    np.testing.assert_allclose(second.numpy(), 4 * np.exp(2 * X), rtol=1e-13)
    third = ad.grad(lambda x: ad.grad(lambda x: ad.grad(lambda x: square_exp(x).sum())(x).sum())(x).sum())(X)
    np.testing.assert_allclose(third.numpy(), 8 * np.exp(2 * X), rtol=1e-13)


def test_a_saved_output_has_the_custom_derivative_too() -> None:
    def forward(x: Any) -> Any:
        s = ops.sigmoid(x)
        return s, (s,)

    custom = make(forward, lambda res, ct: (ct * res[0] * (1.0 - res[0]),))
    np.testing.assert_allclose(
        ad.hessian(lambda x: custom(x).sum())(X).numpy(),
        ad.hessian(lambda x: ops.sigmoid(x).sum())(X).numpy(),
        rtol=1e-12,
    )


def test_the_output_keeps_the_custom_derivative_at_every_order() -> None:
    # straight-through estimator: forward rounds down, the derivative is that of the identity
    floor = make(lambda x: (ops.astype(ops.astype(x, np.int64), np.float64), None), lambda _, ct: (ct,))
    slope = ad.grad(lambda x: (floor(x) * floor(x)).sum())(X)
    np.testing.assert_array_equal(slope.numpy(), 2 * np.trunc(X))
    second = ad.grad(lambda x: ad.grad(lambda x: (floor(x) * floor(x)).sum())(x).sum())(X)
    np.testing.assert_array_equal(second.numpy(), [2, 2, 2])


def test_a_second_derivative_through_numpy_is_refused() -> None:
    def forward(x: Any) -> Any:
        return ops.sin(x), (ad.array(np.cos(x.numpy())),)

    numpy_sine = make(forward, lambda res, ct: (ct * res[0],))
    with pytest.raises(ad.TraceError, match="has no elements yet"):
        ad.hessian(lambda x: numpy_sine(x).sum())(X)


def test_first_derivatives_through_numpy_are_fine() -> None:
    def forward(x: Any) -> Any:
        return ops.sin(x), (ad.array(np.cos(x.numpy())),)

    numpy_sine = make(forward, lambda res, ct: (ct * res[0],))
    np.testing.assert_allclose(ad.grad(lambda x: numpy_sine(x).sum())(X).numpy(), np.cos(X), rtol=1e-15)


def test_trees_and_arguments_without_derivative() -> None:
    def forward(pair: Any, index: Any) -> Any:
        return {"picked": ops.take(pair["a"] * pair["b"], index)}, (pair, index)

    def backward(residuals: Any, ct: Any) -> Any:
        pair, index = residuals
        rows = ops.one_hot(index, pair["a"].shape[0], np.float64)
        spread = ops.sum(rows * ops.expand_dims(ct["picked"], 1), 0)
        return {"a": spread * pair["b"], "b": ops.zeros_like(spread)}, None

    f = make(forward, backward)
    pair = {"a": X, "b": X + 1}
    grads = ad.grad(lambda p: f(p, ad.array([2, 0]))["picked"].sum())(pair)
    np.testing.assert_allclose(grads["a"].numpy(), (X + 1) * [1, 0, 1])


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (lambda res, ct: (ct, ct), "backward returned 2 cotangents, expected a tuple of 1"),
        (lambda res, ct: ct, "backward returned an array, expected a tuple of 1, one an argument"),
        (
            lambda res, ct: (ct.sum(),),
            r"its derivative returned a cotangent float64\[\], expected float64\[3\]",
        ),
    ],
)
def test_wrong_results_of_backward_raise_errors(backward: Any, message: Any) -> None:
    with pytest.raises(ad.ShapeError, match=message):
        ad.grad(lambda x: make(lambda x: (x * 1.0, None), backward)(x).sum())(X)


def test_a_differentiated_value_that_is_not_an_argument_is_refused() -> None:
    def f(x: Any) -> Any:
        return make(lambda y: (y * x, None), lambda _, ct: (ct,))(x * 1.0).sum()

    with pytest.raises(ad.TraceError, match="uses a differentiated value that is not among its arguments"):
        ad.grad(f)(X)


def test_an_argument_that_is_output_and_residual_remains_the_argument() -> None:
    scaled = make(lambda x: (x, x), lambda x, ct: (ct * x * 5.0,))
    assert ad.grad(ad.grad(scaled))(2.0).item() == 5.0


def test_a_closure_over_an_inner_tracer_is_refused_at_every_level() -> None:
    def outer(x: Any) -> Any:
        def inner(c: Any) -> Any:
            return make(lambda y: (y * c, None), lambda _, ct: (ct * 1.0,))(x)

        return ad.grad(inner)(np.array(3.0))

    for call in (ad.grad(outer), outer):
        with pytest.raises(ad.TraceError, match="uses a differentiated value that is not among its arguments"):
            call(np.array(2.0))


@pytest.mark.parametrize(
    ("backward", "error", "message"),
    [
        (lambda res, ct: (np.ones(3),), ad.DTypeError, "backward returned a NumPy array, expected arrays or None"),
        (lambda res, ct: (ct.astype("float32"),), ad.ShapeError, r"a cotangent float32\[3\], expected float64\[3\]"),
        (lambda res, ct: ({"a": ct},), ad.ShapeError, r"cotangent 0 is a tree \{'a': \*\}, expected \*"),
    ],
)
def test_cotangents_that_are_not_arrays_are_refused(backward: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ad.grad(lambda x: make(lambda x: (x * 1.0, None), backward)(x).sum())(X)
