"""Calls of NVIDIA's libraries as candidates beside kernels, where they are installed (`pip install 'adtrain[vendor]'`).

A library is imported only to measure its candidates, or to run one that was measured to be the fastest.
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
"""By library: the Python package that calls it, and the source of candidates."""


def installed() -> list[Library]:
    """The libraries that are installed together with their Python packages."""
    found: list[Library] = []
    for name, (package, library) in BINDINGS.items():
        version = libraries.version(name) if find_spec(package) else None
        if version is not None:
            found.append(library(version))
    return found
