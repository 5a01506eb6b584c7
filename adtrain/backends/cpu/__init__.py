"""The CPU."""

from adtrain.backends.cpu.numpy_backend import NumpyBackend

__all__ = ["NumpyBackend"]
