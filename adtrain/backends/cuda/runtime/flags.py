"""Flags that kernels set where an index is out of range: in mapped host memory, so that reading them takes no copy."""

from __future__ import annotations

import numpy as np
import pycuda.driver as cuda

from adtrain.backends.cuda.runtime.errors import translated
from adtrain.core.errors import ShapeError

COUNT = 1024


class Flags:
    """COUNT int32 flags, and the name of the operation that each belongs to.

    Flag 0 is for operations that run eagerly; Programs reserve the others.
    """

    @translated()
    def __init__(self) -> None:
        self.values = cuda.pagelocked_zeros(COUNT, np.int32, mem_flags=cuda.host_alloc_flags.DEVICEMAP)
        self.address = int(self.values.base.get_device_pointer())
        self.names = [""]

    def reserve(self, name: str) -> int:
        """The address of a new flag for an operation. When all are taken, it is that of the last one."""
        if len(self.names) < COUNT:
            self.names.append(name)
        return self.address + (len(self.names) - 1) * self.values.itemsize

    def check(self) -> None:
        """Call after the device has been synchronized.

        Raises:
            ShapeError: a flag is set. All are cleared.
        """
        if self.values.any():
            name = self.names[int(np.argmax(self.values))]
            self.values[:] = 0
            raise ShapeError(f"{name}: an index is out of range")
