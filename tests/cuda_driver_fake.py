"""A GPU in host memory: PyCUDA and the driver API without a driver. Launches are noted, and nothing is computed.

`install` must come before the first import of the CUDA backend, in a process of its own.
"""

from __future__ import annotations

import ctypes
import sys
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver

from adtrain.backends.cuda import H200, compiler

BLOCKS_AT_ONCE, BEST_THREADS, MAX_THREADS = 8, 256, 1024


class Launched(NamedTuple):
    """A launch: the handle of the kernel, its attributes, and 64 bits of each argument; no arguments where pointers to
    them are given, because their number is not."""

    function: int
    attributes: tuple[str, ...]
    arguments: tuple[int, ...]


class Gpu:
    """What the driver was asked for.

    Attributes:
        loaded: the cubins, in the order in which they were loaded.
        launched: the launches that ran, those of a graph each time that the graph ran.
        captured: the launches of the graph that is being captured; None outside of a capture.
        names: of the kernels, by handle.
        staged: bytes of the page-locked arrays, in the order of the requests.
    """

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.launched: list[Launched] = []
        self.captured: list[Launched] | None = None
        self.graphs: list[list[Launched]] = []
        self.names: list[str] = []
        self.staged: list[int] = []

    def page_locked(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A new array of the pool of page-locked memory."""
        found = np.empty(shape, dtype)
        self.staged.append(found.nbytes)
        return found

    def module(self, cubin: bytes) -> Any:
        """PyCUDA's module, and its functions."""
        self.loaded.append(bytes(cubin))
        return SimpleNamespace(get_function=self._function)

    def _function(self, name: str) -> Any:
        self.names.append(name)
        launched = Launched(len(self.names) - 1, (), ())
        return SimpleNamespace(
            get_attribute={"threads": MAX_THREADS, "shared": 0}.__getitem__,
            prepared_async_call=lambda grid, block, stream, *arguments: self._add(launched),
        )

    def _add(self, launched: Launched) -> None:
        (self.launched if self.captured is None else self.captured).append(launched)

    def launch(self, config: Any, function: Any, pointers: int, packed: int) -> None:
        arguments: tuple[int, ...] = ()
        if not pointers:
            _, at, _, size, _ = (ctypes.c_void_p * 5).from_address(packed)
            count = ctypes.c_size_t.from_address(size or 0).value // 8
            arguments = tuple((ctypes.c_uint64 * count).from_address(at or 0))
        attributes = tuple(x.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_") for x in config.attrs)
        self._add(Launched(int(function), attributes, arguments))

    def begin_capture(self) -> None:
        self.captured = []

    def end_capture(self) -> int:
        assert self.captured is not None
        self.graphs.append(self.captured)
        self.captured = None
        return len(self.graphs) - 1


class Memory:
    """Host memory. `int()` is the address."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size + 256, np.uint8)

    def __int__(self) -> int:
        address: int = self.bytes.ctypes.data
        return -(-address // 256) * 256


class PageLocked(np.ndarray):
    """Host memory that the device reads."""

    @property
    def base(self) -> Any:
        return SimpleNamespace(get_device_pointer=lambda: self.ctypes.data)


def _pycuda(gpu: Gpu) -> ModuleType:
    """The module pycuda.driver, as far as the backend uses it."""
    handles = count(16)
    module: Any = ModuleType("pycuda.driver")
    module.Error, module.MemoryError = type("Error", (Exception,), {}), type("MemoryError", (Exception,), {})
    attributes = {"MULTIPROCESSOR_COUNT": H200.multiprocessors, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": H200.shared}
    module.device_attribute = SimpleNamespace(**{name: name for name in attributes})
    module.host_alloc_flags = SimpleNamespace(DEVICEMAP=0)
    module.init, module.get_driver_version = (lambda: None), (lambda: 13000)
    context = SimpleNamespace(push=lambda: None, pop=lambda: None)
    module.Device = lambda ordinal: SimpleNamespace(
        name=lambda: "fake",
        retain_primary_context=lambda: context,
        compute_capability=lambda: H200.capability,
        get_attribute=attributes.__getitem__,
    )
    module.function_attribute = SimpleNamespace(MAX_THREADS_PER_BLOCK="threads", SHARED_SIZE_BYTES="shared")
    module.module_from_buffer = gpu.module
    module.Stream = lambda flags=0: SimpleNamespace(handle=next(handles), synchronize=lambda: None)
    module.Event = lambda: SimpleNamespace(record=lambda stream: None, synchronize=lambda: None, query=lambda: True)
    module.DeviceMemoryPool = lambda: SimpleNamespace(allocate=Memory, managed_bytes=0)
    module.PageLockedMemoryPool = lambda: SimpleNamespace(allocate=gpu.page_locked)
    module.mem_alloc = Memory
    module.pagelocked_zeros = lambda size, dtype, mem_flags: np.zeros(size, dtype).view(PageLocked)
    module.memcpy_htod_async = lambda to, x, stream: ctypes.memmove(to, x.ctypes.data, x.nbytes)
    module.memcpy_dtoh_async = lambda x, address, stream: ctypes.memmove(x.ctypes.data, address, x.nbytes)
    module.memcpy_dtod_async = lambda to, address, size, stream: ctypes.memmove(to, address, size)
    return module


def _driver_functions(gpu: Gpu) -> dict[str, Any]:
    """The results of the functions of the driver API, without the error code."""
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return {
        "cuDeviceGet": lambda ordinal: ordinal,
        "cuDeviceGetAttribute": lambda attribute, device: H200.shared,
        "cuFuncSetAttribute": lambda function, attribute, value: None,
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda function, threads, shared: BLOCKS_AT_ONCE,
        "cuOccupancyMaxPotentialBlockSize": lambda function, of_shared, shared, limit: [0, BEST_THREADS],
        "cuLaunchKernelEx": gpu.launch,
        "cuStreamBeginCapture": lambda stream, mode: gpu.begin_capture(),
        "cuStreamIsCapturing": lambda stream: active,
        "cuStreamEndCapture": lambda stream: gpu.end_capture(),
        "cuStreamSynchronize": lambda stream: None,
        "cuGraphGetNodes": lambda graph, count: [gpu.graphs[graph], count],
        "cuGraphKernelNodeGetParams": lambda node: SimpleNamespace(func=driver.CUfunction(node.function)),
        "cuGraphInstantiate": lambda graph, flags: graph,
        "cuGraphDestroy": lambda graph: None,
        "cuGraphExecDestroy": lambda graph: None,
        "cuGraphLaunch": lambda graph, stream: gpu.launched.extend(gpu.graphs[graph]),
    }


def install() -> Gpu:
    """Replace PyCUDA and the functions of the driver API, and let each source be its cubin."""
    gpu = Gpu()
    pycuda: Any = ModuleType("pycuda")
    pycuda.driver = _pycuda(gpu)
    sys.modules.update({"pycuda": pycuda, "pycuda.driver": pycuda.driver})

    def answering(function: Any) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            found = function(*arguments)
            results = found if isinstance(found, list) else [] if found is None else [found]
            return driver.CUresult.CUDA_SUCCESS, *results

        return call

    for name, function in _driver_functions(gpu).items():
        setattr(driver, name, answering(function))
    replaced: Any = compiler
    replaced.cubin = lambda source, target: repr(source).encode()
    replaced.begin = lambda sources, target: []
    return gpu
