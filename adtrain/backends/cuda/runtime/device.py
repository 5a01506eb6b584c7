"""The GPU of this process: context, streams, memory, and loaded kernels."""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from threading import current_thread, get_ident, main_thread
from typing import Any, NamedTuple

import numpy as np
import pycuda.driver as cuda
from cuda.bindings import driver

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.launch_plan import WorkSize
from adtrain.backends.cuda.runtime.driver import LoadedKernel, checked, out_of_memory, translated
from adtrain.core.errors import DeviceError, ShapeError
from adtrain.core.kernel import Target
from adtrain.core.memory import GUARD, POISON, is_poisoned

NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: the stream does not synchronize with the default stream, which other libraries may use."""

UPLOAD_CHUNK = 4 << 20
"""Maximum bytes of one copy of an upload. Later chunks reuse page-locked memory, which is slow to allocate."""

FLAGS = 1024
"""Number of flags for indices out of range."""

HELD, MIN_BYTES = 1, 8
"""Bytes of the block that a pool always holds, and the least that others allocate, so that they leave it there."""


class Buffer:
    """Contiguous elements on the GPU. Several buffers may share memory."""

    __slots__ = ("address", "dtype", "memory", "shape")

    def __init__(self, memory: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.memory = memory
        self.address = int(memory)
        self.shape = shape
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def of_shape(self, shape: tuple[int, ...]) -> Buffer:
        """Another buffer of the same memory."""
        return Buffer(self.memory, shape, self.dtype)


class Guarded:
    """``size`` bytes of ``memory`` between two guard zones; see `core.memory`. `int()` is their address."""

    def __init__(self, memory: Any, size: int) -> None:
        self.memory, self.size = memory, size

    def __int__(self) -> int:
        return int(self.memory) + GUARD

    @translated()
    def intact(self) -> bool:
        """Whether the zones still hold what they were filled with. The device must have finished."""
        zone = np.empty(GUARD, np.uint8)
        for address in (int(self.memory), int(self) + self.size):
            cuda.memcpy_dtoh(zone, address)
            if (zone != POISON).any():
                return False
        return True


class Reserved:
    """Memory outside the pool. `int()` is its address.

    PyCUDA frees memory only in the thread that has its context. Another thread, in which Python's garbage collector may
    run, leaves the memory to that one.
    """

    def __init__(self, memory: Any, left: deque[Any]) -> None:
        self.memory, self.left, self.thread = memory, left, get_ident()

    def __int__(self) -> int:
        return int(self.memory)

    def __del__(self) -> None:
        if get_ident() != self.thread:
            self.left.append(self.memory)


class Flags:
    """FLAGS int32 flags that kernels set where an index is out of range, and the name of each flag's operation.

    They are in mapped host memory, so that reading them takes no copy. Flag 0 is for operations that run eagerly;
    Programs reserve the others.
    """

    @translated()
    def __init__(self) -> None:
        self.values = cuda.pagelocked_zeros(FLAGS, np.int32, mem_flags=cuda.host_alloc_flags.DEVICEMAP)
        self.address = int(self.values.base.get_device_pointer())
        self.names = [""]

    def reserve(self, name: str) -> int:
        """The address of a new flag for an operation. When all are taken, it is that of the last one."""
        if len(self.names) < FLAGS:
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


def _holding(pool: Any, *request: Any) -> Any:
    """``pool``, with a freed block of ``request``.

    PyCUDA's pool needs the thread's context for its first freed block. It ends the process if there is none: in another
    thread, or after the end of `Device`.
    """
    pool.allocate(*request)
    return pool


class WorkStream(NamedTuple):
    """A stream, and the pool of the memory that its work uses.

    Memory that is freed while the stream's work still uses it is given to later work of the same stream only.
    """

    stream: Any
    pool: Any


def _check_thread() -> None:
    if (found := current_thread()) is not main_thread():
        raise DeviceError(f"device gpu: found the thread {found.name!r}, expected the main thread; use the CPU there")


class Device:
    """One GPU with its primary context, which other libraries of the process share. Only the main thread uses it.

    All work goes to the `WorkStream` in use, with the members `stream` and `pool`.

    Attributes:
        reserved: bytes allocated outside the pool.
        left: memory outside the pool that is to be freed in this thread.
        uploads: page-locked memory that the device may still read, and the event after which it does not.
        overlaps: whether a launch may start while the previous one ends (programmatic dependent launch).
        shared: bytes of shared memory of a multiprocessor.
        flags: those of indices out of range.
        windows: the addresses of the windows of all ranks, and this rank's number; empty before they are connected.
            As arguments of a kernel they are the struct Windows of kernels/cuda/index/peer_window.cuh.

    Raises:
        DeviceError: the driver is missing, or finds no GPU, or this is not the main thread.
    """

    @translated()
    def __init__(self, ordinal: int = 0) -> None:
        _check_thread()
        try:
            cuda.init()
            self.device = cuda.Device(ordinal)
        except cuda.Error as error:
            raise DeviceError(f"device gpu: the NVIDIA driver finds no GPU ({error})") from None
        self.context = self.device.retain_primary_context()
        self.context.push()
        atexit.register(self.context.pop)
        self.in_use = self._work_stream()
        self.work_streams = [self.in_use]
        self.reserved = 0
        self.left: deque[Any] = deque()
        self.windows: tuple[int, ...] = ()
        self.host_pool = _holding(cuda.PageLockedMemoryPool(), (HELD,), np.uint8)
        atexit.register(self.hold)  # runs before the context is given back
        self.uploads: deque[tuple[Any, Any]] = deque()
        capability = self.device.compute_capability()
        self.architecture = compiler.architecture(capability)
        self.overlaps = capability >= (9, 0)
        attribute = cuda.device_attribute
        self.multiprocessors: int = self.device.get_attribute(attribute.MULTIPROCESSOR_COUNT)
        self.shared: int = self.device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)
        opt_in = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        of_block = checked(driver.cuDeviceGetAttribute(opt_in, checked(driver.cuDeviceGet(ordinal))))
        self.target = Target(capability, self.multiprocessors, int(of_block))
        self.flags = Flags()
        self.modules: dict[Source, Any] = {}
        self.kernels: dict[tuple[Source, str], LoadedKernel] = {}

    @staticmethod
    @translated()
    def _work_stream() -> WorkStream:
        return WorkStream(cuda.Stream(NON_BLOCKING), _holding(cuda.DeviceMemoryPool(), HELD))

    def hold(self) -> None:
        """Let all pools hold a block, also after they have given all of them back."""
        for each in self.work_streams:
            _holding(each.pool, HELD)
        _holding(self.host_pool, (HELD,), np.uint8)

    @property
    def stream(self) -> Any:
        """The stream in use.

        Raises:
            DeviceError: this is not the main thread.
        """
        _check_thread()
        return self.in_use.stream

    @property
    def pool(self) -> Any:
        """The pool in use.

        Raises:
            DeviceError: this is not the main thread.
        """
        _check_thread()
        return self.in_use.pool

    @translated()
    def more_streams(self, count: int) -> Sequence[WorkStream]:
        """`count` streams besides the first one, the same ones in every call."""
        while len(self.work_streams) <= count:
            self.work_streams.append(self._work_stream())
        return self.work_streams[1 : count + 1]

    @contextmanager
    def using(self, work_stream: WorkStream) -> Iterator[None]:
        """Within it, all work goes to this stream."""
        before, self.in_use = self.in_use, work_stream
        try:
            yield
        finally:
            self.in_use = before

    def kernel(self, source: Source, name: str, format: str, size: WorkSize) -> LoadedKernel:
        """A kernel of a source, compiled and loaded at first use. For `format` and `size` see `LoadedKernel`.

        Raises:
            AssertionError: it was loaded for arguments of other types.
            DeviceError: it is not loaded, and this is not the main thread.
        """
        found = self.kernels.get((source, name))
        if found is None:
            _check_thread()
            if source not in self.modules:
                self.modules[source] = compiler.load_cubin(source, self.architecture, self._module)
            found = LoadedKernel(self.modules[source], name, format, size, self.multiprocessors, self.shared)
            self.kernels[source, name] = found
        if found.format != format:
            raise AssertionError(f"{name} of {source.name} has arguments {found.format!r}, a launch {format!r}")
        return found

    @translated()
    def _module(self, cubin: bytes) -> Any:
        return cuda.module_from_buffer(cubin)

    @translated()
    def allocate(self, size: int) -> Any:
        """``size`` bytes from the pool. `int()` of the result is the address; they are freed with the last reference.

        Poisoned memory is `Guarded`.

        Raises:
            OutOfMemory: there is not enough memory.
        """
        try:
            if is_poisoned():
                whole = size + 2 * GUARD
                return Guarded(self._filled(self.pool.allocate(whole), whole), size)
            return self.pool.allocate(max(size, MIN_BYTES))
        except cuda.MemoryError:
            raise out_of_memory(size) from None

    @translated()
    def reserve(self, size: int) -> Any:
        """Exactly ``size`` bytes, outside the pool, which rounds up: for large memory that is kept. See `allocate`.

        Raises:
            OutOfMemory: there is not enough memory.
        """
        self.left.clear()
        try:
            memory = self._filled(cuda.mem_alloc(max(size, 1)), size)
        except cuda.MemoryError:
            raise out_of_memory(size) from None
        self.reserved += size
        weakref.finalize(memory, self._released, size)
        return Reserved(memory, self.left)

    @translated()
    def _filled(self, memory: Any, size: int) -> Any:
        if is_poisoned():
            cuda.memset_d8_async(int(memory), POISON, max(size, 1), self.stream)
        return memory

    def _released(self, size: int) -> None:
        self.reserved -= size

    def allocated(self) -> int:
        """Bytes that this process has allocated. The pool keeps freed memory, so this is the most needed so far."""
        return sum(int(each.pool.managed_bytes) for each in self.work_streams) + self.reserved

    @translated()
    def available(self) -> int:
        """Bytes that are free or held by this process."""
        self.left.clear()
        free, _ = cuda.mem_get_info()
        return int(free) + self.allocated()

    @translated()
    def upload(self, elements: np.ndarray, address: int) -> None:
        """Copy to the device, through page-locked memory, so that the host need not wait."""
        if not elements.nbytes:
            return
        if not any(elements.strides) and not elements[(0,) * elements.ndim].tobytes().strip(b"\0"):
            cuda.memset_d8_async(address, 0, elements.nbytes, self.stream)  # zeros: a view of one number
            return
        content = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
        for start in range(0, len(content), UPLOAD_CHUNK):
            while self.uploads and self.uploads[0][1].query():
                self.uploads.popleft()
            chunk = content[start : start + UPLOAD_CHUNK]
            staged = self._staged(len(chunk))
            staged[:] = chunk
            cuda.memcpy_htod_async(address + start, staged, self.stream)
            self.uploads.append((staged, self.event()))

    def _staged(self, size: int) -> np.ndarray:
        """``size`` bytes of page-locked memory, which leave the block that its pool holds there."""
        found: np.ndarray = self.host_pool.allocate((max(size, MIN_BYTES),), np.uint8)
        return found[:size]

    def download(self, address: int, shape: tuple[int, ...], dtype: np.dtype) -> Callable[[], np.ndarray]:
        """Copy from the device after the stream's work so far. The function that is returned waits for the elements.

        They are in page-locked memory, which goes back to a pool with the last reference to them.
        """
        if 0 in shape:
            return partial(np.empty, shape, dtype)
        with translated():
            staged = self._staged(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
            cuda.memcpy_dtoh_async(staged, address, self.stream)
            arrived = self.event()

        def wait() -> np.ndarray:
            with translated():
                arrived.synchronize()
            return staged

        return wait

    @translated()
    def copy(self, source: int, target: int, size: int) -> None:
        """Copy ``size`` bytes from one address to another, on the stream."""
        if size:
            cuda.memcpy_dtod_async(target, source, size, self.stream)

    @translated()
    def synchronize(self) -> None:
        """Wait for the stream in use."""
        self.stream.synchronize()

    @translated()
    def event(self) -> Any:
        """An event recorded on the stream."""
        event = cuda.Event()
        event.record(self.stream)
        return event
