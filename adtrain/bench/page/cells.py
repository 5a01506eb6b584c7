"""Numbers of a result as text in tables and at axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log10
from typing import Any

from markupsafe import Markup

from adtrain.bench.page import blocks
from adtrain.bench.timing.records import milliseconds
from adtrain.bench.timing.sampling import NOISY

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def time(record: Mapping[str, Any] | None) -> Markup:
    """Milliseconds, marked with "~" if noisy, with the interval as a tooltip."""
    if record is None:
        return Markup()
    tooltip = f"95% interval {interval(record)} ms; {record['samples']} samples of {record['repeats']}"
    return blocks.hint(f"{'~' if record['noisy'] else ''}{milliseconds(record['median_ms'])}", tooltip)


def headline(name: str, record: Mapping[str, Any], text: Callable[[float], str], rate: bool = False) -> tuple[str, ...]:
    """A tile with a number that follows from a time. If the time is noisy, it has the interval and is grey.

    Args:
        text: formats the number for a time in milliseconds.
        rate: whether the number is larger for a shorter time.
    """
    if not record["noisy"]:
        return name, text(record["median_ms"])
    low, high = (text(record[end]) for end in (("high_ms", "low_ms") if rate else ("low_ms", "high_ms")))
    return name, text(record["median_ms"]), f"noisy: {low} to {high}", "noisy"


def ratio_headline(name: str, ratio: Mapping[str, float], text: Callable[[float], str]) -> tuple[str, ...]:
    """A tile with a ratio and its interval; grey if that is too wide."""
    note = f"{text(ratio['low'])} to {text(ratio['high'])}"
    noisy = ratio["high"] - ratio["low"] > NOISY * ratio["median"]
    return name, text(ratio["median"]), note, "noisy" if noisy else ""


def interval(record: Mapping[str, Any]) -> str:
    """The confidence interval of a time."""
    return f"{milliseconds(record['low_ms'])} to {milliseconds(record['high_ms'])}"


def range_of(ratio: Mapping[str, float]) -> str:
    """The confidence interval of a ratio."""
    return f"{factor(ratio['low'])} to {factor(ratio['high'])}"


def duration(ms: float) -> str:
    """Four digits in ms or µs: "60.77 ms", "50.24 µs"."""
    return f"{ms:.4g} ms" if ms >= 1 else f"{ms * 1e3:.4g} µs"


def rate(billions: float | None) -> str:
    """GFLOP/s or GB/s; empty for 0 or None."""
    if not billions:
        return ""
    return f"{billions:,.0f}" if billions >= 100 else f"{billions:.3g}" if billions >= 0.01 else "<0.01"


def share(part: float | None) -> str:
    return f"{part:.1%}" if part else ""


def of_peak(row: Mapping[str, Any], peak: Mapping[str, Any], after: str = "") -> str:
    """The share of the roofline, with `after`; "cached" where the data moved faster than in a large copy."""
    if (row["of_roofline"] or 0.0) > 1 and (row["gbytes_per_s"] or 0.0) > peak["gbytes_per_s"]:
        return "cached"
    return f"{share(row['of_roofline'])}{after}"


def factor(ratio: float) -> str:
    """A factor in three digits."""
    if ratio < 0.1:
        return f"{ratio:.3g}"
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def size(n: float) -> str:
    """A number at an axis: "2048", "16.4k", "33.6M"."""
    if n < 1e4:
        return f"{n:g}"
    return f"{n / 1e6:.3g}M" if n >= 1e6 else f"{n / 1e3:.3g}k"


def power(n: float) -> str:
    """A power of ten at an axis: "0.01", "10,000", "10⁶"."""
    return f"{n:,g}" if 1e-3 <= n < 1e5 else "10" + f"{round(log10(n))}".translate(SUPERSCRIPTS)
