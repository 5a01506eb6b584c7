"""The GPU of this process: context, stream, memory pools, and loaded kernels with their launch shapes."""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pycuda.driver as cuda
from cuda.bindings import driver

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.launch_plan import WorkSize
from adtrain.backends.cuda.runtime.errors import checked, out_of_memory, translated
from adtrain.backends.cuda.runtime.guarded import Guarded
from adtrain.core import poison
from adtrain.core.errors import DeviceError
from adtrain.core.target import Target

WARP = 32
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: the stream does not synchronize with the default stream, which other libraries may use."""

UPLOAD_CHUNK = 4 << 20
"""Maximum bytes of one copy of an upload. Later chunks reuse page-locked memory, which is slow to allocate."""

DEFAULT_SHARED = 48 << 10
"""Bytes of dynamic shared memory that a kernel may have without opting in."""


class Shape(NamedTuple):
    """The shape of a launch; `shared` is bytes of dynamic shared memory."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int


class Lane(NamedTuple):
    """A stream, and the pool of the memory that its work uses.

    Memory that is freed while the stream's work still uses it is given to later work of the same stream only.
    """

    stream: Any
    pool: Any


class Device:
    """One GPU with its primary context, which other libraries of the process share.

    All work goes to the stream of the lane that is in use: `stream`, with the memory of `pool`.

    Attributes:
        reserved: bytes allocated outside the pool.
        uploads: page-locked memory that the device may still read, and the event after which it does not.
        overlaps: whether a launch may start while the previous one ends (programmatic dependent launch).
        shared: bytes of shared memory of a multiprocessor.
        windows: the addresses of the windows of all ranks, and this rank's number; empty before they are connected.
            As arguments of a kernel they are the struct Windows of kernels/cuda/index/peer_window.cuh.

    Raises:
        DeviceError: the driver is missing, or finds no GPU.
    """

    @translated()
    def __init__(self, ordinal: int = 0) -> None:
        try:
            cuda.init()
            self.device = cuda.Device(ordinal)
        except cuda.Error as error:
            raise DeviceError(f"device gpu: the NVIDIA driver finds no GPU ({error})") from None
        self.context = self.device.retain_primary_context()
        self.context.push()
        atexit.register(self.context.pop)
        self.lane = Lane(cuda.Stream(NON_BLOCKING), cuda.DeviceMemoryPool())
        self.lanes = [self.lane]
        self.reserved = 0
        self.windows: tuple[int, ...] = ()
        self.host_pool = cuda.PageLockedMemoryPool()
        self.uploads: deque[tuple[Any, Any]] = deque()
        capability = self.device.compute_capability()
        self.architecture = compiler.architecture(capability)
        self.overlaps = capability >= (9, 0)
        attribute = cuda.device_attribute
        self.multiprocessors: int = self.device.get_attribute(attribute.MULTIPROCESSOR_COUNT)
        self.shared: int = self.device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)
        self.target = Target(capability, self.multiprocessors, self._shared_per_block(ordinal))
        self.kernels: dict[tuple[Source, str], Kernel] = {}
        self.sources: dict[Source, _Loaded] = {}

    @property
    def stream(self) -> Any:
        return self.lane.stream

    @property
    def pool(self) -> Any:
        return self.lane.pool

    @translated()
    def more_lanes(self, count: int) -> Sequence[Lane]:
        """`count` lanes besides the first one. Each has the same stream in every call."""
        while len(self.lanes) <= count:
            self.lanes.append(Lane(cuda.Stream(NON_BLOCKING), cuda.DeviceMemoryPool()))
        return self.lanes[1 : count + 1]

    @contextmanager
    def using(self, lane: Lane) -> Iterator[None]:
        """Within it, all work goes to the lane."""
        before, self.lane = self.lane, lane
        try:
            yield
        finally:
            self.lane = before

    def _shared_per_block(self, ordinal: int) -> int:
        """Most bytes of shared memory of a block (opt-in)."""
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        return int(checked(driver.cuDeviceGetAttribute(attribute, checked(driver.cuDeviceGet(ordinal)))))

    def kernel(self, source: Source, name: str) -> Kernel:
        """A kernel of a source, compiled and loaded at first use."""
        found = self.kernels.get((source, name))
        if found is None:
            if source not in self.sources:
                self.sources[source] = compiler.load_cubin(source, self.architecture, _Loaded)
            found = self.kernels[source, name] = Kernel(self, self.sources[source], name)
        return found

    @translated()
    def allocate(self, size: int) -> Any:
        """``size`` bytes from the pool. `int()` of the result is the address; they are freed with the last reference.

        Poisoned memory is `Guarded`.

        Raises:
            OutOfMemory: there is not enough memory.
        """
        try:
            if poison.active():
                whole = size + 2 * poison.GUARD
                return Guarded(self._filled(self.pool.allocate(whole), whole), size)
            return self.pool.allocate(max(size, 1))
        except cuda.MemoryError:
            raise out_of_memory(size) from None

    @translated()
    def reserve(self, size: int) -> Any:
        """Exactly ``size`` bytes, outside the pool, which rounds up: for large memory that is kept. See `allocate`.

        Raises:
            OutOfMemory: there is not enough memory.
        """
        try:
            memory = self._filled(cuda.mem_alloc(max(size, 1)), size)
        except cuda.MemoryError:
            raise out_of_memory(size) from None
        self.reserved += size
        weakref.finalize(memory, self._released, size)
        return memory

    @translated()
    def _filled(self, memory: Any, size: int) -> Any:
        if poison.active():
            cuda.memset_d8_async(int(memory), poison.BYTE, max(size, 1), self.stream)
        return memory

    def _released(self, size: int) -> None:
        self.reserved -= size

    def allocated(self) -> int:
        """Bytes that this process has allocated. The pool keeps freed memory, so this is the most needed so far."""
        return sum(int(lane.pool.managed_bytes) for lane in self.lanes) + self.reserved

    @translated()
    def available(self) -> int:
        """Bytes that are free or held by this process."""
        free, _ = cuda.mem_get_info()
        return int(free) + self.allocated()

    @translated()
    def upload(self, elements: np.ndarray, address: int) -> None:
        """Copy to the device, through page-locked memory, so that the host need not wait."""
        if not elements.nbytes:
            return
        content = elements.reshape(-1).view(np.uint8)
        for start in range(0, len(content), UPLOAD_CHUNK):
            while self.uploads and self.uploads[0][1].query():
                self.uploads.popleft()
            chunk = content[start : start + UPLOAD_CHUNK]
            staged = self.host_pool.allocate(chunk.shape, np.uint8)
            staged[:] = chunk
            cuda.memcpy_htod_async(address + start, staged, self.stream)
            self.uploads.append((staged, self.event()))

    def download(self, address: int, shape: tuple[int, ...], dtype: np.dtype) -> Callable[[], np.ndarray]:
        """Copy from the device after the stream's work so far. The function that is returned waits for the elements."""
        if 0 in shape:
            return partial(np.empty, shape, dtype)
        with translated():
            staged = self.host_pool.allocate(shape, dtype)
            cuda.memcpy_dtoh_async(staged, address, self.stream)
            arrived = self.event()

        def wait() -> np.ndarray:
            with translated():
                arrived.synchronize()
            return staged.copy()

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


class _Loaded:
    """A cubin loaded twice: by PyCUDA, for eager launches, and by the driver API, for occupancy and graph launches.

    PyCUDA does not expose the handles of its functions.
    """

    @translated()
    def __init__(self, cubin: bytes) -> None:
        self.module = cuda.module_from_buffer(cubin)
        self.queried = checked(driver.cuModuleLoadData(cubin))


class Kernel:
    """A loaded kernel.

    Attributes:
        function, queried: the function of PyCUDA, and of the driver API.
        max_threads: threads of a block, at most.
        shared: bytes of dynamic shared memory that a block may have.
        shapes: the launch shapes found so far.
    """

    @translated()
    def __init__(self, device: Device, loaded: _Loaded, name: str) -> None:
        self.device = device
        self.name = name
        self.function = loaded.module.get_function(name)
        self.queried = checked(driver.cuModuleGetFunction(loaded.queried, name.encode()))
        self.max_threads: int = self.function.get_attribute(cuda.function_attribute.MAX_THREADS_PER_BLOCK)
        self.shared = DEFAULT_SHARED
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
        return int(checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.queried, threads, shape.shared)))

    def _strided(self, size: WorkSize) -> Shape:
        """The shape for a grid-stride loop: blocks of the best occupancy, at most as many as are resident at once.

        Blocks are smaller where there are too few elements for all multiprocessors.
        """
        processors = self.device.multiprocessors
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
        processors, blocks, at_once = self.device.multiprocessors, prod(shape.grid), self.at_once(shape)
        share = -(-blocks // processors)
        if blocks == 1 or share >= at_once:
            return shape
        if share > 2:
            return None
        shared = self.device.shared // (share + 1)
        self._allow(shared)
        return shape._replace(shared=shared)

    @translated()
    def _allow(self, shared: int) -> None:
        """Let a block have ``shared`` bytes of dynamic shared memory."""
        if shared <= self.shared:
            return
        self.function.set_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(self.queried, attribute, shared))
        self.shared = shared

    def _best_threads(self, shared: int) -> int:
        _, threads = checked(driver.cuOccupancyMaxPotentialBlockSize(self.queried, None, shared, 0))
        return int(threads)


def _warps(threads: int) -> int:
    return max(-(-threads // WARP), 1) * WARP
