"""The reports that `adtrain bench` prints, as lines of text; each is made of what `--json` gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adtrain.cli.table import Column, render
from adtrain.measure.profile import rate
from adtrain.measure.roofline import Roofline
from adtrain.measure.timing import NOISY_SPREAD

OPS = (
    Column("operation", text=True),
    Column("size", text=True),
    Column("phase", rank=1, text=True),
    Column("ms"),
    Column("p20", rank=4),
    Column("p80", rank=5),
    Column("GFLOP/s", rank=2),
    Column("GB/s", rank=3),
)
LAYERS = (
    Column("layer", text=True),
    Column("forward ms"),
    Column("backward ms"),
    Column("update ms", rank=1),
    Column("share", rank=2),
    Column("GFLOP/s", rank=3),
    Column("GB/s", rank=4),
)
OF_PEAK = Column("of peak", rank=2)
NOISY_SHARE = 0.1
"""Part of noisy measurements from which the report says so."""


def of_ops(result: Mapping[str, Any], width: int) -> list[str]:
    """A line for each operation, size and phase."""
    cells = [
        [row["op"], row["size"], row["phase"], *map(milliseconds, (row["ms"], row["p20_ms"], row["p80_ms"])),
         *map(per_second, (row["gflops_per_s"], row["gbytes_per_s"]))]
        for row in result["ops"]
    ]  # fmt: skip
    peaks = of_peak(result, [(row["flops"], row["bytes"], row["ms"]) for row in result["ops"]], "float32")
    low, high = result["protocol"]["samples"]
    how = (
        f"float32, {_by(result)}; median, p20 and p80 of {low} to {high} samples of at least "
        f"{result['protocol']['min_sample_ms']:g} ms each, after a warm-up"
    )
    return [*protocol(result), how, "", *_with_peaks(OPS, cells, peaks, width), *noise(result)]


def of_config(result: Mapping[str, Any], width: int) -> list[str]:
    """A line for each layer, the sum of them, and the step end to end."""
    step, layers = result["step_ms"], result["layers"]
    fields = ("forward_ms", "backward_ms", "update_ms")
    cells = [
        [row["layer"] or "(no layer)", *(milliseconds(row[field], 3) for field in fields), f"{row['share']:.1%}",
         *map(per_second, (row["gflops_per_s"], row["gbytes_per_s"]))]
        for row in layers
    ]  # fmt: skip
    totals = [(row["flops"], row["bytes"], sum(row[field] for field in fields)) for row in layers]
    peaks = of_peak(result, totals, result["precision"])
    cells.append(["sum", *(milliseconds(sum(row[field] for row in layers), 3) for field in fields), "100.0%", "", ""])
    return [
        *protocol(result),
        _how(result),
        f"{result['config']}, {result['precision']}; operations and whole steps in turn, "
        f"medians over {step['samples']} of each, after a warm-up",
        "",
        *_with_peaks(LAYERS, cells, peaks, width),
        "",
        f"step    {step['median']:.3f} ms (p20 {step['p20']:.3f}, p80 {step['p80']:.3f}) "
        f"on {result['batch_size']} images: {result['images_per_second']:,.0f} images/s, "
        f"{per_second(rate(sum(row['flops'] for row in layers), step['median']))} GFLOP/s",
        f"sum of operations {result['ops_sum_ms']:.3f} ms = {result['ops_to_step_ratio']:.1%} of the step "
        "timed without hooks",
        *noise(result),
    ]


def _how(result: Mapping[str, Any]) -> str:
    """What the step's operations ran as."""
    compiled = f"compiled by {result['protocol']['compiler']}"
    eager = f"eager, {_by(result)}"
    ways = {"eager": eager, "staged": f"a kernel an operation, {compiled}", "fused": f"fused, {compiled}"}
    return ways[result["mode"]]


def _by(result: Mapping[str, Any]) -> str:
    """What runs single operations."""
    about = result["protocol"]
    return "by NumPy" if about["device"] == "cpu" else f"compiled by {about['compiler']}"


def of_peak(result: Mapping[str, Any], works: Sequence[tuple[int, int, float]], precision: str) -> list[str]:
    """For each work (flops, bytes, ms) its share of the device's roofline; none at all where that is not known."""
    about = result["protocol"]["roofline"]
    if about is None:
        return []
    peak = Roofline(**about)
    return [f"{peak.share(*work, precision):.0%}" if work[-1] else "" for work in works]


def _with_peaks(columns: Sequence[Column], cells: Sequence[list[str]], peaks: list[str], width: int) -> list[str]:
    """The table, with a last column for the shares of the peak where there are any."""
    if not peaks:
        return render(columns, cells, width)
    peaks = [*peaks, *[""] * (len(cells) - len(peaks))]
    rows = [[*row, share] for row, share in zip(cells, peaks, strict=True)]
    return render([*columns, OF_PEAK], rows, width)


def protocol(result: Mapping[str, Any]) -> list[str]:
    """What the numbers were measured with."""
    about = result["protocol"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    threads = "unknown number of" if about["blas_threads"] is None else about["blas_threads"]
    return [
        f"{about['device']}: {about['device_name']}, {about['cores']} cores; {about['blas']}, {threads} threads",
        f"{versions}; {about['date']}",
    ]


def noise(result: Mapping[str, Any]) -> list[str]:
    """A warning where other work on the machine has shaped the numbers."""
    if result["noisy"] < NOISY_SHARE:
        return []
    return [
        "",
        f"noisy machine: p80 is over {NOISY_SPREAD} times p20 in {result['noisy']:.0%} of the measurements; "
        "end other work and repeat",
    ]


def milliseconds(ms: float, decimals: int = 4) -> str:
    """Nothing for no time at all, so that the phases that a layer lacks stand out."""
    return f"{ms:.{decimals}f}" if ms else ""


def per_second(billions: float | None) -> str:
    return f"{billions:.2f}" if billions else ""
