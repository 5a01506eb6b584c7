"""The dataclasses of `lazy`, whose methods are made at their first use, against those of Python."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, field
from threading import Barrier
from typing import Any, ClassVar

import pytest

from adtrain.lazy import dataclass


def classes(decorator: Callable[..., Any]) -> list[type]:
    """Classes with each thing that changes what is generated."""

    @decorator(frozen=True)
    class Base:
        """Has a docstring."""

        kind: ClassVar[str] = "base"
        first: int
        second: tuple[int, ...] = ()

        def __post_init__(self) -> None:
            if self.first < 0:
                raise ValueError(self.first)

    @decorator(frozen=True)
    class Derived(Base):
        """Overrides a field after KW_ONLY."""

        _: KW_ONLY
        third: list[int] = field(default_factory=list, compare=False)
        second: tuple[int, ...] = field(default=(1,), repr=False)

    @decorator(frozen=True)
    class Compared:
        """Defines its own equality."""

        value: int = 0

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Compared) and self.value % 2 == other.value % 2

    @decorator(frozen=True, eq=False)
    class Identical:
        """Is equal to itself only."""

        value: int = 0

    @decorator(frozen=True, repr=False, kw_only=True)
    class Shown:
        """Defines its own text."""

        value: int = 0

        def __repr__(self) -> str:
            return "shown"

    return [Base, Derived, Compared, Identical, Shown]


PAIRS = list(zip(classes(dataclass), classes(dataclasses.dataclass), strict=True))
NAMES = ("name", "default", "kw_only", "compare", "repr", "init", "hash")


@pytest.mark.parametrize(("made", "expected"), PAIRS, ids=[made.__name__ for made, _ in PAIRS])
def test_a_dataclass_is_that_of_python(made: Any, expected: Any) -> None:
    assert inspect.signature(made) == inspect.signature(expected)
    assert [[getattr(x, n) for n in NAMES] for x in dataclasses.fields(made)] == [
        [getattr(x, n) for n in NAMES] for x in dataclasses.fields(expected)
    ]
    assert (made.__match_args__, made.__doc__) == (expected.__match_args__, expected.__doc__)
    assert {name for name in vars(made) if not name.startswith("_")} == {
        name for name in vars(expected) if not name.startswith("_")
    }
    first = next(iter(dataclasses.fields(made))).name
    one, other = ([cls(**{first: i}) for i in range(3)] for cls in (made, expected))
    assert list(map(repr, one)) == list(map(repr, other))
    assert [[x == y for x in one] for y in one] == [[x == y for x in other] for y in other]
    assert (hash(one[0]) == hash(made(**{first: 0}))) == (hash(other[0]) == hash(expected(**{first: 0})))
    assert dataclasses.replace(one[0], **{first: 2}) == one[2] or made.__eq__ is object.__eq__
    with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{first}'"):
        setattr(one[0], first, 1)
    with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot delete field '{first}'"):
        delattr(one[0], first)


def test_a_missing_argument_and_an_error_of_the_class_are_those_of_python() -> None:
    for cls in (classes(dataclass)[0], classes(dataclasses.dataclass)[0]):
        with pytest.raises(TypeError, match=r"Base\.__init__\(\) missing 1 required positional argument: 'first'"):
            cls()
        with pytest.raises(ValueError, match="-1"):
            cls(-1)


@dataclass(frozen=True)
class Stored:
    """Is pickled by its name."""

    value: int


def test_an_object_that_no_constructor_made_can_be_compared_and_not_changed() -> None:
    found = pickle.loads(pickle.dumps(Stored(3)))
    assert found == Stored(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.value = 4


def test_threads_that_use_a_class_first_all_get_objects() -> None:
    for _ in range(20):
        cls, start = classes(dataclass)[1], Barrier(4)

        def make(i: int, cls: Any = cls, start: Barrier = start) -> Any:
            start.wait()
            return cls(i)

        with ThreadPoolExecutor(4) as pool:
            assert [x.first for x in pool.map(make, range(4))] == [0, 1, 2, 3]


def test_nothing_is_made_for_a_class_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataclasses, "dataclass", None)
    classes(dataclass)
