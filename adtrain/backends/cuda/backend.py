"""The backend of an NVIDIA GPU: kernels on a stream, or on several within `side_by_side`.

Also the properties of the GPUs and the versions of their software, as `adtrain devices` shows them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import pycuda
import pycuda.driver as cuda
from cuda.bindings import driver

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.forms.horizontal import join_one_blocks
from adtrain.backends.cuda.forms.peer_exchanges import fuse_exchanges
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.backends.cuda.lower import Lowering
from adtrain.backends.cuda.peer_window import SLOT_BYTES
from adtrain.backends.cuda.runtime import libraries
from adtrain.backends.cuda.runtime.device import Buffer, Device
from adtrain.backends.cuda.runtime.dlpack_exchange import ALIGNMENT, Borrowed, DlpackExchange
from adtrain.backends.cuda.runtime.driver import checked, translated
from adtrain.backends.cuda.runtime.exchanges import CopyEngines, Exchanges, Nccl, PeerMemory, connected
from adtrain.backends.cuda.runtime.launch import Runnable
from adtrain.backends.cuda.runtime.layout import Layout
from adtrain.backends.cuda.runtime.program import CudaProgram, Lowered, used_elsewhere
from adtrain.backends.cuda.tuner.autotune import Tuner, share_choices
from adtrain.backends.cuda.tuner.gpu_trial import GpuBench
from adtrain.backends.cuda.vendor import installed
from adtrain.core import communicator, dlpack
from adtrain.core.backend import Memory
from adtrain.core.errors import DeviceError
from adtrain.core.memory import is_poisoned
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.static_key import params_key
from adtrain.core.types import ArrayType, dtype_of
from adtrain.passes.fusion import fusions_of_users


class CudaBackend:
    """Runs primitives on the GPU, asynchronously: work is complete when elements are read or `synchronize` returns.

    Attributes:
        known: the launches of the primitives that ran eagerly, by primitive, types and parameters.

    Raises:
        DeviceError: the driver finds no GPU.
    """

    name = "gpu"
    overlaps_exchanges = True
    dlpack_device = (dlpack.CUDA, 0)

    def __init__(self) -> None:
        self.device = Device()
        self.dlpack_exchange = DlpackExchange(self.device)
        self.lowering = Lowering(self.device.target, installed())
        self.lowering_by_member = Lowering(self.device.target._replace(by_member=True))
        self.tuner = Tuner(self.lowering, GpuBench(self.device, self.lowering, self.identity()))
        self.known: dict[Any, Runnable] = {}

    @cached_property
    def peers(self) -> PeerMemory | None:
        """The memory of the GPUs of other ranks, if it can be mapped. All ranks map it at the same time."""
        return connected(self.device)

    @cached_property
    def exchanges(self) -> Exchanges:
        """The exchanges with the GPUs of other ranks. All ranks create them at the same time."""
        if self.peers is None:
            return Exchanges(self.device, [Nccl()])
        return Exchanges(self.device, [Nccl(), self.peers], CopyEngines(self.peers))

    def run(
        self,
        primitive: Primitive,
        buffers: Sequence[Buffer],
        params: Mapping[str, Any],
        outputs: Sequence[ArrayType],
    ) -> Sequence[Buffer]:
        if primitive.name == "reshape":
            return [buffers[0].of_shape(outputs[0].shape)]
        if {Trait.COLLECTIVE, Trait.SHARD_EXCHANGE, Trait.SUBVIEW}.intersection(primitive.traits):
            found = primitive.reference(*map(self.to_numpy, buffers), **params)
            return [self.from_numpy(np.ascontiguousarray(found))]
        if Trait.BARRIER in primitive.traits:
            return buffers
        work = self._runnable(primitive, buffers, params, outputs)
        results = [self.empty(t) for t in outputs]
        memory = self.device.allocate(work.scratch) if work.scratch else 0
        addresses, flags = [b.address for b in (*buffers, *results)], self.device.flags
        work.enqueue(addresses, int(memory), flags.address if work.checked else 0)
        if work.checked:
            flags.names[0] = primitive.name
            self.synchronize()
        return results

    def _runnable(
        self, primitive: Primitive, buffers: Sequence[Buffer], params: Mapping[str, Any], outputs: Sequence[ArrayType]
    ) -> Runnable:
        key = (primitive, tuple((b.shape, b.dtype) for b in buffers), params_key(params))
        found = self.known.get(key)
        if found is None:
            inputs = tuple(Variable(ArrayType(b.shape, b.dtype), self.name) for b in buffers)
            results = tuple(Variable(t, self.name) for t in outputs)
            equation = Equation(primitive, inputs, params, results)
            self.tuner.tune([equation])
            found = self.known[key] = Runnable(self.device, self.lowering, equation)
        return found

    def fuse(self, program: Program) -> Program:
        for fusion in gpu_fusions(self.lowering_of(program).target):
            program = fusion(program)
        return program

    def fuse_region(self, program: Program) -> Program:
        return join_one_blocks(program)

    def fuse_exchanges(self, program: Program) -> Program:
        mapped = communicator.current().size > 1 and self.peers is not None
        return fuse_exchanges(program, SLOT_BYTES) if mapped else program

    def lowering_of(self, program: Program) -> Lowering:
        """The lowering that chooses the kernels of a Program."""
        return self.lowering_by_member if program.members else self.lowering

    def compile(self, program: Program, lowered: Lowered | None = None) -> CudaProgram:
        lowering = self.lowering_of(program)
        if lowered is None:
            self._tune(program)
            share_choices(self.lowering, program.equations)
        else:
            lowering.planned.update(lowered.plans)
        return CudaProgram(program, self.device, lowering, self.empty, lambda: self.exchanges, lowered)

    def lowering_key(self) -> str | None:
        """The device. None, so that nothing is cached, if choices depend on measured times, memory is poisoned, or
        the user has fusions."""
        if is_poisoned() or self.lowering.measured or self.tuner.uses_times() or fusions_of_users("cuda"):
            return None
        return f"{self.device.target} {self.device.architecture}"

    def _tune(self, program: Program) -> None:
        if not program.members:  # measured times depend on the number of members
            self.tuner.tune(program.equations)

    def memory(self, program: Program) -> Memory:
        self._tune(program)
        return Layout(program, self.lowering_of(program)).memory

    def available(self) -> int:
        return self.device.available()

    def allocated(self) -> int:
        return self.device.allocated()

    def empty(self, type_: ArrayType) -> Buffer:
        """A buffer with undefined elements."""
        self.dlpack_exchange.collect()
        return Buffer(self.device.allocate(type_.size * type_.dtype.itemsize), type_.shape, type_.dtype)

    def from_numpy(self, elements: np.ndarray, donated: Sequence[Buffer] = ()) -> Buffer:
        same = [(b.shape, b.dtype) for b in donated] == [(elements.shape, elements.dtype)]
        if same and not used_elsewhere(donated, 0):
            buffer = donated[0]
        else:
            buffer = self.empty(ArrayType(elements.shape, elements.dtype))
        self.device.upload(elements, buffer.address)
        return buffer

    def to_numpy(self, buffer: Buffer) -> np.ndarray:
        elements = self.fetch(buffer)().copy()
        elements.flags.writeable = False
        return elements

    def fetch(self, buffer: Buffer) -> Callable[[], np.ndarray]:
        download = self.device.download(buffer.address, buffer.shape, buffer.dtype)

        def wait() -> np.ndarray:
            elements = download()
            self.device.flags.check()
            elements.flags.writeable = False
            return elements

        return wait

    def to_dlpack(self, buffer: Buffer, **options: Any) -> Any:
        if tuple(options.get("dl_device") or self.dlpack_device) != self.dlpack_device:
            if options.get("copy") is False:
                raise BufferError("__dlpack__: an array on the GPU is copied to another device, found copy=False")
            return dlpack.exported(self.to_numpy(buffer), **options)
        if options.get("copy"):
            copied = self.empty(ArrayType(buffer.shape, buffer.dtype))
            self.device.copy(buffer.address, copied.address, buffer.nbytes)
            buffer = copied
        lent = self.dlpack_exchange.lend(buffer.memory, options.get("stream"))
        versioned = (options.get("max_version") or (0, 0)) >= dlpack.VERSION
        return dlpack.capsule(buffer.address, buffer.shape, buffer.dtype, self.dlpack_device, lent, versioned)

    def from_dlpack(self, x: Any) -> Buffer:
        if (found := x.__dlpack_device__()[1]) != self.dlpack_device[1]:
            raise DeviceError(f"from_dlpack: found an array on GPU {found}, expected GPU {self.dlpack_device[1]}")
        tensor = self.dlpack_exchange.borrow(x)
        dtype_of("from_dlpack", tensor.dtype)
        borrowed = Buffer(Borrowed(tensor, self.dlpack_exchange), tensor.shape, tensor.dtype)
        if borrowed.address % ALIGNMENT == 0 and borrowed.nbytes:
            return borrowed
        copied = self.empty(ArrayType(borrowed.shape, borrowed.dtype))
        self.device.copy(borrowed.address, copied.address, borrowed.nbytes)
        return copied

    def synchronize(self) -> None:
        """Wait for the stream.

        Raises:
            ShapeError: an index was out of range.
        """
        self.device.synchronize()
        self.device.flags.check()

    @contextmanager
    def side_by_side(self, count: int) -> Iterator[Sequence[Callable[[], AbstractContextManager[None]]]]:
        self.synchronize()
        streams = self.device.more_streams(count)
        try:
            yield [partial(self.device.using, each) for each in streams]
        finally:
            for each in streams:
                with self.device.using(each):
                    self.device.synchronize()
        self.device.flags.check()

    @translated()
    def device_name(self) -> str:
        name: str = self.device.device.name()
        return name

    @translated()
    def properties(self) -> dict[str, Any]:
        """Sizes in bytes, clocks in MHz, and versions as text, None where something is missing.

        ``devices`` has an entry for each GPU of the machine, this one first; ``peers`` of an entry are the numbers of
        the GPUs whose memory it can read directly. ``candidates`` names the libraries whose calls are candidates.
        """
        count = cuda.Device.count()
        found = [{**_describe(cuda.Device(ordinal)), "peers": peers(ordinal, count)} for ordinal in range(count)]
        found[0]["free_bytes"], _ = cuda.mem_get_info()
        return {
            "devices": found,
            "driver": libraries.driver(),
            "driver_cuda": libraries.cuda_version(cuda.get_driver_version()),
            "runtime": libraries.runtime(),
            "toolkit": _toolkit(),
            "pycuda": pycuda.VERSION_TEXT,
            "pycuda_cuda": ".".join(map(str, cuda.get_version()[:2])),
            "nvrtc": compiler.version(),
            "libraries": libraries.vendor(),
            "candidates": [library.name for library in self.lowering.libraries],
        }

    @translated()
    def identity(self) -> str:
        """The names of the GPU and its driver."""
        major, minor = self.device.device.compute_capability()
        driver = libraries.driver() or libraries.cuda_version(cuda.get_driver_version())
        return f"{self.device.device.name()}, compute capability {major}.{minor}, driver {driver}"

    def compiler_name(self) -> str:
        return f"NVRTC {compiler.version()} for sm_{self.device.architecture}, PyCUDA {pycuda.VERSION_TEXT}"


@translated()
def _describe(about: Any) -> dict[str, Any]:
    """One GPU; ``free_bytes`` is known only for the one in use."""
    major, minor = about.compute_capability()
    read, attribute = about.get_attribute, cuda.device_attribute
    return {
        "name": about.name(),
        "capability": f"{major}.{minor}",
        "multiprocessors": read(attribute.MULTIPROCESSOR_COUNT),
        "memory_bytes": about.total_memory(),
        "free_bytes": None,
        "shared_bytes_per_multiprocessor": read(attribute.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
        "registers_per_multiprocessor": read(attribute.MAX_REGISTERS_PER_MULTIPROCESSOR),
        "l2_bytes": read(attribute.L2_CACHE_SIZE),
        "clock_mhz": read(attribute.CLOCK_RATE) / 1000,
        "memory_clock_mhz": read(attribute.MEMORY_CLOCK_RATE) / 1000,
    }


def peers(ordinal: int, count: int) -> list[int]:
    """The GPUs, of `count`, whose memory GPU `ordinal` can read directly, through NVLink or PCIe."""
    devices = [checked(driver.cuDeviceGet(i)) for i in range(count)]
    able = [i != ordinal and checked(driver.cuDeviceCanAccessPeer(devices[ordinal], x)) for i, x in enumerate(devices)]
    return [i for i, x in enumerate(able) if x]


def _toolkit() -> str | None:
    """The version of the CUDA toolkit whose nvcc is on the PATH, "13.0"."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    output = subprocess.run(
        [nvcc, "--version"], capture_output=True, encoding="utf-8", errors="replace", check=False
    ).stdout
    version = re.search(r"release ([\d.]+)", output)
    return version[1] if version else None
