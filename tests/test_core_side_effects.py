"""Side effects that `stage` refuses, side effects that it does not see, and assignments that are none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops
from adtrain.core.staging import stage

calls = 0
removed = 0


def counts(x: Any) -> Any:
    global calls
    calls += 1
    return x * 2.0


def removes(x: Any) -> Any:
    global removed
    del removed
    return x


def calls_helper(x: Any) -> Any:
    return counts(x) + 1.0


def calls_helper_in_lambda(x: Any) -> Any:
    return next(f(x) for f in (lambda y: calls_helper(y),))


class Model:
    scale = 2.0

    def __init__(self) -> None:
        self.count = 0
        self.latest: Any = None

    def __call__(self, x: Any) -> Any:
        self.count += 1
        return x * 2.0

    def counts(self, x: Any) -> Any:
        global calls
        calls += 1
        return x * 2.0

    def counts_in_attribute(self, x: Any) -> Any:
        self.count += 1
        return x * 2.0

    def counts_in_another_method(self, x: Any) -> Any:
        return self.counts_in_attribute(x) + self.counts_in_attribute(x)

    def adds_attribute(self, x: Any) -> Any:
        self.calls = 1
        return x

    def deletes_attribute(self, x: Any) -> Any:
        del self.latest
        return x

    def stores_result(self, x: Any) -> Any:
        self.latest = x * 2.0
        return x

    def stores_argument(self, x: Any) -> Any:
        self.latest = {"x": [x]}
        return x

    @staticmethod
    def static(x: Any) -> Any:
        global calls
        calls += 1
        return x

    @classmethod
    def counts_in_class(cls, x: Any) -> Any:
        cls.scale = 3.0
        return x

    def doubles(self, x: Any) -> Any:
        return x * self.two

    @functools.cached_property
    def two(self) -> float:
        return 2.0


class CallableWithGlobal:
    def __call__(self, x: Any) -> Any:
        global calls
        calls += 1
        return x


@pytest.mark.parametrize(
    ("f", "source", "name"),
    [
        (counts, counts, "calls"),
        (functools.partial(counts), counts, "calls"),
        (functools.partial(functools.partial(counts)), counts, "calls"),
        (Model().counts, Model.counts, "calls"),
        (functools.partial(Model.counts, Model()), Model.counts, "calls"),
        (Model.static, Model.static, "calls"),
        (removes, removes, "removed"),
        (calls_helper, counts, "calls"),
        (calls_helper_in_lambda, counts, "calls"),
        (ad.value_and_grad(calls_helper), counts, "calls"),
        (CallableWithGlobal(), CallableWithGlobal.__call__, "calls"),
    ],
)
def test_assigning_a_global_is_refused_with_its_line(f: Any, source: Callable[..., Any], name: str) -> None:
    line = source.__code__.co_firstlineno + (3 if source is Model.static else 2)
    with pytest.raises(ad.TraceError, match=rf"test_core_side_effects\.py:{line}: a jitted function assigns '{name}'"):
        stage(f)(np.ones(2))
    assert (calls, removed) == (0, 0)


def test_assigning_a_nonlocal_variable_in_a_function_of_the_closure_is_refused() -> None:
    total = 0

    def helper(x: Any) -> Any:
        nonlocal total
        total += 1
        return x

    line = helper.__code__.co_firstlineno + 2
    with pytest.raises(ad.TraceError, match=rf"test_core_side_effects\.py:{line}: a jitted function assigns 'total'"):
        stage(lambda x: helper(x) * 2.0)(np.ones(2))
    assert total == 0


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("counts_in_attribute", "count"),
        ("counts_in_another_method", "count"),
        ("__call__", "count"),
        ("adds_attribute", "calls"),
        ("deletes_attribute", "latest"),
    ],
)
def test_a_method_that_changes_an_attribute_is_refused(method: str, name: str) -> None:
    model = Model()
    for f in (getattr(model, method), functools.partial(getattr(model, method))):
        model.__init__()  # type: ignore[misc]
        vars(model).pop("calls", None)
        with pytest.raises(ad.TraceError, match=f"a jitted function changes the attribute '{name}' of its Model"):
            stage(f)(np.ones(2))


def test_a_callable_object_or_function_that_changes_its_own_attribute_is_refused() -> None:
    def f(x: Any) -> Any:
        f.count = 1  # type: ignore[attr-defined]
        return x

    for function, name in ((Model(), "'count' of its Model"), (f, "'count' of its function")):
        with pytest.raises(ad.TraceError, match=f"a jitted function changes the attribute {name}"):
            stage(function)(np.ones(2))


def test_a_class_method_that_changes_an_attribute_of_its_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "scale", 2.0)
    with pytest.raises(ad.TraceError, match="a jitted function changes the attribute 'scale' of its type"):
        stage(Model.counts_in_class)(np.ones(2))


def test_a_traced_value_stored_in_an_attribute_is_refused_with_its_line() -> None:
    line = Model.stores_result.__code__.co_firstlineno + 1
    with pytest.raises(ad.TraceError, match=rf"test_core_side_effects\.py:{line}: the value computed here is stored"):
        stage(Model().stores_result)(np.ones(2))


def test_a_stored_argument_is_refused() -> None:
    with pytest.raises(ad.TraceError, match="an argument of this call is stored outside the jitted function"):
        stage(Model().stores_argument)(np.ones(2))


def stores_in_helper(x: Any, model: Model) -> Any:
    return model.stores_result(x)


class StoresWhenCalled:
    def __call__(self, x: Any) -> Any:
        other_model.stores_argument(x)
        return x


other_model = Model()


@pytest.mark.parametrize(
    "f",
    [
        lambda x: stores_in_helper(x, other_model),  # a helper function
        lambda x: other_model.stores_result(x),  # a method of another object
        StoresWhenCalled(),  # a callable object
        ad.grad(lambda x: other_model.stores_result(x).sum()),  # a value that is also being differentiated
        lambda x: [vars(other_model).update(latest=lambda: x), x][1],  # in a closure
    ],
)
def test_a_traced_value_stored_by_any_function_is_refused(f: Any) -> None:
    other_model.latest = None
    with pytest.raises(ad.TraceError, match="is stored outside the jitted function"):
        stage(f)(np.ones(2))


def test_a_traced_value_stored_by_a_lambda_is_refused() -> None:
    stored: dict[str, Any] = {}
    with pytest.raises(ad.TraceError, match="the value computed here is stored outside"):
        stage(lambda x: stored.setdefault("x", x * 2.0) + 1.0)(np.ones(2))


def test_untraced_values_in_containers_and_other_objects_are_not_seen() -> None:
    model, counts = Model(), [0]

    def f(x: Any) -> Any:
        counts[0] += 1
        return model.counts_in_attribute(x)

    staged = stage(f)
    staged(np.ones(2))
    staged(np.ones(2))
    assert (counts, model.count) == ([1], 1)  # once, when it was traced: documented in adtrain.core.side_effects


def test_variables_of_its_own_may_be_assigned_anywhere_inside() -> None:
    def f(x: Any) -> Any:
        total = x

        def add(y: Any) -> None:
            nonlocal total
            total = total + y

        for y in [z := ops.exp(x), z * 2.0]:
            add(y)
        return total

    x = np.ones(2)
    np.testing.assert_array_equal(stage(f)(x).numpy(), f(ad.array(x)).numpy())
    assert stage(functools.partial(Model().doubles))(x).numpy().tolist() == [2, 2]
    assert stage(lambda x: [y := x * 2.0, y][1])(x).numpy().tolist() == [2, 2]


def test_a_staged_function_and_a_cached_property_may_store_what_they_compute() -> None:
    inner = stage(Model().doubles)
    assert stage(inner)(np.ones(2)).numpy().tolist() == [2, 2]
    assert stage(inner)(np.ones(3)).numpy().tolist() == [2, 2, 2]
