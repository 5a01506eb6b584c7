"""The reference backend: every primitive by its NumPy implementation."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adtrain.backends.cpu.numpy_program import NumpyProgram, as_declared
from adtrain.core.array import ArrayType
from adtrain.core.primitive import Primitive
from adtrain.core.program import Program


class NumpyBackend:
    """Runs each primitive's ``"cpu"`` implementation, a function of NumPy arrays.

    Floating-point exceptions give infinities and NaN silently, as on every other device.
    """

    name = "cpu"

    def run(
        self,
        primitive: Primitive,
        buffers: Sequence[np.ndarray],
        params: Mapping[str, Any],
        outputs: Sequence[ArrayType],
    ) -> Sequence[np.ndarray]:
        with np.errstate(all="ignore"):
            found = primitive.implementations["cpu"](*buffers, **params)
        if len(outputs) == 1:
            found = (found,)
        return [as_declared(primitive.name, x, output) for x, output in zip(found, outputs, strict=True)]

    def compile(self, program: Program) -> Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]:
        return NumpyProgram(program).run

    def from_numpy(self, elements: np.ndarray) -> np.ndarray:
        return elements

    def to_numpy(self, buffer: np.ndarray) -> np.ndarray:
        elements = np.ascontiguousarray(buffer).reshape(buffer.shape).view()
        elements.flags.writeable = False
        return elements

    def synchronize(self) -> None:
        """Nothing to wait for: every primitive has finished when `run` returns."""

    def device_name(self) -> str:
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            return platform.processor() or platform.machine()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return names[0] if names else platform.machine()
