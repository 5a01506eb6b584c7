"""Parameters of tests that compare with peers."""

from __future__ import annotations

from typing import Any

import pytest

NEEDED = {"torch": pytest.mark.needs_torch, "jax": pytest.mark.needs_jax}


def marked(*names: str) -> list[Any]:
    """Each peer, marked with the package that it needs."""
    return [pytest.param(name, marks=NEEDED.get(name.partition("-")[0], ())) for name in names]
