"""Shared by the tests on a GPU: the device, memory that is NaN before it is written, and the comparison of results."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import conftest
import numpy as np
import pytest

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import Compiled, Source
from adtrain.cache import Cache, open_cache
from adtrain.core import memory
from adtrain.core.backend import backend
from adtrain.core.errors import DeviceError
from adtrain.core.kernel import HOPPER

TOLERANCE = {"float32": 3e-5, "float64": 1e-11}

compile_source = compiler.compile_source


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """The GPU. The workers of a test run share the cores for compilation, and compile each source once."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    processes = max(2, 4 * (os.cpu_count() or 1) // workers)  # many workers wait for sources that another one compiles
    compiler.MAX_PROCESSES = min(compiler.MAX_PROCESSES, processes)
    try:
        found = backend("gpu")
    except DeviceError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "compile_source", compiled_once)
        yield found


def compiled_once(source: Source, target: str) -> Compiled:
    """`compiler.compile_source`. If another worker compiles the source, it waits for that one, and has no log."""
    key, stored = compiler.fingerprint(source, target), open_cache("cuda")
    with locks().locked(key):
        if found := stored.content(key, ".cubin"):
            return Compiled(bytes(found), "")
        compiled = compile_source(source, target)
        stored.store(key, ".cubin", compiled.cubin)
    return compiled


@cache
def locks() -> Cache:
    """A folder of locks alone: in the folder of the compiled code they would make each look-up longer."""
    return conftest.compiled("locks")


@pytest.fixture(autouse=True)
def hopper(gpu: Any) -> None:
    """Skips the tests of a module that imports it, unless the GPU is a Hopper."""
    if gpu.device.device.compute_capability() != HOPPER:
        pytest.skip("the kernels are for compute capability 9.0")


@pytest.fixture(autouse=True)
def poisoned(gpu: Any) -> Iterator[None]:
    with memory.poisoned():
        yield


def check(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        sizes = np.abs(y.astype(float))
        # values near the end of the range would hide errors in the others
        scale = float(sizes[sizes < 1e30].max(initial=1))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale)
