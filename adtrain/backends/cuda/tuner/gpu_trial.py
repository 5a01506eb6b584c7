"""Runs and times candidates on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pycuda.driver as cuda

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.lower import Candidate, Lowering
from adtrain.backends.cuda.runtime.device import Device
from adtrain.backends.cuda.runtime.driver import translated
from adtrain.backends.cuda.runtime.launch import Graphs, Runnable
from adtrain.backends.cuda.tuner.measure import arguments, expected, widened
from adtrain.core.errors import DeviceError
from adtrain.core.program import Equation

MAX_LAUNCHES, SAMPLE_US = 50, 2000.0
"""A sample is MAX_LAUNCHES launches, or as many as take this many microseconds."""


class GpuBench:
    """The device, as the tuner needs it; see `autotune.Bench`."""

    def __init__(self, device: Device, lowering: Lowering, name: str) -> None:
        self.device, self.lowering = device, lowering
        self.name = name
        self.architecture = device.architecture
        self.graphs = Graphs(device)

    def compile(self, sources: Sequence[Source]) -> Iterator[None]:
        return compiler.compile_all(sources, self.architecture)

    def trials(self, equation: Equation) -> Sequence[GpuTrial]:
        return [GpuTrial(self, equation, gradients) for gradients in (False, True)]

    @translated()
    def finish(self) -> None:
        self.device.pool.free_held()
        self.device.host_pool.free_held()
        self.device.hold()


class GpuTrial:
    """Random arguments of an equation on the device, and memory for its results; see `measure.Trial`."""

    def __init__(self, bench: GpuBench, equation: Equation, gradients: bool) -> None:
        self.bench, self.device, self.equation = bench, bench.device, equation
        self.arrays = arguments(equation, gradients)
        self.parts: Sequence[Any] = ()
        inputs = [self._uploaded(x) for x in self.arrays]
        self.outputs = [self.device.allocate(v.size * v.type.dtype.itemsize) for v in equation.outputs]
        self.memory = (*inputs, *self.outputs)
        self.flag = self._uploaded(np.zeros(1, np.int32))
        self.prepared: dict[str, Prepared] = {}

    def expected(self) -> Sequence[np.ndarray]:
        results, self.parts = expected(self.equation, self.arrays)
        return results

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
        self.prepared[kernel.label] = work
        return [widened(x[part]) for x, part in zip(found, self.parts, strict=True)]

    def microseconds(self, kernel: Candidate) -> float:
        return self.prepared[kernel.label].microseconds()

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
        self.device, self.graphs = trial.device, trial.bench.graphs
        self.runnable = Runnable(trial.device, trial.bench.lowering, trial.equation, kernel)
        self.memory = trial.device.allocate(self.runnable.scratch)
        self.arguments = [int(memory) for memory in trial.memory], int(self.memory), int(trial.flag)
        self.key = object()
        self.count = 0

    def launch(self) -> None:
        self.runnable.enqueue(*self.arguments)

    def microseconds(self) -> float:
        """One launch, among many in one CUDA graph, which hides the host's time for a launch."""
        if not self.count:
            before = self.device.event()
            self.launch()
            self.count = max(1, min(MAX_LAUNCHES, int(SAMPLE_US / max(self._since(before), 1.0))))
        self.graphs.run(self.key, self._record)  # warm-up, during which the timed graph is submitted
        before = self.device.event()
        self.graphs.run(self.key, self._record)
        return self._since(before) / self.count

    def _record(self) -> None:
        for _ in range(self.count):
            self.runnable.enqueue(*self.arguments, overlap=True)

    def _since(self, before: Any) -> float:
        """Microseconds from an event to the end of the stream's work."""
        after = self.device.event()
        with translated():
            after.synchronize()
            return float(after.time_since(before)) * 1e3
