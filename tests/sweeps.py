"""Which combinations of a sweep plain pytest runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def spread(*choices: Sequence[Any], every: int = 1) -> list[Any]:
    """A part of all combinations, one in ``every``. Plain pytest runs those that are not marked exhaustive.

    Each choice of the shorter lists is in a combination that plain pytest runs.
    """
    longest = max(map(len, choices))
    return [
        pytest.param(
            *(each[i] for each, i in zip(choices, at, strict=True)),
            marks=pytest.mark.exhaustive if sum(at) % longest >= every else (),
        )
        for at in product(*(range(len(each)) for each in choices))
        if sum(at) % every == 0
    ]


def examples(plain: int, all: int) -> pytest.MarkDecorator:
    """The parameter ``examples``, of a property whose examples take long: how many plain pytest draws, and the rest."""
    return pytest.mark.parametrize("examples", [plain, pytest.param(all, marks=pytest.mark.exhaustive)])


def check_examples(examples: int, check: Callable[..., None], *strategies: SearchStrategy[Any]) -> None:
    """Run ``check`` on so many examples of the strategies."""
    settings(max_examples=examples)(given(*strategies)(check))()
