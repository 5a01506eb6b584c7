"""Which combinations of a sweep plain pytest runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def spread(*choices: Sequence[Any]) -> list[Any]:
    """All combinations. Those that are not exhaustive hold every choice, and every pair of the longest and another."""
    longest = max(map(len, choices))
    return [
        pytest.param(
            *(each[i] for each, i in zip(choices, at, strict=True)),
            marks=pytest.mark.exhaustive if sum(at) % longest else (),
        )
        for at in product(*(range(len(each)) for each in choices))
    ]
