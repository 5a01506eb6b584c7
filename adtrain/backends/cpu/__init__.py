"""The CPU backend."""

import adtrain.lowering.cpu  # noqa: F401  registers the kernels
from adtrain.backends.cpu.cpu_backend import CpuBackend

__all__ = ["CpuBackend"]
