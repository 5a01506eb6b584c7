"""The CPU: primitives one by one through NumPy, Programs as compiled code."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import adtrain.lowering.cpu  # noqa: F401  registers the kernels
from adtrain.backends.cpu import compiled_program, compiler, numpy_program
from adtrain.backends.cpu.codegen import supported
from adtrain.backends.cpu.compiled_program import CompiledProgram, Lowered
from adtrain.backends.cpu.compiler import CompilerError
from adtrain.backends.cpu.fusions import cpu_fusions, kernels
from adtrain.backends.cpu.numpy_program import NumpyProgram, as_declared
from adtrain.core import communicator, dlpack
from adtrain.core.backend import Executable, Memory
from adtrain.core.errors import OutOfMemory
from adtrain.core.memory import is_poisoned
from adtrain.core.primitive import Primitive
from adtrain.core.program import Equation, Program, body_of
from adtrain.core.types import ArrayType
from adtrain.passes.fusion import fusions_of_users


class CpuBackend:
    """Runs a primitive by its NumPy reference, and a Program by compiled C.

    Floating-point exceptions give infinities and NaN silently, as on every other device.
    """

    name = "cpu"
    overlaps_exchanges = False
    dlpack_device = (dlpack.CPU, 0)

    def run(
        self,
        primitive: Primitive,
        buffers: Sequence[np.ndarray],
        params: Mapping[str, Any],
        outputs: Sequence[ArrayType],
    ) -> Sequence[np.ndarray]:
        try:
            with np.errstate(all="ignore"):
                found = primitive.reference(*buffers, **params)
        except MemoryError as error:
            raise OutOfMemory(f"{primitive.name}: not enough memory; {error}") from None
        if len(outputs) == 1:
            found = (found,)
        return [as_declared(primitive.name, x, output) for x, output in zip(found, outputs, strict=True)]

    def fuse(self, program: Program) -> Program:
        for fusion in cpu_fusions(program.members > 0):
            program = fusion(program)
        return program

    def fuse_region(self, program: Program) -> Program:
        return program

    def fuse_exchanges(self, program: Program) -> Program:
        return program

    def lowering_key(self) -> str | None:
        """The ranks that share memory: what a `Lowered` depends on beside the Program.

        None while memory is poisoned: its plan has guard zones. None with fusions of the user, which may change.
        """
        ranks = communicator.current()
        shared = f"rank {ranks.rank} of {ranks.size}" if ranks.shares_memory else ""
        return None if is_poisoned() or fusions_of_users("cpu") else shared

    def compile(self, program: Program, lowered: Lowered | None = None) -> Executable:
        if lowered is None and (lacking := _without_kernel(program)):
            shapes = ", ".join(str(v.type) for v in lacking.inputs)
            what = f"{lacking.primitive.name} of {shapes}"
            _say_once(f"adtrain: warning: {what} has no compiled kernel; running on NumPy")
            return NumpyProgram(program)
        try:
            return CompiledProgram(program, lowered)
        except CompilerError as error:
            _say_once(f"adtrain: warning: {error}; running on NumPy")
            return NumpyProgram(program)

    def memory(self, program: Program) -> Memory:
        if not _without_kernel(program):
            try:
                return compiled_program.memory(program)
            except CompilerError:
                pass  # `compile` says so
        return numpy_program.memory(program)

    def available(self) -> None:
        """Unknown: the system overcommits memory."""

    def to_dlpack(self, buffer: np.ndarray, **options: Any) -> Any:
        return dlpack.exported(self.to_numpy(buffer), **options)

    def from_dlpack(self, x: Any) -> np.ndarray:
        return dlpack.imported(x)

    def from_numpy(self, elements: np.ndarray, donated: Sequence[np.ndarray] = ()) -> np.ndarray:
        return elements

    def to_numpy(self, buffer: np.ndarray) -> np.ndarray:
        elements: Any = np.ascontiguousarray(buffer).reshape(buffer.shape)
        return np.asarray(memoryview(elements).toreadonly())  # a view of `elements` could be made writeable again

    def allocated(self) -> None:
        """Unknown: NumPy allocates from the system."""

    def fetch(self, buffer: np.ndarray) -> Callable[[], np.ndarray]:
        return partial(self.to_numpy, buffer)

    def synchronize(self) -> None:
        """Returns at once: `run` is synchronous."""

    @contextmanager
    def side_by_side(self, count: int) -> Iterator[Sequence[Callable[[], AbstractContextManager[None]]]]:
        """None: a Program uses all cores."""
        yield ()

    def device_name(self) -> str:
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return platform.processor() or platform.machine()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return names[0] if names else platform.machine()

    def identity(self) -> str:
        return f"{self.device_name()}, {self.compiler_name()}"

    def compiler_name(self) -> str:
        return compiler.describe()


def _without_kernel(program: Program) -> Equation | None:
    """The first equation, also inside fused ones, that has no C kernel."""
    for equation in program.equations:
        if equation.form and not kernels(equation):
            if found := _without_kernel(body_of(equation)):
                return found
        elif not supported(equation):
            return equation
    return None


@cache
def _say_once(line: str) -> None:
    logging.getLogger(__name__).warning(line)
