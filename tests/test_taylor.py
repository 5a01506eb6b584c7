"""Forward and Taylor mode: closed forms, SymPy and JAX as oracles, compositions of modes, memory, and errors."""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import cases_of

import adtrain as ad
from adtrain import ops
from adtrain.cases import CASES, Case
from adtrain.core.custom import custom_vjp
from adtrain.core.trace import Call, Hook, hook

ORDER = 5
X = np.array([0.3, 0.8, -0.4])
V = np.array([1.0, -2.0, 0.5])
BOTH: Any = (0, 1)


def derivatives(f: Callable[..., Any], x: np.ndarray, v: np.ndarray, order: int = ORDER) -> list[np.ndarray]:
    """The value of ``f`` and its derivatives along x + t v."""
    out, series = ad.jet(f, (x,), [(v,), *[None] * (order - 1)])
    return [out.numpy(), *(y.numpy() for y in series)]


def test_derivatives_of_a_polynomial_are_exact() -> None:
    coefficients = [2.0, -3.0, 0.0, 4.0, 1.0]  # from the constant on

    def f(x: Any) -> Any:
        return sum((c * x**k for k, c in enumerate(coefficients[1:], 1)), start=coefficients[0] + x * 0.0)

    x, polynomial = np.array([2.0, -1.0]), np.polynomial.Polynomial(coefficients)
    found = derivatives(f, x, np.ones(2))
    assert [y.tolist() for y in found] == [polynomial.deriv(k)(x).tolist() for k in range(ORDER + 1)]


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x: ops.exp(2.0 * x + 1.0), lambda k: (2 * V) ** k * np.exp(2 * X + 1)),
        (lambda x: ops.sin(3.0 * x - 0.5), lambda k: (3 * V) ** k * np.sin(3 * X - 0.5 + k * math.pi / 2)),
        (lambda x: 1.0 / (2.0 - x), lambda k: math.factorial(k) * V**k / (2 - X) ** (k + 1)),
    ],
)
def test_derivatives_of_affine_maps_have_closed_forms(f: Any, expected: Any) -> None:
    for k, found in enumerate(derivatives(f, X, V)):
        np.testing.assert_allclose(found, expected(k), rtol=1e-13)


def test_the_heat_kernel_fulfils_the_heat_equation() -> None:
    """u_t = u_xx, and by another derivative u_tt = u_xxxx, with jets by x and by t."""
    kernel = lambda t, x: ops.exp(-(x * x) / (4.0 * t)) / ops.sqrt(4 * math.pi * t)  # noqa: E731
    t, x, one = np.array([0.5, 1.0, 2.0]), np.array([0.3, -1.0, 0.0]), np.ones(3)
    _, by_t, by_tt = derivatives(lambda t: kernel(t, x), t, one, 2)
    _, _, by_xx, _, by_xxxx = derivatives(lambda x: kernel(t, x), x, one, 4)
    np.testing.assert_allclose(by_t, by_xx, rtol=1e-12)
    np.testing.assert_allclose(by_tt, by_xxxx, rtol=1e-11)


def test_the_transformation_of_cole_and_hopf_solves_burgers_equation() -> None:
    """u = -2 nu h_x / h with a solution h of h_t = nu h_xx, where u has a derivative by forward mode in it."""
    nu, waves = 0.1, np.array([[-1.0], [0.5], [2.0]])

    def heat(t: Any, x: Any) -> Any:
        return ops.sum(ops.exp(waves * x + nu * waves**2 * t), axis=0)

    def u(t: Any, x: Any) -> Any:
        h, slope = ad.jvp(lambda x: heat(t, x), (x,), (one,))
        return -2 * nu * slope / h

    t, x, one = ad.array(np.array([0.0, 0.5, 2.0])), ad.array(np.array([0.3, -1.0, 1.5])), ops.ones((3,), "float64")
    value, (by_x, by_xx) = ad.jet(lambda x: u(t, x), (x,), [(one,), None])
    by_t = ad.grad(lambda t: u(t, x).sum())(t)
    np.testing.assert_allclose((by_t + value * by_x - nu * by_xx).numpy(), 0, atol=1e-14)


SYMBOLIC: dict[str, Callable[[Any, Any], Any]] = {
    "exp": lambda s, x: s.exp(x),
    "expm1": lambda s, x: s.exp(x) - 1,
    "log": lambda s, x: s.log(x),
    "log1p": lambda s, x: s.log(1 + x),
    "sqrt": lambda s, x: s.sqrt(x),
    "rsqrt": lambda s, x: 1 / s.sqrt(x),
    "reciprocal": lambda s, x: 1 / x,
    "square": lambda s, x: x**2,
    "sin": lambda s, x: s.sin(x),
    "cos": lambda s, x: s.cos(x),
    "tanh": lambda s, x: s.tanh(x),
    "erf": lambda s, x: s.erf(x),
    "sigmoid": lambda s, x: 1 / (1 + s.exp(-x)),
    "softplus": lambda s, x: s.log(1 + s.exp(x)),
    "silu": lambda s, x: x / (1 + s.exp(-x)),
    "gelu": lambda s, x: x * (1 + s.erf(x / s.sqrt(2))) / 2,
}


@pytest.mark.needs_torch  # which needs SymPy
@pytest.mark.parametrize("name", SYMBOLIC)
def test_derivatives_to_order_5_agree_with_sympy(name: str) -> None:
    sympy: Any = import_module("sympy")
    x = sympy.Symbol("x")
    expression, points = SYMBOLIC[name](sympy, x), np.array([0.25, 1.5])
    for k, found in enumerate(derivatives(getattr(ops, name), points, np.ones(2))):
        exact = [float(expression.subs(x, sympy.Rational(float(p))).evalf(25)) for p in points]
        np.testing.assert_allclose(found, exact, rtol=2e-13, err_msg=f"order {k}")
        expression = sympy.diff(expression, x)


def network(o: Any, x: Any, w: np.ndarray, u: np.ndarray) -> Any:
    return o.matmul(o.tanh(o.matmul(x, w)) / (2.0 + o.sin(x)), u) * o.exp(-x)


@pytest.mark.exhaustive  # SymPy's derivatives are compared anyway
@pytest.mark.needs_jax
def test_series_and_tangents_agree_with_jax() -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental.jet import jet

    rng = np.random.default_rng(0)
    w, u, x, *series = (rng.normal(size=(4, 4)) for _ in range(7))
    with jax.enable_x64(True):
        value, expected = jet(lambda x: network(jnp, x, w, u), (x,), (series,))
        tangent = jax.jvp(lambda x: network(jnp, x, w, u), (x,), (series[0],))[1]
    out, found = ad.jet(lambda x: network(ops, x, w, u), (x,), [(v,) for v in series])
    np.testing.assert_allclose(out.numpy(), value, rtol=1e-12)
    for y, z in zip(found, expected, strict=True):
        np.testing.assert_allclose(y.numpy(), z, rtol=1e-10, atol=1e-10)
    found_tangent = ad.jvp(lambda x: network(ops, x, w, u), (x,), (series[0],))[1]
    np.testing.assert_allclose(found_tangent.numpy(), tangent, rtol=1e-12, atol=1e-12)


UNARY = [ops.tanh, ops.sin, ops.sigmoid, ops.exp, ops.square, ops.softplus, ops.gelu, ops.softmax, ops.cumsum]
BINARY = [ops.add, ops.mul, ops.sub, lambda a, b: a / (2.0 + b * b), ops.hypot, lambda a, b: ops.matmul(a, b.sum() * a)]


@st.composite
def functions(draw: st.DrawFn) -> Callable[[Any], Any]:
    """A random function of an array (3,) to an array (3,)."""
    steps = draw(
        st.lists(st.tuples(st.sampled_from(UNARY), st.sampled_from(BINARY), st.integers(0, 9)), min_size=1, max_size=3)
    )

    def f(x: Any) -> Any:
        values = [x * 0.5 + 0.1]
        for unary, binary, i in steps:
            values.append(binary(ops.tanh(unary(values[-1])), values[i % len(values)] + 0.3) + x * 0.1)
        return values[-1]

    return f


def second(f: Callable[[Any], Any], x: Any, v: Any) -> Any:
    return ad.jet(f, (x,), [(v,), None])[1][1]


@settings(max_examples=10)
@given(functions())
def test_modes_compose_in_any_order(f: Callable[[Any], Any]) -> None:
    close = lambda a, b: np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-9, atol=1e-11)  # noqa: E731
    x, v, total = ad.array(X), ad.array(V), lambda x: f(x).sum()
    along_twice = lambda f: lambda x: ad.jvp(lambda x: ad.jvp(f, (x,), (v,))[1], (x,), (v,))[1]  # noqa: E731
    close(second(f, x, v), along_twice(f)(x))
    reverse_over_taylor = ad.grad(lambda x: second(total, x, v))(x)
    taylor_over_reverse = second(ad.grad(total), x, v)
    close(reverse_over_taylor, taylor_over_reverse)
    close(reverse_over_taylor, ad.grad(along_twice(total))(x))
    points = ops.stack([x, 0.5 * x, v])
    of_all = ad.vmap(lambda x: second(f, x, v))(points)
    close(of_all, ops.stack([second(f, points[i], v) for i in range(3)]))
    close(ad.jit(lambda x: second(f, x, v))(x), second(f, x, v))
    close(ad.laplacian(total, x)[1], ops.trace(ad.hessian(total)(x)))
    close(ad.jacfwd(f)(x), ad.jacobian(f)(x))
    close(ad.hvp(total, (x,), (v,)), ops.matmul(ad.hessian(total)(x), v))


def test_series_of_trees_follow_the_structure_of_the_arguments() -> None:
    point = {"t": np.array(2.0), "x": [np.ones(2)]}
    direction = {"t": np.array(0.0), "x": [np.array([1.0, 2.0])]}
    out, (first, third) = ad.jet(lambda p: {"y": p["t"] * p["x"][0] ** 2}, (point,), [(direction,), None])
    assert [y["y"].numpy().tolist() for y in (out, first, third)] == [[2, 2], [4, 8], [4, 16]]


def test_the_path_may_be_curved() -> None:
    # x(t) = 1 + t + 3 t^2, f(x) = x^2: f'' = 2 x'^2 + 2 x x''
    _, (first, curved) = ad.jet(lambda x: x * x, (1.0,), [(1.0,), (6.0,)])
    assert (first.item(), curved.item()) == (2.0, 14.0)


def first_float(case: Case) -> Any:
    return next((x for x in case.sample() if x.dtype.kind == "f"), np.zeros(0))


def laplacian_of(f: Callable[..., Any], x: Any, **options: Any) -> float:
    return ad.laplacian(f, x, **options)[1].item()


def test_laplacians_have_closed_forms() -> None:
    x = np.array([1.0, 2.0, -1.0])
    assert laplacian_of(lambda x: (x * x).sum() ** 2, x) == 4 * (3 + 2) * 6.0
    harmonic = lambda x: ops.exp(x[0]) * ops.sin(x[1])  # noqa: E731
    assert laplacian_of(harmonic, x) == pytest.approx(0.0, abs=1e-15)
    radius = lambda x: (x * x).sum() ** -0.5  # noqa: E731
    assert laplacian_of(radius, x) == pytest.approx(0.0, abs=1e-15)
    value, found = ad.laplacian(lambda x: {"constant": ops.ones((2,), "float64"), "linear": 2.0 * x}, x)
    assert value["linear"].numpy().tolist() == [2, 4, -2]
    assert (found["constant"].numpy().tolist(), found["linear"].numpy().tolist()) == ([0, 0], [0, 0, 0])


FEW = [case for case in CASES if case.order and 0 < first_float(case).size <= 40]


@pytest.mark.parametrize("case", cases_of(FEW))
def test_laplacians_of_operations_are_traces_of_hessians(case: Case) -> None:
    inputs = case.sample()
    position = next(i for i, x in enumerate(inputs) if x.dtype.kind == "f")

    def f(x: Any) -> Any:
        out = case.f(*inputs[:position], x, *inputs[position + 1 :])
        first = out[0] if isinstance(out, tuple) else out
        weights = np.random.default_rng(0).normal(size=first.shape)
        return (first * weights).sum()

    hessian = ad.hessian(f)(inputs[position]).numpy().reshape(inputs[position].size, -1)
    scale = np.abs(hessian).max() * len(hessian)
    assert laplacian_of(f, inputs[position]) == pytest.approx(np.trace(hessian), rel=1e-12, abs=1e-12 * scale)


def test_a_loss_of_laplacians_has_the_gradient_of_one_of_hessians() -> None:
    rng = np.random.default_rng(3)
    parameters, points = (rng.normal(size=(6, 8)), rng.normal(size=8)), rng.normal(size=(5, 6))

    def loss(laplacian: Any) -> Any:
        def of_points(p: Any, points: Any) -> Any:
            u = lambda x: ops.matmul(ops.tanh(ops.matmul(x, p[0])), p[1])  # noqa: E731
            return ops.mean(ad.vmap(lambda x: laplacian(u, x))(points) ** 2)

        return of_points

    collapsed = loss(lambda u, x: ad.laplacian(u, x)[1])
    expected = ad.grad(loss(lambda u, x: ops.trace(ad.hessian(u)(x))))(parameters, points)
    for found in (ad.grad(collapsed)(parameters, points), ad.jit(ad.grad(collapsed))(parameters, points)):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-10, atol=1e-12)


def test_random_directions_estimate_the_laplacian() -> None:
    rng, x = np.random.default_rng(0), np.linspace(-1, 1, 6)
    f = lambda x: ops.sum(ops.sin(x)) + x[0] * x[1] * x[2]  # noqa: E731
    exact = laplacian_of(f, x)
    assert laplacian_of(f, x, directions=np.eye(6) * 6**0.5) == pytest.approx(exact, rel=1e-14)
    signs = rng.choice([-1.0, 1.0], (2000, 6))
    products = np.einsum("si,ij,sj->s", signs, ad.hessian(f)(x).numpy(), signs)
    assert laplacian_of(f, x, directions=signs) == pytest.approx(products.mean(), rel=1e-12)
    assert laplacian_of(f, x, directions=signs) == pytest.approx(exact, abs=0.2)


def deep(depth: int, width: int = 32) -> Callable[[Any], Any]:
    w = np.random.default_rng(0).normal(size=(width, width)) / width**0.5

    def f(x: Any) -> Any:
        for _ in range(depth):
            x = ops.tanh(ops.matmul(x, w))
        return x.sum()

    return f


def test_the_laplacian_propagates_one_second_derivative_for_all_directions() -> None:
    rows: list[int] = []

    class Products(Hook):
        def after(self, call: Call) -> None:
            if call.primitive.name == "matmul":
                rows.append(call.outputs[0].size // 32)

    with hook(Products()):
        ad.laplacian(deep(5), np.ones(32))
    # of each layer the value, 32 first derivatives and one second derivative; of the first layer no second derivative
    assert sorted(rows) == [1] * (5 + 4) + [32] * 5


def test_the_memory_of_a_laplacian_does_not_grow_with_the_depth() -> None:
    def peak(depth: int) -> int:
        f, x = deep(depth), np.ones(32)
        tracemalloc.start()
        ad.laplacian(f, x)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(1)
    assert peak(40) < 1.5 * peak(4)


def test_two_thousand_chained_operations_neither_recurse_nor_leak() -> None:
    def chain(x: Any) -> Any:
        for _ in range(2000):
            x = ops.sin(x)
        return x

    gc.collect()
    gc.disable()  # reference counts alone must free everything
    try:
        assert np.isfinite(ad.jet(chain, (1.0,), [(1.0,), None])[1][1].item())
        assert gc.collect() < 100
    finally:
        gc.enable()


def straight_through(x: Any) -> Any:
    """Rounds; the derivative is 3."""
    return custom_vjp(lambda x: (ops.round(x), None), lambda residuals, ct: (3.0 * ct,))(x)


def test_custom_derivatives_hold_in_forward_mode() -> None:
    assert ad.jvp(straight_through, (X,), (V,))[1].numpy().tolist() == (3 * V).tolist()
    f = lambda x: straight_through(x) ** 2  # noqa: E731
    _, (first, twice) = ad.jet(f, (X,), [(V,), None])
    np.testing.assert_allclose(first.numpy(), 2 * np.round(X) * 3 * V)
    np.testing.assert_allclose(twice.numpy(), 2 * (3 * V) ** 2)
    slopes = ad.grad(lambda x: ad.jvp(f, (x,), (V,))[1].sum())(X)
    np.testing.assert_allclose(slopes.numpy(), 2 * 9 * V)
    members = ad.vmap(lambda x, v: ad.jvp(f, (x,), (v,))[1])(X, V)
    np.testing.assert_allclose(members.numpy(), first.numpy())


def test_residuals_of_a_custom_derivative_may_be_its_output() -> None:
    exp = custom_vjp(lambda x: ((y := ops.exp(x)), y), lambda y, ct: (ct * y,))
    for k, found in enumerate(derivatives(exp, X, V, 4)):
        np.testing.assert_allclose(found, V**k * np.exp(X), rtol=1e-14)


def test_an_operation_that_is_linear_by_its_rule_alone() -> None:
    def scaled(name: str, back: str) -> Any:
        return ad.custom_op(
            name,
            shape=lambda x, w: ad.ArrayType(x.shape, x.dtype),
            numpy=lambda x, w: x * w,
            vjp=lambda ct, out, x, w: (known[back](ct, w), known[back](ct, x)),
        )

    known: dict[str, Any] = {}
    known["taylor_scaled"] = scaled("taylor_scaled", "taylor_scaled_back")
    known["taylor_scaled_back"] = scaled("taylor_scaled_back", "taylor_scaled")
    found = derivatives(lambda x: known["taylor_scaled"](ops.sin(x), ops.cos(x)), X, V, 4)
    for k, expected in enumerate(derivatives(lambda x: ops.sin(x) * ops.cos(x), X, V, 4)):
        np.testing.assert_allclose(found[k], expected, rtol=1e-13)


def test_an_operation_without_a_derivative_is_named() -> None:
    half = ad.custom_op("taylor_half", shape=lambda x: ad.ArrayType(x.shape, x.dtype), numpy=lambda x: x / 2)
    with pytest.raises(ad.TraceError, match="custom_op taylor_half has no vjp, and is differentiated"):
        ad.jvp(half, (X,), (V,))


def test_a_tall_jacobian_is_computed_in_forward_mode() -> None:
    calls: list[str] = []

    class Phases(Hook):
        def after(self, call: Call) -> None:
            calls.append(call.phase)

    a = np.random.default_rng(0).normal(size=(50, 3))
    with hook(Phases()):
        found = ad.jacobian(lambda x: ops.tanh(ops.matmul(a, x)))(X)
    assert "backward" not in calls
    np.testing.assert_allclose(found.numpy(), a * (1 - np.tanh(a @ X) ** 2)[:, None], rtol=1e-13)


def test_keyword_arguments_are_constants_of_every_derivative() -> None:
    scaled = lambda x, factor: ops.sin(x) * factor  # noqa: E731
    total = lambda x, factor: scaled(x, factor).sum()  # noqa: E731
    for derivative in (ad.jacfwd, ad.jacobian):
        np.testing.assert_allclose(derivative(scaled)(X, factor=2.0).numpy(), np.diag(2 * np.cos(X)))
    np.testing.assert_allclose(ad.hessian(total)(X, factor=2.0).numpy(), np.diag(-2 * np.sin(X)))
    each = ad.per_example_grad(lambda x, y, factor: total(x, factor) * y)(X, V, factor=2.0)
    np.testing.assert_allclose(each.numpy(), np.outer(V, 2 * np.cos(X)))


def test_jacfwd_has_the_trees_of_output_and_argument() -> None:
    argument = {"a": np.ones(2), "b": (np.ones(()), None)}
    found = ad.jacfwd(lambda p: (p["a"] * p["b"][0], p["b"][0]))(argument)
    assert found[0]["a"].numpy().tolist() == [[1, 0], [0, 1]]
    assert found[0]["b"][0].numpy().tolist() == [1, 1]
    assert (found[1]["a"].numpy().tolist(), found[1]["b"][0].item(), found[1]["b"][1]) == ([0, 0], 1, None)
    assert ad.jacfwd(lambda p: ops.ones((2,)))({}) == {}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ad.jet(ops.sin, (X,), []), ad.OptionError, r"jet: series is \[\], expected a list of derivatives"),
        (lambda: ad.jet(ops.sin, (X,), "V"), ad.OptionError, "jet: series is .V., expected a list of derivatives"),
        (lambda: ad.jet(ops.sin, (X,), [(V[:2],)]), ad.ShapeError, r"jet: found a tangent float64\[2\], expected"),
        (lambda: ad.jet(ops.sin, (X,), [V]), ad.AdtrainError, "jet: tangents must be a tuple .*, found ndarray"),
        (lambda: ad.jet(ops.argmax, (X,), [(V,)]), ad.DTypeError, "jet: the function's value is int64"),
        (lambda: ad.jvp(lambda x: 1.0, (X,), (V,)), ad.DTypeError, "the function returned a value of type float"),
        (lambda: ad.laplacian(ops.sum, np.arange(3)), ad.DTypeError, "laplacian: argument 0 is int64"),
        (lambda: ad.laplacian(ops.sum, X, V), ad.ShapeError, r"found directions of shape \(3,\), expected \(S, 3\)"),
        (lambda: ad.hessian(ops.sum, BOTH)(X, X), ad.ShapeError, r"hessian: found \(0, 1\) in argnums"),
        (lambda: ad.jacfwd(ops.sum, 1)(X), ad.ShapeError, "jacfwd: found 1 in argnums, expected an integer in "),
    ],
)
def test_invalid_uses_are_one_line(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
