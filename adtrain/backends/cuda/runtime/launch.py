"""Launches: a task on a device, alone or as a part of a recording."""

from __future__ import annotations

import ctypes
import struct

from cuda.bindings import driver

from adtrain.backends.cuda.lower import LaunchPlan
from adtrain.backends.cuda.runtime.device import Device
from adtrain.backends.cuda.runtime.errors import checked, translated
from adtrain.core.backend import KernelRun

ARGUMENTS_END, ARGUMENTS_AT, ARGUMENTS_SIZE = 0, 1, 2
"""CU_LAUNCH_PARAM_END, _BUFFER_POINTER and _BUFFER_SIZE: a kernel's arguments as they lie in memory."""


class Launch:
    """A task on a device, which only lacks its addresses."""

    def __init__(self, device: Device, task: LaunchPlan) -> None:
        kernel = device.kernel(task.source, task.name)
        self.task = task
        self.stream = device.stream
        self.operands = task.operands
        self.scratch, self.checked = task.scratch, task.checked
        self.numbers = task.numbers
        self.empty = task.size.empty
        if self.empty:
            return
        self.shape = kernel.shape(task.size)
        self.early = kernel.spread(self.shape) if device.overlaps else None
        self.function, self.queried = kernel.function, kernel.queried
        numbers = "".join("d" if isinstance(x, float) else "q" for x in task.numbers)
        self.format = "P" * len(task.operands) + numbers + "P" * (task.scratch + task.checked)

    def __call__(self, addresses: list[int], scratch: int, flag: int) -> None:
        """Put the launch on the stream; ``addresses`` are those of the equation's inputs and outputs."""
        if self.empty:
            return
        function = self.function
        function.arg_format = self.format
        function.texrefs = ()
        grid, block, shared = self.shape
        arguments = self._arguments(addresses, scratch, flag)
        with translated():
            function.prepared_async_call(grid, block, self.stream, *arguments, shared_size=shared)

    @property
    def ran(self) -> KernelRun:
        """What runs, and in which shape."""
        source, (grid, block, shared) = self.task.source, self.shape
        tunables = [option.removeprefix("-D") for option in source.options if option.startswith("-D")]
        name = " ".join([self.task.name, source.name, *tunables])
        return KernelRun(name, {"grid": list(grid), "block": list(block), "shared_bytes": shared})

    def record(self, addresses: list[int], scratch: int, flag: int) -> None:
        """Put the launch into the recording of the stream, so that its blocks start while the kernel before it ends.

        PyCUDA has no launch attributes.
        """
        if self.empty:
            return
        packed = ctypes.create_string_buffer(struct.pack(self.format, *self._arguments(addresses, scratch, flag)))
        size = ctypes.c_size_t(struct.calcsize(self.format))
        extra = (ctypes.c_void_p * 5)(
            ARGUMENTS_AT, ctypes.addressof(packed), ARGUMENTS_SIZE, ctypes.addressof(size), ARGUMENTS_END
        )
        config = driver.CUlaunchConfig()
        (config.gridDimX, config.gridDimY, config.gridDimZ), block, config.sharedMemBytes = self.early or self.shape
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.hStream = driver.CUstream(self.stream.handle)
        if self.early is not None:
            overlap = driver.CUlaunchAttribute()
            overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [overlap], 1
        checked(driver.cuLaunchKernelEx(config, self.queried, 0, ctypes.addressof(extra)))

    def _arguments(self, addresses: list[int], scratch: int, flag: int) -> list[int | float]:
        last = [scratch] * self.scratch + [flag] * self.checked
        return [*(addresses[i] for i in self.operands), *self.numbers, *last]
