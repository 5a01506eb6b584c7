"""Calls of the CUDA driver. Its errors are DeviceError, DeviceFault and OutOfMemory, in one line each.

Kernels of a module of PyCUDA: the shapes of their launches, the one way to launch them, and how to capture it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from math import prod
from typing import Any, NamedTuple

import pycuda.driver as cuda
from cuda.bindings import driver

from adtrain.backends.cuda.launch_plan import WorkSize
from adtrain.core.errors import DeviceError, DeviceFault, OutOfMemory
from adtrain.core.memory import without_collection
from adtrain.text import mebibytes


def checked(answer: tuple[Any, ...]) -> Any:
    """The results of a call of the driver API by cuda-bindings.

    Raises:
        DeviceError: it failed.
    """
    error, *results = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        raise _failure(error.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower())
    if not results:
        return None
    return results[0] if len(results) == 1 else results


@contextmanager
def translated() -> Iterator[None]:
    """Translates errors of PyCUDA; a context manager, or a decorator.

    Raises:
        DeviceFault: a kernel failed, now or earlier. This process cannot use the device any more.
        DeviceError: any other error.
    """
    try:
        yield
    except cuda.Error as error:
        raise _failure(str(error).partition(":")[2].strip() or str(error)) from None


@translated()
def out_of_memory(needed: int) -> OutOfMemory:
    """The error of an allocation of ``needed`` bytes."""
    free, total = cuda.mem_get_info()
    sizes = f"{mebibytes(needed)} more needed, {mebibytes(free)} of {mebibytes(total)} free"
    return OutOfMemory(f"device gpu: out of memory: {sizes}")


FAULTS = ("illegal", "misaligned", "launch failed", "launch timed out", "hardware", "assert", "invalid program", "trap")
"""Words in the names of errors after which the context cannot be used."""


def _failure(text: str) -> DeviceError:
    if any(fault in text for fault in FAULTS):
        return DeviceFault(f"device gpu: a kernel failed: {text}; run compute-sanitizer on this command to find it")
    return DeviceError(f"device gpu: {text}")


WARP = 32
DEFAULT_SHARED = 48 << 10
"""Bytes of static and dynamic shared memory that a kernel may have without opting in."""
ARGUMENTS_END, ARGUMENTS_AT, ARGUMENTS_SIZE = 0, 1, 2
"""CU_LAUNCH_PARAM_END, _BUFFER_POINTER and _BUFFER_SIZE: kernel arguments packed in one buffer."""
ARGUMENT_BYTES = 8
MAP_WORD = "Q"
"""The type of a word of a tensor map."""


class Shape(NamedTuple):
    """The shape of a launch; `shared` is bytes of dynamic shared memory."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int


class Start(Enum):
    """When the blocks of a launch start."""

    AFTER = "after all work before it is complete"
    EARLY = "while the kernel before it may still run (PTX: griddepcontrol)"
    TOGETHER = "after all work before it is complete, and all at the same time, so that they can wait for each other"


class LoadedKernel:
    """A kernel of a loaded module, with its launch shapes on a GPU.

    Args:
        format: the types of its arguments, for `struct`, of ARGUMENT_BYTES each. A tensor map is several MAP_WORDs.
        size: one that it can be launched with.

    Attributes:
        function: its handle in the driver API.
        offset: of the first argument in the buffer of all arguments: a tensor map is aligned.
        max_threads: threads of a block, at most.
        shared: bytes of dynamic shared memory that a block may have.
        shapes: the launch shapes found so far.
        multiprocessors, multiprocessor_shared: of the GPU, and bytes of shared memory of each.
    """

    @translated()
    def __init__(
        self, module: Any, name: str, format: str, size: WorkSize, multiprocessors: int, multiprocessor_shared: int
    ) -> None:
        self.multiprocessors, self.multiprocessor_shared = multiprocessors, multiprocessor_shared
        function, self.format = module.get_function(name), format
        self.max_threads: int = function.get_attribute(cuda.function_attribute.MAX_THREADS_PER_BLOCK)
        self.function = _handle(function, format, size)
        self.offset = checked(driver.cuFuncGetParamInfo(self.function, 0))[0] if format.startswith(MAP_WORD) else 0
        self.shared: int = DEFAULT_SHARED - function.get_attribute(cuda.function_attribute.SHARED_SIZE_BYTES)
        self.shapes: dict[WorkSize, Shape] = {}

    def shape(self, size: WorkSize) -> Shape:
        """The launch shape for an amount of work on this device."""
        found = self.shapes.get(size)
        if found is None:
            found = self.shapes[size] = self._strided(size) if size.elements else self._blocks(size)
        return found

    def at_once(self, shape: Shape) -> int:
        """Blocks that are resident on one multiprocessor at once."""
        threads = prod(shape.block)
        return int(checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, threads, shape.shared)))

    def _strided(self, size: WorkSize) -> Shape:
        """The shape for a grid-stride loop: blocks of the best occupancy, at most as many as are resident at once.

        Blocks are smaller where there are too few elements for all multiprocessors.
        """
        processors = self.multiprocessors
        threads = min(self._best_threads(0), _warps(-(-size.elements // processors)))
        at_once = self.at_once(Shape((1, 1, 1), (threads, 1, 1), 0))
        blocks = min(-(-size.elements // threads), at_once * processors)
        return Shape((blocks, 1, 1), (threads, 1, 1), 0)

    def _blocks(self, size: WorkSize) -> Shape:
        self._allow(size.shared)
        wanted = self._best_threads(size.shared) if size.threads is None else _warps(size.threads)
        return Shape(size.blocks, (min(wanted, self.max_threads), 1, 1), size.shared)

    def spread(self, shape: Shape) -> Shape | None:
        """The shape for a launch that may start before the previous kernel has ended; None if it should not.

        Blocks that start early all go to the multiprocessors that are free first. If more fit there than an even share,
        others stay idle. With an even share of one or two blocks, each block gets so much dynamic shared memory that no
        more fit; with a larger one the launch does not start early.
        """
        processors, blocks, at_once = self.multiprocessors, prod(shape.grid), self.at_once(shape)
        share = -(-blocks // processors)
        if blocks == 1 or share >= at_once:
            return shape
        if share > 2:
            return None
        shared = self.multiprocessor_shared // (share + 1)
        self._allow(shared)
        return shape._replace(shared=shared)

    def _allow(self, shared: int) -> None:
        """Let a block have ``shared`` bytes of dynamic shared memory."""
        if shared <= self.shared:
            return
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(self.function, attribute, shared))
        self.shared = shared

    def _best_threads(self, shared: int) -> int:
        _, threads = checked(driver.cuOccupancyMaxPotentialBlockSize(self.function, None, shared, 0))
        return int(threads)


class ShapedLaunch:
    """A launch of a kernel in one shape, of which the stream and the values of the arguments are open."""

    def __init__(self, kernel: LoadedKernel, shape: Shape, start: Start = Start.AFTER) -> None:
        self.function, self.shape, self.format = kernel.function, shape, f"{kernel.offset}x{kernel.format}"
        config = self.config = driver.CUlaunchConfig()
        (config.gridDimX, config.gridDimY, config.gridDimZ), block, config.sharedMemBytes = shape
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        if start is not Start.AFTER:
            config.attrs, config.numAttrs = [_attribute(start)], 1
        size = struct.calcsize(self.format)
        self.packed, self.size = ctypes.create_string_buffer(size), ctypes.c_size_t(size)
        at = ctypes.addressof(self.packed)
        self.each = (ctypes.c_void_p * len(kernel.format))(*range(at + kernel.offset, at + size, ARGUMENT_BYTES))
        self.whole = (ctypes.c_void_p * 5)(ARGUMENTS_AT, at, ARGUMENTS_SIZE, ctypes.addressof(self.size), ARGUMENTS_END)
        # A launch of blocks that wait for each other takes a pointer to each argument. Others take the buffer, because
        # they may have structs as arguments.
        together = start is Start.TOGETHER
        self.pointers = (ctypes.addressof(self.each), 0) if together else (0, ctypes.addressof(self.whole))

    def __call__(self, stream: Any, arguments: Sequence[int | float]) -> None:
        """Launch on a stream of PyCUDA, which may be captured."""
        struct.pack_into(self.format, self.packed, 0, *arguments)
        self.config.hStream = driver.CUstream(stream.handle)
        checked(driver.cuLaunchKernelEx(self.config, self.function, *self.pointers))


def captured(stream: Any, work: Callable[[], None]) -> Any:
    """The graph of what ``work()`` launches and copies on a stream of the driver API.

    Raises:
        DeviceError: it cannot be captured.
    """
    with without_collection():  # freeing memory may synchronize, which ends the capture
        checked(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            work()
        except BaseException:
            driver.cuStreamEndCapture(stream)  # its error follows from the first one
            raise
        return checked(driver.cuStreamEndCapture(stream))


@translated()
def _handle(function: Any, format: str, size: WorkSize) -> Any:
    """The handle of a function of PyCUDA, which does not show it: that of a launch that is captured and never runs."""
    stream = cuda.Stream(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    function.arg_format, function.texrefs = format, ()
    shape = (1, 1, 1) if size.elements else size.blocks, (size.threads or 1, 1, 1)
    launch = partial(function.prepared_async_call, *shape, stream, *(0 for _ in format))
    graph = captured(driver.CUstream(stream.handle), launch)
    (node,), _ = checked(driver.cuGraphGetNodes(graph, 1))
    handle = driver.CUfunction(int(checked(driver.cuGraphKernelNodeGetParams(node)).func))
    checked(driver.cuGraphDestroy(graph))
    return handle


def _attribute(start: Start) -> Any:
    """The launch attribute for a start."""
    attribute, kinds = driver.CUlaunchAttribute(), driver.CUlaunchAttributeID
    if start is Start.TOGETHER:
        attribute.id, attribute.value.cooperative = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 1
    else:
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _warps(threads: int) -> int:
    return max(-(-threads // WARP), 1) * WARP
