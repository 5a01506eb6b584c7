"""Parameters of tests that compare with peers, and a fixture that makes these quick."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

NEEDED = {"torch": pytest.mark.needs_torch, "jax": pytest.mark.needs_jax}


def marked(*names: str) -> list[Any]:
    """Each peer, marked with the package that it needs."""
    return [pytest.param(name, marks=NEEDED.get(name.partition("-")[0], ())) for name in names]


def crossed(peers: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Each of the peers that are `marked` with each case.

    JAX compiles each case for up to seconds. Plain pytest runs its first one, and `-m exhaustive` the others.
    """
    found = []
    for peer in peers:
        for i, case in enumerate(cases):
            rest = [pytest.mark.exhaustive] if i and peer.values[0].startswith("jax") else []
            found.append(pytest.param(*peer.values, case, marks=[*peer.marks, *rest]))
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # read when jax is first imported
