"""NVIDIA's own libraries as candidates beside our kernels, where they are installed (`pip install adtrain[vendor]`).

Neither is imported before a candidate of it is measured, or has been measured as the fastest one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from adtrain.backends.cuda.runtime import libraries
from adtrain.backends.cuda.vendor.call import Library, LibraryCall, NotOffered, calls
from adtrain.backends.cuda.vendor.cublas import Cublas
from adtrain.backends.cuda.vendor.cudnn import Cudnn

__all__ = ["Library", "LibraryCall", "NotOffered", "calls", "installed"]

BINDINGS: dict[str, tuple[str, Callable[[str], Library]]] = {"cublasLt": ("nvmath", Cublas), "cudnn": ("cudnn", Cudnn)}
"""By library: the package that calls it, and what stands for it here."""


def installed() -> list[Library]:
    """The libraries that are there, each with its Python package."""
    found: list[Library] = []
    for name, (package, library) in BINDINGS.items():
        version = libraries.version(name) if find_spec(package) else None
        if version is not None:
            found.append(library(version))
    return found
