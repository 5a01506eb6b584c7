"""A result of `adtrain bench` as one HTML file without scripts or external files, made of its JSON alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adtrain.bench.page import against, analysis, candidates, compare, operations, scaling, step
from adtrain.bench.timing.records import remarks, timings
from adtrain.templates import environment

KINDS = {
    "ops": operations,
    "candidates": candidates,
    "config": step,
    "scaling": scaling,
    "against": against,
    "analysis": analysis,
    "compare": compare,
}
"""From the kind of a result to the module with its `title` and `body`."""


def render(result: Mapping[str, Any]) -> str:
    """The page of a result, as `--json` writes it."""
    module, measured = KINDS[result["kind"]], result["kind"] != "compare"
    heading = module.title(result)
    return environment().get_template("bench.html.j2").render(
        title=f"adtrain bench: {heading}",
        heading=heading,
        about=_about(result),
        notices=remarks(result)[1:] if measured else [],
        body=module.body(result),
        protocol=dict(_protocol(result)) if measured else None,
    )  # fmt: skip


def _about(result: Mapping[str, Any]) -> str:
    if result["kind"] == "compare":
        return f"before: {result['before']} · after: {result['after']}"
    protocol = result["protocol"]
    commit = f"commit {protocol['commit']}" if protocol["commit"] else f"adtrain {protocol['versions']['adtrain']}"
    return " · ".join([protocol["device"], protocol["device_name"], commit, protocol["date"]])


def _protocol(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values of the protocol's known entries."""
    about = result["protocol"]
    for name in ("command", "date", "commit", "device", "device_name"):
        if about[name]:
            yield name.replace("_", " "), about[name]
    for device, name in about.get("devices", {}).items():
        yield f"device {device}", name
    yield "cores, threads", f"{about['cores']}, {about['threads']}"
    if about["load"] is not None:
        yield "load before", f"{about['load']:.2f}"
    if about["clock_mhz"]:
        yield "driver", about["driver"]
        yield "clocks", f"{about['clock_mhz']:.0f} MHz, memory {about['memory_clock_mhz']:.0f} MHz"
    yield "compiler", about["compiler"]
    if "naive" in about:
        yield "naive loops", about["naive"]
    yield "NumPy's BLAS", f"{about['blas']}, {about['blas_threads']} threads"
    yield "versions", ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    for what, clock in about["clock"].items():
        yield f"clock of {what}", clock
    low, high = about["samples"]
    samples = f"{low} to {high} of at least {about['min_sample_ms']:g} ms"
    yield "samples", f"{samples}; intervals of {about['confidence']:.0%} confidence"
    yield "an empty run", f"{about['overhead_ms'] * 1e6:.0f} ns"
    if peak := about["roofline"]:
        yield "copy", f"{peak['gbytes_per_s']:,.1f} GB/s"
        yield "matrix products", ", ".join(f"{name} {x:,.1f} GFLOP/s" for name, x in peak["gflops_per_s"].items())
    if any(timings(result)):
        yield "outliers", remarks(result)[0]
