"""NVIDIA GPUs: PyCUDA for context, memory, streams and launches, NVRTC for compilation.

`load` imports them; importing this package does not. `TARGETS` has a GPU of each architecture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adtrain.core.errors import DeviceError
from adtrain.core.kernel import Target

if TYPE_CHECKING:
    from adtrain.backends.cuda.backend import CudaBackend

__all__ = ["H200", "TARGETS", "load"]

INSTALL = "pip install 'adtrain[gpu]'"

H200 = Target((9, 0), 132, 227 << 10)
TARGETS = {
    "sm_75": Target((7, 5), 40, 64 << 10),  # T4
    "sm_80": Target((8, 0), 108, 163 << 10),  # A100
    "sm_86": Target((8, 6), 84, 99 << 10),  # A40
    "sm_89": Target((8, 9), 128, 99 << 10),  # RTX 4090
    "sm_90": H200,
    "sm_100": Target((10, 0), 148, 227 << 10),  # B200
    "sm_120": Target((12, 0), 170, 99 << 10),  # RTX 5090
}
"""A GPU of each architecture that kernels are compiled for, to choose kernels without a GPU. The shared memory of a
block is that of the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"."""


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
