"""Launches of a `LaunchPlan` on a device, eagerly or captured in a graph."""

from __future__ import annotations

import ctypes
import functools
import struct

from cuda.bindings import driver

from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.runtime.device import Device
from adtrain.backends.cuda.runtime.errors import checked, translated
from adtrain.core.backend import KernelRun
from adtrain.core.kernel import TensorMap

ARGUMENTS_END, ARGUMENTS_AT, ARGUMENTS_SIZE = 0, 1, 2
"""CU_LAUNCH_PARAM_END, _BUFFER_POINTER and _BUFFER_SIZE: kernel arguments packed in one buffer."""
ARGUMENT_BYTES = 8
TENSOR_MAP_BYTES, BOX_BYTES = 128, 128
"""Bytes of a CUtensorMap; of a row of a box."""


class Launch:
    """A plan with its loaded kernel and launch shape. Only the addresses are open.

    Attributes:
        early: the shape of a launch that may start before the previous kernel has ended, or None; see `Kernel.spread`.
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
        pointers = f"{TENSOR_MAP_BYTES}s" * len(plan.tensor_maps) + "P" * len(plan.operands)
        self.format = pointers + numbers + "P" * (plan.scratch + plan.checked + len(self.windows))

    def __call__(self, addresses: list[int], scratch: int, flag: int) -> None:
        """Launch on the stream.

        Args:
            addresses: those of the equation's inputs and outputs.
            scratch: the address of its scratch memory.
            flag: the address of its flag for indices out of range.
        """
        if self.empty:
            return
        if self.plan.cooperative or self.plan.tensor_maps:
            self.record(addresses, scratch, flag, overlap=False)
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
        config = driver.CUlaunchConfig()
        early = self.early if overlap else None
        (config.gridDimX, config.gridDimY, config.gridDimZ), block, config.sharedMemBytes = early or self.shape
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.hStream = driver.CUstream(self.device.stream.handle)
        attribute, kinds = driver.CUlaunchAttribute(), driver.CUlaunchAttributeID
        if self.plan.cooperative:
            attribute.id, attribute.value.cooperative = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 1
            config.attrs, config.numAttrs = [attribute], 1
            each = (ctypes.c_void_p * len(self.format))(*range(start, start + size.value, ARGUMENT_BYTES))
        elif early is not None:
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        # A cooperative launch takes a pointer to each argument. Other kernels may have structs as arguments.
        pointers, buffer = (ctypes.addressof(each), 0) if self.plan.cooperative else (0, ctypes.addressof(extra))
        checked(driver.cuLaunchKernelEx(config, self.queried, pointers, buffer))

    def _arguments(self, addresses: list[int], scratch: int, flag: int, runs: int = 1) -> list[int | float | bytes]:
        last = [runs] * self.plan.repeats + [scratch] * self.scratch + [flag] * self.checked + list(self.windows)
        maps = [_encoded(each, addresses[each.operand]) for each in self.plan.tensor_maps]
        return [*maps, *(addresses[i] for i in self.operands), *self.numbers, *last]


@functools.lru_cache(maxsize=1024)
def _encoded(matrices: TensorMap, address: int) -> bytes:
    """The CUtensorMap of matrices at an address."""
    kinds, size = driver.CUtensorMapDataType, matrices.dtype.itemsize
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 if size == 4 else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    lengths, row = (matrices.columns, matrices.rows, matrices.matrices), matrices.columns * size
    box, steps = (BOX_BYTES // size, matrices.box_rows, 1), (1, 1, 1)
    encoded = checked(
        driver.cuTensorMapEncodeTiled(
            *(kind, len(lengths), address),
            *([driver.cuuint64_t(n) for n in each] for each in (lengths, (row, matrices.rows * row))),
            *([driver.cuuint32_t(n) for n in each] for each in (box, steps)),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(encoded.getPtr(), TENSOR_MAP_BYTES)
