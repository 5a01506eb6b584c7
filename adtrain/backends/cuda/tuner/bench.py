"""Candidates run and timed on the GPU, for the tuner."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import pycuda.driver as cuda

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.lower import Candidate, Lowering
from adtrain.backends.cuda.runtime.device import Device
from adtrain.backends.cuda.runtime.errors import translated
from adtrain.backends.cuda.runtime.graph import Graphs
from adtrain.backends.cuda.runtime.program import Runnable
from adtrain.backends.cuda.tuner.race import described
from adtrain.core.errors import DeviceError
from adtrain.core.program import Equation
from adtrain.core.types import ArrayType

PERIOD = 1048573
"""Random elements drawn for one argument; a longer one repeats them. A prime, so that no two rows are equal."""

LAUNCHES, SAMPLE_US = 50, 2000.0
"""Launches of a sample, and its length from which there are fewer."""


class Laboratory:
    """The device as the tuner needs it; see `autotune.Laboratory`."""

    def __init__(self, device: Device, lowering: Lowering, name: str) -> None:
        self.device, self.lowering = device, lowering
        self.name = name
        self.architecture = device.architecture
        self.graphs = Graphs(device.stream)

    def compile(self, sources: Sequence[Source]) -> Iterator[None]:
        return compiler.side_by_side(sources, self.architecture)

    def trial(self, equation: Equation) -> GpuTrial:
        return GpuTrial(self.device, self.lowering, self.graphs, equation)

    def finish(self) -> None:
        self.device.pool.free_held()
        self.device.host_pool.free_held()


class GpuTrial:
    """Random arguments of an equation on the device, and memory for its results; see `contest.Trial`."""

    def __init__(self, device: Device, lowering: Lowering, graphs: Graphs, equation: Equation) -> None:
        self.device, self.lowering, self.graphs = device, lowering, graphs
        self.equation = equation
        rng = np.random.default_rng(zlib.crc32(described(equation).encode()))
        self.inputs = [self._uploaded(drawn(rng, v.type, index_limit(equation))) for v in equation.inputs]
        self.outputs = [device.allocate(v.size * v.type.dtype.itemsize) for v in equation.outputs]
        self.addresses = [int(memory) for memory in (*self.inputs, *self.outputs)]
        self.flag = self._uploaded(np.zeros(1, np.int32))
        self.prepared: dict[Candidate, Prepared] = {}

    def results(self, kernel: Candidate) -> Sequence[np.ndarray]:
        work = Prepared(self, kernel)
        for memory, v in zip(self.outputs, self.equation.outputs, strict=True):
            self._poison(memory, v.size * v.type.dtype.itemsize)
        self._poison(work.memory, work.runnable.scratch)
        work.launch()
        downloads = [
            self.device.download(int(memory), *v.type)
            for memory, v in zip(self.outputs, self.equation.outputs, strict=True)
        ]
        found = [download() for download in downloads]
        if work.runnable.checked and self.device.download(int(self.flag), (1,), np.dtype(np.int32))().any():
            raise DeviceError("an index is out of range")
        self.prepared[kernel] = work
        return found

    def microseconds(self, kernel: Candidate) -> float:
        return self.prepared[kernel].microseconds()

    def _uploaded(self, elements: np.ndarray) -> Any:
        memory = self.device.allocate(elements.nbytes)
        self.device.upload(elements, int(memory))
        return memory

    def _poison(self, memory: Any, size: int) -> None:
        if size:
            with translated():
                cuda.memset_d8_async(int(memory), 0xFF, size, self.device.stream)


class Prepared:
    """A candidate on a trial's arguments."""

    def __init__(self, trial: GpuTrial, kernel: Candidate) -> None:
        self.device, self.graphs = trial.device, trial.graphs
        self.runnable = Runnable(trial.device, trial.lowering, trial.equation, kernel)
        self.memory = trial.device.allocate(self.runnable.scratch)
        self.arguments = trial.addresses, int(self.memory), int(trial.flag)
        self.key = object()
        self.count = 0

    def launch(self) -> None:
        self.runnable(*self.arguments)

    def microseconds(self) -> float:
        """Of one launch, in a row of many that stand in one graph: what starting each one costs the host is hidden."""
        if not self.count:
            before = self.device.event()
            self.launch()
            self.count = max(1, min(LAUNCHES, int(SAMPLE_US / max(self._since(before), 1.0))))
        self.graphs.run(self.key, self._record)  # while it runs, what is timed gets to the device
        before = self.device.event()
        self.graphs.run(self.key, self._record)
        return self._since(before) / self.count

    def _record(self) -> None:
        for _ in range(self.count):
            self.runnable.record(*self.arguments)

    def _since(self, before: Any) -> float:
        """Microseconds from an event until the stream gets here."""
        after = self.device.event()
        with translated():
            after.synchronize()
            return float(after.time_since(before)) * 1e3


def drawn(rng: np.random.Generator, type_: ArrayType, limit: int) -> np.ndarray:
    """Random elements: normal, or integers from 0 to below ``limit``."""
    count = min(type_.size, PERIOD)
    if type_.dtype.kind == "f":
        elements = rng.standard_normal(count, type_.dtype)
    else:
        elements = rng.integers(0, 2 if type_.dtype.kind == "b" else limit, count).astype(type_.dtype)
    return np.resize(elements, type_.shape)


def index_limit(equation: Equation) -> int:
    """What integers among the arguments must be below, if they are indices."""
    params = equation.params
    for name in ("length", "num_classes"):
        if name in params:
            return int(params[name])
    if "windows" in params:
        return prod(params["windows"].kernel)
    if "axis" in params and equation.inputs[0].type.shape:
        return int(equation.inputs[0].type.shape[params["axis"]])
    return 256
