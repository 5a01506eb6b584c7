"""A result of `adtrain bench` as text tables for a terminal, made of its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adtrain.bench.text import against, analysis, candidates, compare, operations, race, scaling, startup, step

KINDS = {
    "ops": operations,
    "candidates": candidates,
    "config": step,
    "scaling": scaling,
    "against": against,
    "analysis": analysis,
    "compare": compare,
    "race": race,
    "startup": startup,
}
"""From the kind of a result to the module with its `lines`."""


def render(result: Mapping[str, Any], width: int) -> list[str]:
    """The lines that show a result, as `--json` writes it, in `width` columns."""
    return list(KINDS[result["kind"]].lines(result, width))
