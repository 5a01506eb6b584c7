"""Devices. Each folder is one backend; none of them is imported by `adtrain.ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adtrain.backends.cpu.cpu_backend import CpuBackend
    from adtrain.backends.cuda.backend import CudaBackend


def _cpu() -> CpuBackend:
    from adtrain.backends.cpu.cpu_backend import CpuBackend

    return CpuBackend()


def _gpu() -> CudaBackend:
    from adtrain.backends import cuda

    return cuda.load()


LOADERS = {"cpu": _cpu, "gpu": _gpu}
"""The functions that create the backends, by device."""
