"""NVIDIA's installed libraries, and their versions as the libraries report them. Needs no GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

from adtrain.core.errors import DeviceError

INSTALL_NCCL = "pip install 'adtrain[multi-gpu]'"
VENDOR = ("cublas", "cublasLt", "cudnn")
"""Those that kernels are compared with; the last two are candidates where their Python packages are installed."""


def vendor() -> dict[str, str | None]:
    """The version of each of VENDOR, None where it is not found."""
    return {name: version(name) for name in VENDOR}


def runtime() -> str | None:
    """The version of the CUDA runtime, "13.0"; None where it is not found."""
    library, number = _loaded("cudart"), ctypes.c_int()
    if library is None or library.cudaRuntimeGetVersion(ctypes.byref(number)):
        return None
    return cuda_version(number.value)


@cache
def driver() -> str | None:
    """The driver's own version, "580.159.04"; None where its management library is not found."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(80)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        return None
    return text.value.decode()


def cuda_version(number: int) -> str:
    """CUDA's number of a version as text: 13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def version(name: str) -> str | None:
    """The version of one of VENDOR, None where it is not found."""
    library = _loaded(name)
    if library is None:
        return None
    parts = [ctypes.c_int() for _ in range(3)]  # major, minor, patch
    failed = [getattr(library, f"{name}GetProperty")(i, ctypes.byref(part)) for i, part in enumerate(parts)]
    return None if any(failed) else ".".join(str(part.value) for part in parts)


def nccl() -> Any:
    """NCCL, by the raw layer of nccl4py: the module nccl.bindings.nccl.

    Raises:
        DeviceError: nccl4py, or NCCL itself, is missing.
    """
    try:
        from nccl.bindings import nccl

        nccl.get_version()
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DeviceError(f"several ranks on GPUs need NCCL and nccl4py: {INSTALL_NCCL} ({reason})") from None
    return nccl


def nccl_version() -> str:
    """NCCL's version, such as "2.28.9". Raises DeviceError as `nccl` does."""
    number = int(nccl().get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _loaded(name: str) -> Any:
    """The library of a wheel, else the system's; None where there is neither."""
    wheels = [str(path) for folder in sys.path for path in Path(folder).glob(f"nvidia/*/lib/lib{name}.so.*")]
    for path in (*sorted(wheels), ctypes.util.find_library(name)):
        try:
            if path:
                return ctypes.CDLL(path)
        except OSError:  # for another architecture, or without a library of its own
            continue
    return None
