from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from adtrain.backends.cpu import CpuBackend
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cpu.toolchain import NAMES
from adtrain.core import devices

# The same examples on every run, and none judged by its time: machines differ.
settings.register_profile("adtrain", derandomize=True, deadline=None)
settings.load_profile("adtrain")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled code goes to a folder of this run, in child processes too."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(autouse=True)
def on_numpy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run by the functions that run eagerly: nothing is compiled, and results are the same to the last bit.

    Tests of compiled Programs are marked so.
    """
    if request.node.get_closest_marker("compiled") is not None:
        if not any(map(shutil.which, NAMES)):
            pytest.skip("there is no C compiler")
    else:
        monkeypatch.setattr(CpuBackend, "compile", lambda self, program: NumpyProgram(program))


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the libraries for GPUs were not installed."""
    monkeypatch.delitem(devices._loaded, "gpu", raising=False)
    for module in [name for name in sys.modules if name.split(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "cuda", None)
