"""Static equality: values that a function can tell apart have different keys, whatever their == and repr say."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import math
import pathlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adtrain as ad
from adtrain import nn, ops
from adtrain.core.staging import stage
from adtrain.core.static_key import lasting_text, static_key
from adtrain.passes import SIMPLIFY

X = ad.array(np.array([1.0, 2.0], np.float32))


class Text(str):
    """A string with an attribute."""

    def __new__(cls, text: str, unit: str = "") -> Text:
        made = super().__new__(cls, text)
        made.unit = unit  # type: ignore[attr-defined]
        return made


class Level(enum.IntEnum):
    ONE = 1


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Setting:
    """Its ``==`` and its repr leave out a field."""

    name: str
    factor: Any = field(default=1.0, compare=False, repr=False)


class Length:
    """An object with a ``==`` of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Length) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


def nan(payload: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000 + payload))[0])


UTC_PLUS_1 = datetime.timezone(datetime.timedelta(hours=1))
NOON = datetime.datetime(2020, 1, 1, 12, tzinfo=datetime.timezone.utc)
FAMILIES: dict[str, list[Any]] = {
    "one": [1, 1.0, True, 1 + 0j, np.int64(1), np.int32(1), np.float32(1), np.bool_(True), Level.ONE],
    "exact": [fractions.Fraction(1), decimal.Decimal("1"), decimal.Decimal("1.0"), decimal.Decimal("1.00")],
    "zero": [0, 0.0, -0.0, False, 0j, complex(-0.0, 0), complex(0, -0.0), decimal.Decimal("-0"), decimal.Decimal("0")],
    "zero of NumPy": [
        t(x) for t in (np.float16, np.float32, np.float64, np.longdouble, np.complex64) for x in (0.0, -0.0)
    ],
    "nan": [math.nan, nan(1), -math.nan, np.float32("nan"), decimal.Decimal("nan"), decimal.Decimal("nan7")],
    "text": ["a", Text("a"), Text("a", "m"), np.str_("a"), b"a", np.bytes_(b"a")],
    "range": [range(0, 3, 2), range(0, 4, 2), slice(0, 1), slice(0, 1.0), slice(False, 1)],
    "dict": [{1: 0}, {1.0: 0}, {True: 0}, {1: 0.0}, collections.OrderedDict({1: 0})],
    "order": [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
    "dataclass": [Setting("s"), Setting("s", 2.0), Setting("s", 1), Setting("s", True)],
    "object": [Length(1), Length(1.0), Length((0.0,)), Length((-0.0,))],
    "time": [NOON, NOON.astimezone(UTC_PLUS_1), NOON.replace(fold=1)],
    "path": [pathlib.PureWindowsPath("a"), pathlib.PureWindowsPath("A")],
    "partial": [functools.partial(max, 1), functools.partial(max, 1.0)],
    "layer": [nn.Dropout(0.0), nn.Dropout(-0.0)],
    "function": [lambda x: x, lambda x: x],
}
CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "tuple": lambda x: (x,),
    "list": lambda x: [x],
    "named tuple": lambda x: Pair(0, x),
    "dict": lambda x: {"k": x},
    "frozenset": lambda x: frozenset([x]),
    "key of a dict": lambda x: {x: 0},
    "field that is not compared": lambda x: Setting("s", x),
    "object": lambda x: Length(x),
    "deep": lambda x: ({"k": [Setting("s", (x,))]},),
}


def hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_that_differ_have_different_keys(family: str, container: str) -> None:
    values = [x for x in FAMILIES[family] if hashable(x) or container not in ("frozenset", "key of a dict", "object")]
    keys = [static_key(CONTAINERS[container](x)) for x in values]
    assert len(set(keys)) == len(values)
    assert keys == [static_key(CONTAINERS[container](x)) for x in values]


LEAVES = [x for family in FAMILIES.values() for x in family if hashable(x)]
recipes = st.recursive(
    st.integers(0, len(LEAVES) - 1), lambda x: st.tuples(st.sampled_from(list(CONTAINERS)[1:7]), x), max_leaves=4
)


def made(recipe: Any) -> Any:
    """The value of a recipe: a leaf by its number, or a container around another value."""
    if isinstance(recipe, int):
        return LEAVES[recipe]
    inner = made(recipe[1])
    return CONTAINERS[recipe[0]](inner if hashable(inner) else str(recipe))


@settings(max_examples=100)
@given(recipes, recipes)
def test_values_have_the_same_key_if_they_are_made_in_the_same_way(a: Any, b: Any) -> None:
    assert static_key(made(a)) == static_key(made(a))
    assert (static_key(made(a)) == static_key(made(b))) == (a == b)


@pytest.mark.parametrize("family", FAMILIES)
def test_jit_runs_the_program_of_the_value_that_it_is_given(family: str) -> None:
    seen: list[Any] = []

    def f(x: Any, value: Any) -> Any:
        seen.append(value)
        return x + len(seen)

    jitted = ad.jit(f, static_argnums=1)
    for _ in range(2):
        for i, value in enumerate(FAMILIES[family]):
            np.testing.assert_array_equal(jitted(X, value).numpy(), X.numpy() + i + 1)
    assert [a is b for a, b in zip(seen, FAMILIES[family], strict=True)] == [True] * len(seen)


@pytest.mark.parametrize(
    "dicts",
    [[{1: X}, {1.0: X}, {True: X}], [{"a": X}, {Text("a", "m"): X}], [{"a": X, "b": X * 2.0}, {"b": X * 2.0, "a": X}]],
    ids=["numbers", "texts", "order"],
)
def test_jit_tells_dicts_apart_by_the_types_and_the_order_of_their_keys(dicts: list[dict[Any, Any]]) -> None:
    def f(given: dict[Any, Any]) -> Any:
        key = next(iter(given))
        return given[key] * len(f"{key!r}{type(key).__name__}")

    jitted = ad.jit(f)
    for each in (*dicts, *dicts):
        np.testing.assert_array_equal(jitted(each).numpy(), f(each).numpy())


def test_a_changed_object_has_another_program() -> None:
    @dataclass(eq=False)
    class Options:
        factor: float

    options = Options(2.0)
    f = ad.jit(lambda x, options: x * options.factor, static_argnums=1)
    np.testing.assert_array_equal(f(X, options).numpy(), [2, 4])
    options.factor = 3.0
    np.testing.assert_array_equal(f(X, options).numpy(), [3, 6])


def test_equations_are_merged_by_the_values_of_parameters_not_by_their_repr() -> None:
    scale = ad.custom_op(
        "scale_by_setting",
        shape=lambda x, setting: ad.ArrayType(x.shape, x.dtype),
        numpy=lambda x, setting: x * np.float32(setting.factor),
    )
    both: list[Any] = [Setting("s", 1.0), Setting("s", 8.0), Setting("s", 1.0)]

    def f(x: Any) -> Any:
        return [scale(x, setting=each) for each in both]

    for found, expected in zip(ad.jit(f)(X), f(X), strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())
    program = stage(f, SIMPLIFY).program(X)
    assert len(program.equations) == 2


def test_a_lasting_text_names_classes_and_functions_and_has_the_bits_of_floats() -> None:
    expected = '[["builtins","tuple"],[["adtrain.nn.activation","ReLU"]],[["builtins","int"],1],'
    expected += '[["builtins","float"],["0000000000000080"]],[["builtins","function"],["adtrain.ops","exp"]]]'
    assert lasting_text((nn.ReLU(), 1, -0.0, ops.exp)) == expected


@pytest.mark.parametrize("x", [object(), lambda: None, nn.Sequential], ids=["object", "lambda", "local"])
def test_a_value_without_a_lasting_text_is_refused(x: Any) -> None:
    class Local:
        pass

    with pytest.raises(ValueError, match="expected one that is equal in all processes"):
        lasting_text(Local if x is nn.Sequential else x)
