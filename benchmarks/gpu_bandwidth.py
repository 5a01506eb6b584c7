"""The bandwidth of GPU kernels that move bytes, as a share of that of a copy, in adtrain and in PyTorch.

    python benchmarks/gpu_bandwidth.py [--only TEXT]... [--json PATH]

Each result is first compared with PyTorch's in float64. Then adtrain, PyTorch and a device-to-device copy are timed in
interleaved samples; a time is the median by CUDA events. Bytes count arguments and results once each, whatever a kernel
moves. The share is relative to the copy's GB/s in the same rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from gpu_bandwidth_cases import Case, N, array_of, cases, tensor_of
from gpu_report import Report

from adtrain.bench.sampling import in_turns
from adtrain.core.array import Array
from adtrain.core.backend import backend

ROUNDS, EACH = 5, 4
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest difference over the largest element of the result."""


@dataclass
class Found:
    name: str
    shape: str
    gigabytes_per_second: float
    share: float
    torch: float
    error: float


def outputs(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


def error_of(case: Case, arrays: list[Array]) -> float:
    """The largest difference from the reference over its largest element; 0 for random numbers."""
    found = tensor_of(outputs(case.in_adtrain(*arrays))[0])
    if case.name == "random numbers":  # PyTorch's are others
        return 0.0
    exact = [x.double() if x.is_floating_point() else x for x in case.tensors]
    reference = outputs(case.in_torch(*exact))[0]
    if not found.is_floating_point():
        return float((found != reference).any())
    largest = max(float(reference.abs().max()), 1e-30)
    worst = 0.0
    for a, b in zip(found.reshape(-1).split(2**26), reference.reshape(-1).split(2**26), strict=True):
        worst = max(worst, float((a - b).abs().max()))
    return worst / largest


def timed(work: Callable[[], Any], stream: Any) -> list[float]:
    """Seconds of each of EACH runs on the stream."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(EACH + 1)]
    marks[0].record(stream)
    for mark in marks[1:]:
        work()
        mark.record(stream)
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks)]


def measured(case: Case, source: torch.Tensor, target: torch.Tensor) -> Found:
    arrays = [array_of(x) for x in case.tensors]
    error = error_of(case, arrays)
    device: Any = backend("gpu")
    gpu = torch.cuda.ExternalStream(device.device.stream.handle)
    default = torch.cuda.current_stream()
    moved = sum(x.numel() * x.element_size() for x in case.tensors)
    moved += sum(math.prod(x.shape) * x.dtype.itemsize for x in outputs(case.in_adtrain(*arrays)))
    times = in_turns(
        {
            "adtrain": lambda: timed(lambda: case.in_adtrain(*arrays), gpu),
            "torch": lambda: timed(lambda: case.in_torch(*case.tensors), default),
            "copy": lambda: timed(lambda: target.copy_(source), default),
        },
        ROUNDS + 1,
    )
    # The first round warms up.
    in_adtrain, in_torch, copy = (median(chain.from_iterable(found[1:])) for found in times.values())
    rate = moved / in_adtrain
    shapes = ", ".join("x".join(map(str, x.shape)) for x in case.tensors)
    full = 2 * source.numel() * 4 / copy
    return Found(case.name, shapes, rate / 1e9, rate / full, moved / in_torch / full, error)


@click.command()
@click.option("--only", multiple=True, help="Measure cases whose names contain one of these.")
@click.option("--json", "path", type=Path, help="Write the results to a file.")
def main(only: tuple[str, ...], path: Path | None) -> None:
    """Measure and print a table."""
    source, target = torch.randn(N, device="cuda"), torch.empty(N, device="cuda")
    copy = median(timed(lambda: target.copy_(source), torch.cuda.current_stream()))
    copy = median(timed(lambda: target.copy_(source), torch.cuda.current_stream()))
    click.echo(f"copy  {2 * N * 4 / copy / 1e9:.0f} GB/s")
    click.echo(f"{'kernel':28} {'arguments':36} {'GB/s':>5} {'share':>6} {'torch':>6} {'error':>8}")
    report = Report(path)
    report.about["copy_gigabytes_per_second"] = 2 * N * 4 / copy / 1e9
    for case in cases():
        if only and not any(text in case.name for text in only):
            continue
        found = measured(case, source, target)
        dtype = next((x.dtype for x in case.tensors if x.is_floating_point()), torch.float32)
        wrong = found.error > TOLERANCE[dtype]
        report.add(asdict(found))
        click.echo(
            f"{found.name:28} {found.shape:36} {found.gigabytes_per_second:5.0f} {found.share:6.2f} "
            f"{found.torch:6.2f} {found.error:8.1e}{'  WRONG' if wrong else ''}"
        )
    click.echo(report.line())


if __name__ == "__main__":
    main()
