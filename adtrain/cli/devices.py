"""`adtrain devices`: the devices of this machine, and the libraries that training uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from adtrain.bench import machine
from adtrain.bench.machine import describe_cpu
from adtrain.cli.options import json_option
from adtrain.cli.output import print_json, progress, show
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError, DeviceError
from adtrain.distributed import communicators as mpi
from adtrain.text import counted


@click.command()
@click.option(
    "--measure",
    is_flag=True,
    help="Measure the rates of copies and matrix products, which `adtrain bench` compares with.",
)
@json_option
def command(measure: bool, as_json: bool) -> None:
    """Show the devices that training can run on, and the libraries that determine its speed."""
    cpu = describe_cpu()
    gpu, reason = describe_gpu()
    peaks = {device: peak(device, measure) for device in ("cpu", "gpu") if device == "cpu" or gpu is not None}
    if as_json:
        measured = {device: found and vars(found) for device, found in peaks.items()}
        print_json({"cpu": cpu, "gpu": gpu, "gpu_reason": reason, "roofline": measured, "exchange": exchange()})
        return
    rows = [*cpu_rows(cpu), *peak_rows(peaks["cpu"])]
    if gpu is None:
        rows.append(("gpu", str(reason).removeprefix("device gpu: ")))
    else:
        rows += gpu_rows(gpu) + peak_rows(peaks["gpu"])
    rows += exchange().items()
    for name, value in rows:
        show(f"{name:12}{value}")


def exchange() -> dict[str, str]:
    """The libraries through which ranks exchange arrays, with their versions, or the reason why one is missing."""
    found = {}
    for name, version in {"mpi": mpi.version, "nccl": nccl_version}.items():
        try:
            found[name] = version()
        except AdtrainError as error:
            found[name] = str(error)
    return found


def nccl_version() -> str:
    """NCCL's version. Raises DeviceError where it, or nccl4py, is missing."""
    from adtrain.backends.cuda.runtime import libraries

    return libraries.nccl_version()


def peak(device: str, measure: bool) -> machine.Roofline | None:
    """The device's roofline: measured if `measure`, otherwise the stored one, None if there is none."""
    if not measure:
        return machine.known_roofline(device)
    progress(f"devices: measuring {device}, a few seconds")
    return machine.measured_roofline(device)


def describe_gpu() -> tuple[dict[str, Any] | None, str | None]:
    """The properties of the GPUs, or None and the reason why they cannot be used."""
    try:
        found: Any = backend("gpu")
    except DeviceError as error:
        return None, str(error)
    return found.properties(), None


def cpu_rows(cpu: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The CPU as lines of a table."""
    threads = counted(cpu["blas_threads"], "threads") if cpu["blas_threads"] else "unknown number of threads"
    return [
        ("cpu", f"{cpu['name']}, {counted(cpu['cores'], 'cores')}, {cpu['usable_cores']} usable by this process"),
        ("memory", f"{cpu['memory_bytes'] / 2**30:.1f} GiB" if cpu["memory_bytes"] else "unknown"),
        ("compiler", cpu["compiler"]),
        ("blas", f"{cpu['blas']}, {threads}"),
        ("numpy", cpu["numpy"]),
        ("python", cpu["python"]),
    ]


def gpu_rows(gpu: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The GPUs and their software as lines of a table. Only the first GPU is used."""
    rows = []
    for ordinal, each in enumerate(gpu["devices"]):
        free = f", {each['free_bytes'] / 2**30:.1f} GiB free" if each["free_bytes"] is not None else ", not used"
        rows += [
            (f"gpu {ordinal}", f"{each['name']}, compute capability {each['capability']}"),
            ("  memory", f"{each['memory_bytes'] / 2**30:.1f} GiB{free}"),
            (
                "  units",
                f"{each['multiprocessors']} multiprocessors, each {each['shared_bytes_per_multiprocessor'] >> 10} KiB "
                f"shared memory and {each['registers_per_multiprocessor']} registers",
            ),
            ("  l2", f"{each['l2_bytes'] / 2**20:.0f} MiB"),
            ("  clocks", f"{each['clock_mhz']:.0f} MHz, memory {each['memory_clock_mhz']:.0f} MHz"),
        ]
        if len(gpu["devices"]) > 1:
            reached = ", ".join(f"gpu {number}" for number in each["peers"]) or "none"
            rows.append(("  peers", f"reads the memory of {reached} directly"))
    versions = {"runtime": gpu["runtime"], "toolkit": gpu["toolkit"], **gpu["libraries"]}
    candidates = [("candidates", f"also {', '.join(gpu['candidates'])}, where faster")] if gpu["candidates"] else []
    return [
        *rows,
        ("driver", f"{gpu['driver'] or 'unknown version'}, CUDA {gpu['driver_cuda']}"),
        ("pycuda", f"{gpu['pycuda']}, built for CUDA {gpu['pycuda_cuda']}"),
        ("nvrtc", gpu["nvrtc"]),
        ("libraries", ", ".join(f"{name} {version or 'not found'}" for name, version in versions.items())),
        *candidates,
    ]


def peak_rows(peak: machine.Roofline | None) -> list[tuple[str, str]]:
    """A line for the roofline; none if it is unknown."""
    if peak is None:
        return []
    products = ", ".join(f"{name} {rate:,.0f}" for name, rate in peak.gflops_per_s.items())
    return [("measured", f"copy {peak.gbytes_per_s:,.0f} GB/s; matrix products {products} GFLOP/s")]
