"""What a staged function may not leave behind, however it is given; and what is its own."""

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


class Model:
    def __init__(self) -> None:
        self.latest: Any = None

    def counts(self, x: Any) -> Any:
        global calls
        calls += 1
        return x * 2.0

    def keeps(self, x: Any) -> Any:
        self.latest = x * 2.0
        return x

    @staticmethod
    def alone(x: Any) -> Any:
        global calls
        calls += 1
        return x

    def doubles(self, x: Any) -> Any:
        return x * 2.0


@pytest.mark.parametrize(
    ("f", "source", "name"),
    [
        (counts, counts, "calls"),
        (functools.partial(counts), counts, "calls"),
        (functools.partial(functools.partial(counts)), counts, "calls"),
        (Model().counts, Model.counts, "calls"),
        (functools.partial(Model.counts, Model()), Model.counts, "calls"),
        (Model.alone, Model.alone, "calls"),
        (removes, removes, "removed"),
    ],
)
def test_assigning_a_global_is_refused_by_its_line(f: Any, source: Callable[..., Any], name: str) -> None:
    line = source.__code__.co_firstlineno + (3 if source is Model.alone else 2)
    with pytest.raises(ad.TraceError, match=rf"test_core_side_effects\.py:{line}: a staged function assigns '{name}'"):
        stage(f)(np.ones(2))
    assert (calls, removed) == (0, 0)


def test_a_value_kept_in_an_attribute_is_refused_by_its_line() -> None:
    line = Model.keeps.__code__.co_firstlineno + 1
    with pytest.raises(ad.TraceError, match=rf"test_core_side_effects\.py:{line}: the value computed here is kept"):
        stage(Model().keeps)(np.ones(2))


def test_a_value_kept_by_a_lambda_is_refused() -> None:
    kept: dict[str, Any] = {}
    with pytest.raises(ad.TraceError, match="the value computed here is kept"):
        stage(lambda x: kept.setdefault("x", x * 2.0) + 1.0)(np.ones(2))


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
