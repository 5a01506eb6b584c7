"""The backend protocol: what a device must do to run primitives, and the table of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from adtrain.core.errors import DeviceError

if TYPE_CHECKING:
    from adtrain.core.array import ArrayType
    from adtrain.core.primitive import Primitive
    from adtrain.core.program import Program


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


class Backend(Protocol):
    """One device. Buffers are its own objects; nobody else looks into them."""

    name: str

    def run(
        self, primitive: Primitive, buffers: Sequence[Any], params: Mapping[str, Any], outputs: Sequence[ArrayType]
    ) -> Sequence[Any]:
        """Compute ``primitive`` on ``buffers``; one buffer for each of ``outputs``."""
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

    def from_numpy(self, elements: np.ndarray) -> Any:
        """A buffer with the elements of a C-contiguous host array that nobody will write to."""
        ...

    def to_numpy(self, buffer: Any) -> np.ndarray:
        """The elements as a read-only, C-contiguous host array."""
        ...

    def fetch(self, buffer: Any) -> Callable[[], np.ndarray]:
        """`to_numpy` in two parts: the elements are on their way, behind what has been asked for so far and before
        what is asked for next; the function that is returned waits for them."""
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


_loaders: dict[str, Callable[[], Backend]] = {}
_backends: dict[str, Backend] = {}


def register_backend(device: str, loader: Callable[[], Backend]) -> None:
    """Name a device and the function that makes its backend when it is first asked for."""
    _loaders[device] = loader


def backend(device: str) -> Backend:
    """The backend of ``device``.

    Raises:
        DeviceError: there is no such device here.
    """
    found = _backends.get(device)
    if found is None:
        if device not in _loaders:
            raise DeviceError(
                f"device {device!r} is not available; this version runs on: {', '.join(sorted(_loaders))}"
            )
        found = _backends[device] = _loaders[device]()
    return found
