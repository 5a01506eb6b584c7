"""Launches of a `LaunchPlan` on a device, eagerly or captured in a graph."""

from __future__ import annotations

import ctypes
import struct

from cuda.bindings import driver

from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.runtime.device import Device
from adtrain.backends.cuda.runtime.errors import checked, translated
from adtrain.core.backend import KernelRun

ARGUMENTS_END, ARGUMENTS_AT, ARGUMENTS_SIZE = 0, 1, 2
"""CU_LAUNCH_PARAM_END, _BUFFER_POINTER and _BUFFER_SIZE: kernel arguments packed in one buffer."""
ARGUMENT_BYTES = 8


class Launch:
    """A plan with its loaded kernel and launch shape. Only the addresses are open.

    Attributes:
        early: the shape of a launch that may start before the previous kernel has ended, or None; see
            `LoadedKernel.spread`.
        format: the types of the arguments, for `struct`.
    """

    def __init__(self, device: Device, plan: LaunchPlan) -> None:
        kernel = device.kernel(plan.source, plan.name)
        self.plan = plan
        self.device = device
        self.operands = plan.operands
        self.scratch, self.checked = plan.scratch, plan.checked
        self.numbers = plan.numbers
        self.empty = plan.size.empty
        if self.empty:
            return
        self.shape = kernel.shape(plan.size)
        self.early = kernel.spread(self.shape) if device.overlaps and not plan.cooperative else None
        self.function, self.queried = kernel.function, kernel.queried
        numbers = "".join("d" if isinstance(x, float) else "q" for x in plan.numbers)
        self.windows = device.windows if plan.peers else ()
        numbers += "q" * plan.repeats
        self.format = "P" * len(plan.operands) + numbers + "P" * (plan.scratch + plan.checked + len(self.windows))

    def __call__(self, addresses: list[int], scratch: int, flag: int) -> None:
        """Launch on the stream.

        Args:
            addresses: those of the equation's inputs and outputs.
            scratch: the address of its scratch memory.
            flag: the address of its flag for indices out of range.
        """
        if self.empty:
            return
        if self.plan.cooperative:
            self.record(addresses, scratch, flag)
            return
        function = self.function
        function.arg_format = self.format
        function.texrefs = ()
        grid, block, shared = self.shape
        arguments = self._arguments(addresses, scratch, flag)
        with translated():
            function.prepared_async_call(grid, block, self.device.stream, *arguments, shared_size=shared)

    @property
    def ran(self) -> KernelRun:
        """The kernel's name, file and macros, and the launch shape."""
        source, (grid, block, shared) = self.plan.source, self.shape
        tunables = [option.removeprefix("-D") for option in source.options if option.startswith("-D")]
        name = " ".join([self.plan.name, source.name, *tunables])
        return KernelRun(name, {"grid": list(grid), "block": list(block), "shared_bytes": shared})

    def record(self, addresses: list[int], scratch: int, flag: int, overlap: bool = True, runs: int = 1) -> None:
        """Launch on the stream, which may be captured: with programmatic dependent launch (PTX: griddepcontrol), or
        cooperatively.

        Without `overlap` it starts when all work before it is complete. A plan that `repeats` computes `runs` runs. It
        takes the driver API, as PyCUDA has no launch attributes.
        """
        if self.empty:
            return
        packed = ctypes.create_string_buffer(struct.pack(self.format, *self._arguments(addresses, scratch, flag, runs)))
        size, start = ctypes.c_size_t(struct.calcsize(self.format)), ctypes.addressof(packed)
        extra = (ctypes.c_void_p * 5)(ARGUMENTS_AT, start, ARGUMENTS_SIZE, ctypes.addressof(size), ARGUMENTS_END)
        each = (ctypes.c_void_p * len(self.format))(*range(start, start + size.value, ARGUMENT_BYTES))
        config = driver.CUlaunchConfig()
        early = self.early if overlap else None
        (config.gridDimX, config.gridDimY, config.gridDimZ), block, config.sharedMemBytes = early or self.shape
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.hStream = driver.CUstream(self.device.stream.handle)
        attribute, kinds = driver.CUlaunchAttribute(), driver.CUlaunchAttributeID
        if self.plan.cooperative:
            attribute.id, attribute.value.cooperative = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 1
            config.attrs, config.numAttrs = [attribute], 1
        elif early is not None:
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        # A cooperative launch takes a pointer to each argument. Other kernels may have structs as arguments.
        pointers, buffer = (ctypes.addressof(each), 0) if self.plan.cooperative else (0, ctypes.addressof(extra))
        checked(driver.cuLaunchKernelEx(config, self.queried, pointers, buffer))

    def _arguments(self, addresses: list[int], scratch: int, flag: int, runs: int = 1) -> list[int | float]:
        last = [runs] * self.plan.repeats + [scratch] * self.scratch + [flag] * self.checked + list(self.windows)
        return [*(addresses[i] for i in self.operands), *self.numbers, *last]
