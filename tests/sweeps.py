"""Which combinations of a sweep plain pytest runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from adtrain.cases import Case


def spread(longer: Sequence[Any], shorter: Sequence[Any]) -> list[Any]:
    """Pairs in which each choice of both lists is at least once.

    Plain pytest runs those that are not marked exhaustive. Each choice of the shorter list is in one of them.
    """
    plain = [(-i % len(longer), i) for i in range(len(shorter))]
    others = [(i, i % len(shorter)) for i in range(len(longer)) if (i, i % len(shorter)) not in plain]
    return [
        pytest.param(longer[i], shorter[k], marks=marks)
        for pairs, marks in ((plain, ()), (others, pytest.mark.exhaustive))
        for i, k in pairs
    ]


def cases_of(cases: Sequence[Case]) -> list[Any]:
    """The cases as parameters. Plain pytest runs the first one of each operation."""
    first = {case.op: case for case in reversed(cases)}
    return [
        pytest.param(case, id=f"{case.op}, {case.name}", marks=() if case is first[case.op] else pytest.mark.exhaustive)
        for case in cases
    ]


def examples(plain: int, all: int) -> pytest.MarkDecorator:
    """The parameter ``examples``, of a property whose examples take long: how many plain pytest draws, and the rest."""
    return pytest.mark.parametrize("examples", [plain, pytest.param(all, marks=pytest.mark.exhaustive)])


def check_examples(examples: int, check: Callable[..., None], *strategies: SearchStrategy[Any]) -> None:
    """Run ``check`` on so many examples of the strategies."""
    settings(max_examples=examples)(given(*strategies)(check))()
