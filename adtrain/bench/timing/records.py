"""Numbers and records of a result of `adtrain bench` as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from adtrain.bench.timing.protocol import busy
from adtrain.bench.timing.sampling import NOISY


def remarks(result: Mapping[str, Any]) -> list[str]:
    """The number of outliers, and warnings where times are noisy or the machine was busy."""
    records = list(timings(result))
    samples, beyond = sum(x["samples"] for x in records), sum(len(x["outliers"]) for x in records)
    lines = [f"{beyond:,} of {samples:,} samples are outliers (beyond 1.5 interquartile ranges); none is removed"]
    if noisy := sum(x["noisy"] for x in records):
        lines.append(
            f"noisy machine: {noisy} of {len(records)} times, marked ~, have an interval wider than {NOISY:.0%} of the "
            "median; end other work and repeat"
        )
    if warning := busy(result["protocol"]):
        lines.append(warning)
    return lines


def timings(node: Any) -> Iterator[Mapping[str, Any]]:
    """The records of all times in a result."""
    if isinstance(node, Mapping):
        if "median_ms" in node:
            yield node
        else:
            for value in node.values():
                yield from timings(value)
    elif isinstance(node, list):
        for each in node:
            yield from timings(each)


def milliseconds(ms: float) -> str:
    """Four significant digits, at most down to nanoseconds."""
    decimals = 3 - math.floor(math.log10(abs(ms))) if ms else 0
    return f"{ms:.{min(max(decimals, 0), 6)}f}"


def launch(shape: Mapping[str, Any]) -> str:
    """A launch: "132x1x1 of 256x1x1, 34816 B" (grid, block, shared memory), or "2 threads" on a CPU."""
    if "grid" not in shape:
        return f"{shape['threads']} threads" if shape else ""
    grid, block = ("x".join(map(str, shape[name])) for name in ("grid", "block"))
    return f"{grid} of {block}" + (f", {shape['shared_bytes']} B" if shape["shared_bytes"] else "")
