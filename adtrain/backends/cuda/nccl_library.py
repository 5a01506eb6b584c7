"""NCCL through the raw layer of nccl4py. Needs no GPU to be imported."""

from __future__ import annotations

from typing import Any

from adtrain.core.errors import DeviceError

INSTALL = "pip install 'adtrain[multi-gpu]'"


def library() -> Any:
    """The module nccl.bindings.nccl.

    Raises:
        DeviceError: nccl4py, or NCCL itself, is missing.
    """
    try:
        from nccl.bindings import nccl

        nccl.get_version()
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DeviceError(f"several ranks on GPUs need NCCL and nccl4py: {INSTALL} ({reason})") from None
    return nccl


def version() -> str:
    """NCCL's version, such as "2.28.9". Raises DeviceError as `library` does."""
    number = int(library().get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
