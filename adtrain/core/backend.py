"""Backend: what a device must do to run primitives and Programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from adtrain.core.devices import Transfers, find_device
from adtrain.core.primitive import Primitive
from adtrain.core.program import Program
from adtrain.core.types import ArrayType


class Memory(NamedTuple):
    """Bytes that a Program takes while it runs, beside its arguments."""

    values: int  # constants, what equations hand on, and results that do not lie in an argument: at most at once
    separate: int  # the same, each with memory of its own until the end
    scratch: int  # for the equations' own use, of all threads


class KernelRun(NamedTuple):
    """A function that runs for an equation, and its shape: threads, or on a GPU grid, block and dynamic shared memory
    (bytes); nothing where NumPy runs."""

    name: str
    launch: Mapping[str, Any]


class Executable(Protocol):
    """A Program made ready to run again and again.

    Attributes:
        kernels: what computes each equation, in the order of the launches; nothing for one that is a view.
        repeats: the Program `carries`, and its results lie where the donated inputs lay, so that it can run again at
            once on the same buffers.
    """

    kernels: Sequence[Sequence[KernelRun]]
    repeats: bool

    def run(self, buffers: list[Any], timed: bool = False, times: int = 1) -> tuple[Sequence[Any], Sequence[float]]:
        """Buffers of the Program's inputs to buffers of its outputs, which may take the memory of donated inputs.

        The second result is the time of each equation in seconds if `timed`, else empty. Where it `repeats`, the
        Program runs so many `times`, each time on what the one before has left.
        """
        ...


class Backend(Transfers, Protocol):
    """One device."""

    name: str

    def run(
        self, primitive: Primitive, buffers: Sequence[Any], params: Mapping[str, Any], outputs: Sequence[ArrayType]
    ) -> Sequence[Any]:
        """Compute ``primitive`` on ``buffers``; one buffer for each of ``outputs``."""
        ...

    def fuse(self, program: Program) -> Program:
        """``program`` after the passes that make one kernel of several equations on this device."""
        ...

    def compile(self, program: Program) -> Executable:
        """``program`` made ready to run."""
        ...

    def memory(self, program: Program) -> Memory:
        """What ``program`` takes where `compile` makes it ready; it is neither compiled nor allocated."""
        ...

    def available(self) -> int | None:
        """Bytes that all arrays and Programs of this process can have, those there are counted in; None if unknown."""
        ...

    def held(self) -> int | None:
        """Bytes that the device has given this process so far, for all arrays and Programs; None if unknown."""
        ...

    def synchronize(self) -> None:
        """Wait until everything asked for has been computed."""
        ...

    def device_name(self) -> str:
        """The device as its maker calls it."""
        ...

    def identity(self) -> str:
        """What measured speeds hold for: the device, and the driver or compiler that runs it."""
        ...

    def compiler_name(self) -> str:
        """What compiles Programs for it, with its version and options; or why nothing does."""
        ...


def backend(device: str) -> Backend:
    """The backend of ``device``.

    Raises:
        DeviceError: there is no such device here.
    """
    return cast(Backend, find_device(device))
