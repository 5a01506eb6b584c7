"""The CPU."""

from adtrain.backends.cpu.cpu_backend import CpuBackend

__all__ = ["CpuBackend"]
