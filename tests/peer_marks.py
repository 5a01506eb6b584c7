"""Parameters of tests that compare with peers, and a fixture that makes these quick."""

from __future__ import annotations

from typing import Any

import pytest

NEEDED = {"torch": pytest.mark.needs_torch, "jax": pytest.mark.needs_jax}


def marked(*names: str) -> list[Any]:
    """Each peer, marked with the package that it needs."""
    return [pytest.param(name, marks=NEEDED.get(name.partition("-")[0], ())) for name in names]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # read when jax is first imported
