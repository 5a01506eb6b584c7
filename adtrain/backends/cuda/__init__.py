"""NVIDIA GPUs: PyCUDA for context, memory, streams and launches, NVRTC for compilation.

`load` imports them; importing this package does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adtrain.core.errors import DeviceError

if TYPE_CHECKING:
    from adtrain.backends.cuda.backend import CudaBackend

__all__ = ["load"]

INSTALL = "pip install 'adtrain[gpu]'"


def load() -> CudaBackend:
    """The backend of this machine's GPU.

    Raises:
        DeviceError: a library or the GPU is missing. The line says which, and how to install it.
    """
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError as error:
        raise DeviceError(f"device gpu: cuda-bindings is missing ({error}): {INSTALL}") from None
    try:
        import pycuda.driver  # noqa: F401
    except ImportError as error:
        if "libcuda" in str(error):
            raise DeviceError(f"device gpu: no NVIDIA driver is installed ({error})") from None
        raise DeviceError(f"device gpu: PyCUDA is missing ({error}): {INSTALL}") from None
    from adtrain.backends.cuda.backend import CudaBackend

    return CudaBackend()
