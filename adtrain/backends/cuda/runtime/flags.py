"""Flags that kernels raise: in the host's memory, where both sides see them, so that reading them costs no transfer."""

from __future__ import annotations

import numpy as np
import pycuda.driver as cuda

from adtrain.core.errors import ShapeError

COUNT = 1024


class Flags:
    """Numbers that kernels set to 1 when they meet an index out of range, and what to call who did.

    Number 0 is for operations that run alone; Programs reserve the others.
    """

    def __init__(self) -> None:
        self.values = cuda.pagelocked_zeros(COUNT, np.int32, mem_flags=cuda.host_alloc_flags.DEVICEMAP)
        self.address = int(self.values.base.get_device_pointer())
        self.names = [""]

    def reserve(self, name: str) -> int:
        """The address of a flag for an equation; where all are taken, several share the last one."""
        if len(self.names) < COUNT:
            self.names.append(name)
        return self.address + (len(self.names) - 1) * self.values.itemsize

    def check(self) -> None:
        """Call when the device has finished.

        Raises:
            ShapeError: a flag is raised; all are lowered.
        """
        if self.values.any():
            name = self.names[int(np.argmax(self.values))]
            self.values[:] = 0
            raise ShapeError(f"{name}: an index is out of range")
