"""jit: one Program for all floats, keyword arguments, static and donated arguments, and errors."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adtrain as ad
from adtrain import nn, ops, optim
from adtrain.core import staging
from adtrain.core.array import Placeholder
from adtrain.core.staging import stage

X = np.array([1.0, 2.0, 3.0], np.float32)


def counted(traces: list[Any]) -> Any:
    """A function that appends to ``traces`` when it runs in Python."""

    def f(x: Any, factor: Any, power: int = 1) -> Any:
        traces.append(None)
        return ops.power(x, power) * factor

    return f


def test_a_changed_float_runs_the_same_program_and_a_changed_shape_or_integer_another() -> None:
    traces: list[Any] = []
    f = ad.jit(counted(traces))
    for factor in (2.0, 3.0, -0.0, float("inf"), np.float64(0.1)):
        np.testing.assert_array_equal(f(X, factor).numpy(), X * np.float32(factor))
    assert len(traces) == 1
    f(X[:2], 2.0)
    assert len(traces) == 2
    assert f(X, 2.0, 3).numpy().tolist() == [2, 16, 54]
    assert f(X, 2.0, True).numpy().tolist() == [2, 4, 6]
    assert len(traces) == 4


def test_a_float_takes_the_dtype_of_the_arrays_beside_it() -> None:
    f = ad.jit(lambda x, c: (x * c, c + x, c * 2.0 + 1.0, ops.exp(c), ops.where(x > c, x, c), x**c))
    for x in (X, X.astype(np.float64), np.array([1, 2, 3])):
        eager: Any = (ad.array(x) * 0.1, 0.1 + ad.array(x), ad.array(0.1 * 2.0 + 1.0), ops.exp(0.1))
        eager += (ops.where(ad.array(x) > 0.1, ad.array(x), 0.1), ad.array(x) ** 0.1)
        for found, expected in zip(f(x, 0.1), eager, strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-6)


numbers = st.floats(-8, 8)


def arithmetic(x: Any, a: Any, b: Any) -> Any:
    found = a + b, a - b, a * b, a / b, a // b, a % b, -a, abs(a), 2 * a, 1 - a, a + 2, 3 / b, b**2
    return [x * c for c in found], (a < b, a <= b, a == b, a != b, a > b, a >= b)


jitted_arithmetic = ad.jit(arithmetic)


@given(numbers, numbers.filter(lambda b: abs(b) > 0.01))
def test_arithmetic_of_floats_is_that_of_python(a: float, b: float) -> None:
    results, comparisons = jitted_arithmetic(np.array(1.0), a, b)
    expected, compared = arithmetic(1.0, a, b)
    np.testing.assert_allclose([y.item() for y in results], expected, rtol=1e-12, atol=1e-12)
    assert [y.item() for y in comparisons] == list(compared)


def test_numpy_arrays_and_lists_are_multiplied_by_a_float() -> None:
    f = ad.jit(lambda x, c: (X * c, c * X, c - X.astype(np.float64), ops.stack([c, c]), ops.zeros(2) + x))
    product, same, difference, stacked, _ = f(np.float32(0), 2.0)
    assert product.numpy().tolist() == same.numpy().tolist() == [2, 4, 6]
    assert difference.dtype == np.float64
    assert stacked.numpy().tolist() == [2, 2]


def test_a_learning_rate_is_traced_with_the_step() -> None:
    model, optimizer = nn.Sequential(nn.Linear(4), nn.ReLU(), nn.Linear(2)), optim.Adam(0.1)
    params, _ = model.init(3)
    labels = np.array([0, 1, 1])

    def step(params: Any, averages: Any, lr: Any) -> Any:
        grads = ad.grad(lambda params: ops.cross_entropy(model(params, np.stack([X, X, X])), labels))(params)
        return optimizer.update(params, grads, averages, lr)

    jitted = ad.jit(step)
    for lr in (0.1, 0.05):
        found, _ = jitted(params, optimizer.init(params), lr)
        expected, _ = step(params, optimizer.init(params), lr)
        for a, b in zip(found["0"].values(), expected["0"].values(), strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5)
    assert len(jitted._staged.compiled) == 1


def test_static_values_that_compare_equal_have_different_programs() -> None:
    f = ad.jit(lambda x, c: x * c, static_argnums=1)
    found = [f(np.array([1]), c) for c in (1, 1.0, True)]
    assert [y.dtype for y in found] == [np.int64, np.float32, np.int64]
    assert [math.copysign(1, f(X, c).numpy()[0]) for c in (0.0, -0.0)] == [1, -1]
    assert [math.copysign(1, f(X, (0.0, c)[1]).numpy()[0]) for c in (0.0, -0.0)] == [1, -1]
    before = len(f._staged.compiled)
    for _ in range(2):
        assert np.isnan(f(X, float("nan")).numpy()).all()
    assert len(f._staged.compiled) == before + 1


@pytest.mark.parametrize("declared", [{"static_argnums": 1}, {"static_argnums": -1}, {"static_argnames": "limit"}])
def test_a_static_float_may_decide_about_a_branch(declared: dict[str, Any]) -> None:
    def f(x: Any, limit: float) -> Any:
        return x * 2.0 if limit > 1 else x

    jitted = ad.jit(f, **declared)
    assert jitted(X, 2.0).numpy().tolist() == [2, 4, 6]
    assert jitted(X, limit=0.5).numpy().tolist() == [1, 2, 3]
    assert jitted(X, 0.5).numpy().tolist() == [1, 2, 3]


def test_a_model_is_a_static_argument() -> None:
    @ad.jit(static_argnums=0)
    def forward(model: nn.Module, params: Any, x: Any) -> Any:
        return model(params, x)

    for model in (nn.Linear(2), nn.Linear(3)):
        params, _ = model.init(3)
        expected = model(params, ad.array(X[None])).numpy()
        np.testing.assert_allclose(forward(model, params, X[None]).numpy(), expected, rtol=1e-6)


def test_the_number_of_programs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "MAX_PROGRAMS", 3)
    traces: list[Any] = []
    f = ad.jit(counted(traces))
    for power in (1, 2, 3, 1, 4):
        f(X, 1.0, power)
    assert (len(f._staged.compiled), len(traces)) == (3, 4)
    f(X, 1.0, 1)
    assert len(traces) == 4
    f(X, 1.0, 2)  # was used least recently
    assert len(traces) == 5


def test_keyword_arguments_in_any_order_have_one_program() -> None:
    traces: list[Any] = []

    @ad.jit
    def f(x: Any, *, shift: Any, scale: Any = 1.0) -> Any:
        traces.append(None)
        return x * scale + shift

    assert f(X, shift=1.0, scale=2.0).numpy().tolist() == [3, 5, 7]
    assert f(x=X, scale=2.0, shift=0.0).numpy().tolist() == [2, 4, 6]
    assert f(X, scale=3.0, shift=np.ones(3, np.float32)).numpy().tolist() == [4, 7, 10]
    assert len(traces) == 3
    f(X, scale=5.0, shift=7.0)
    assert len(traces) == 3
    assert f(X, shift=0.0).numpy().tolist() == [1, 2, 3]


def test_a_decorated_function_keeps_its_name_docstring_and_signature() -> None:
    @ad.jit
    def plain(x: Any) -> Any:
        """Twice x."""
        return x * 2.0

    @ad.jit(static_argnames=("times",))
    def with_options(x: Any, times: int = 2) -> Any:
        return x * times

    assert (plain.__name__, plain.__doc__) == ("plain", "Twice x.")
    assert str(inspect.signature(with_options)) == "(x: 'Any', times: 'int' = 2) -> 'Any'"
    assert plain(X).numpy().tolist() == with_options(X).numpy().tolist() == [2, 4, 6]
    assert "mul" in str(plain.program(X))


def test_a_method_can_be_jitted() -> None:
    @dataclass(frozen=True)
    class Scale:
        factor: float

        @ad.jit(static_argnums=0)
        def __call__(self, x: Any) -> Any:
            return x * self.factor

    assert Scale(2.0)(X).numpy().tolist() == [2, 4, 6]
    assert Scale(3.0)(X).numpy().tolist() == [3, 6, 9]


def test_a_jitted_function_is_differentiated_by_arrays_and_by_a_number() -> None:
    f = ad.jit(lambda x, c: (x * x * c).sum())
    assert ad.grad(f)(ad.array(X), 2.0).numpy().tolist() == [4, 8, 12]
    assert ad.grad(f, argnums=1)(ad.array(X), 2.0).item() == 14
    assert ad.hessian(f)(ad.array(X[:2]), 0.5).numpy().tolist() == [[1, 0], [0, 1]]
    by_c = ad.jit(lambda c: ad.grad(lambda c: (X * c).sum())(c))
    assert by_c(2.0).item() == 6


def test_a_float_goes_through_jit_within_jit() -> None:
    traces: list[Any] = []
    inner = ad.jit(counted(traces))
    outer = ad.jit(lambda x, c: inner(x, c * 0.5) + c)
    for c in (2.0, 3.0):
        found = outer(X, c)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found.numpy(), X * (c * 0.5) + c)
    assert len(traces) == 1


def test_a_donated_array_cannot_be_used_again() -> None:
    @ad.jit(donate_argnums=0)
    def f(x: Any, y: Any) -> Any:
        return x + y

    for call in (lambda x: f(x, 1.0), lambda x: f(x=x, y=1.0)):
        x = ad.array(X)
        assert call(x).numpy().tolist() == [2, 3, 4]
        with pytest.raises(ad.TraceError, match="was donated to a jitted function"):
            x.numpy()


@pytest.mark.parametrize(
    ("f", "needs"),
    [
        (lambda x, c: x if c > 1 else -x, "reads the elements of a traced value bool"),
        (lambda x, c: x if c else -x, "needs the value of a float argument"),
        (lambda x, c: x * math.sqrt(c), "needs the value of a float argument"),
        (lambda x, c: x * float(c), "needs the value of a float argument"),
        (lambda x, c: x[: int(c)], "needs the value of a float argument"),
        (lambda x, c: x * round(c, 2), "needs the value of a float argument"),
        (lambda x, c: x * np.array(c), "needs the value of a float argument"),
        (lambda x, c: ops.full(3, c) + x, "needs the value of a float argument"),
        (lambda x, c: ops.leaky_relu(x, c), "needs the value of"),
        (lambda x, c: ops.dropout(x, c, ops.rng_state(0)), "needs the value of|reads the elements"),
    ],
)
def test_a_float_whose_value_is_needed_is_refused_with_its_line_and_advice(f: Any, needs: str) -> None:
    with pytest.raises(ad.TraceError, match=needs) as caught:
        ad.jit(f)(X, 2.0)
    message = str(caught.value)
    assert f"{f.__code__.co_filename}:{f.__code__.co_firstlineno}: " in message
    assert message.endswith("static_argnums=...)") or "static_argnums=...), which traces" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ad.jit(lambda x: x, static_argnums=1), "jit: found 1 in static_argnums, expected integers in [-1, 1)"),
        (
            lambda: ad.jit(lambda x: x, donate_argnums=-2),
            "jit: found -2 in donate_argnums, expected integers in [-1, 1)",
        ),
        (
            lambda: ad.jit(lambda x, y: x, static_argnames="z"),
            "jit: static_argnames names 'z', found no such argument (known: x, y)",
        ),
        (
            lambda: ad.jit(lambda x: x, static_argnums=0, donate_argnums=0),
            "jit: argument 0 is static and donated, expected one of them",
        ),
        (lambda: ad.jit(3), "jit: found 3, expected a function"),  # type: ignore[call-overload]
        (
            lambda: ad.jit(lambda x: 1.0)(X),
            "jit: the function returned a value of type float, expected adtrain arrays: ad.array(...)",
        ),
        (
            lambda: ad.jit(lambda x: np.ones(3))(X),
            "jit: the function returned a value of type numpy.ndarray, expected adtrain arrays: ad.array(...)",
        ),
        (
            lambda: ad.jit(lambda m, x: x)(nn.ReLU(), X),
            "jit: found an argument of type ReLU, expected arrays and numbers; if it is a constant of the function, "
            "declare it with jit(f, static_argnums=...)",
        ),
        (
            lambda: ad.jit(lambda m: ops.zeros(1), static_argnums=0)([X]),
            "jit: a static argument holds an array, expected numbers, strings or other objects",
        ),
        (
            lambda: ad.jit(lambda m: ops.zeros(1), static_argnums=0)({1, 2}),
            "jit: a static argument is not hashable: unhashable type: 'set'",
        ),
    ],
)
def test_the_error_of_a_wrong_argument(call: Any, message: str) -> None:
    with pytest.raises(ad.AdtrainError) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.compiled
def test_values_that_exceed_the_memory_are_an_error() -> None:
    def too_many(x: ad.Value) -> ad.Value:
        return ops.sum(ops.sort(x[:, None, None, None] * x[:, None, None] * x[:, None] * x))

    with pytest.raises(ad.DeviceError, match=r"^not enough memory for the values of a compiled program"):
        ad.jit(too_many)(np.ones(4096, np.float32))


def test_values_of_several_devices_are_refused_while_a_function_is_staged() -> None:
    on_cpu, on_gpu = (Placeholder((2,), np.dtype(np.float32), device) for device in ("cpu", "gpu"))
    with pytest.raises(ad.DeviceError, match="mul: arguments are on cpu and gpu, expected one device"):
        stage(lambda x, y: x * y, ()).program(on_cpu, on_gpu)
