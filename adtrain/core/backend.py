"""Backend: the interface that a device implements to run primitives and Programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

from adtrain.core.devices import Transfers, find_device
from adtrain.core.errors import DeviceError
from adtrain.core.primitive import Primitive
from adtrain.core.program import Program
from adtrain.core.types import ArrayType


class Memory(NamedTuple):
    """Bytes that a Program needs while it runs, besides its arguments."""

    values: int  # peak for constants, intermediate values, and results that do not overwrite an argument
    separate: int  # the same if no two values shared memory
    scratch: int  # temporary memory of the kernels, of all threads


class KernelRun(NamedTuple):
    """A kernel that runs for an equation.

    ``launch`` has the number of threads; on a GPU grid, block and dynamic shared memory (bytes). It is empty where
    NumPy runs.
    """

    name: str
    launch: Mapping[str, Any]


class Executable(Protocol):
    """A compiled Program.

    Attributes:
        memory: what it needs while it runs.
        kernels: for each equation its kernels in order of launch; none for a view.
        repeats: the Program `carries`, and its results overwrite the donated inputs. So it can run several times on the
            same buffers.
    """

    memory: Memory
    repeats: bool

    @property
    def kernels(self) -> Sequence[Sequence[KernelRun]]: ...

    @property
    def lowered(self) -> Any:
        """The chosen kernels and the memory plan, for `compile` in another process; None if they cannot be kept."""
        ...

    @property
    def ready(self) -> bool:
        """Whether `finish` need not wait for a compiler."""
        ...

    def finish(self) -> None:
        """Wait until the kernels are compiled. `run` does the same."""
        ...

    def run(self, buffers: list[Any], timed: bool = False, times: int = 1) -> tuple[Sequence[Any], Sequence[float]]:
        """Run the Program.

        Args:
            buffers: of the inputs. Those of donated inputs may be overwritten.
            timed: measure the time of each equation.
            times: how many runs, each on the results of the one before; more than 1 only if it `repeats`.

        Returns:
            The buffers of the outputs, and the seconds of each equation (empty unless ``timed``).
        """
        ...


class Backend(Transfers, Protocol):
    """A device: its memory, and how it runs primitives and Programs.

    Attributes:
        overlaps_exchanges: whether kernels run while ranks exchange data.
    """

    name: str
    overlaps_exchanges: bool

    def run(
        self, primitive: Primitive, buffers: Sequence[Any], params: Mapping[str, Any], outputs: Sequence[ArrayType]
    ) -> Sequence[Any]:
        """Run ``primitive`` on ``buffers``; returns one buffer for each of ``outputs``."""
        ...

    def fuse(self, program: Program) -> Program:
        """``program`` after this device's fusion passes."""
        ...

    def fuse_region(self, program: Program) -> Program:
        """``program``, a part between two exchanges, after the fusion passes that only such parts have."""
        ...

    def fuse_exchanges(self, program: Program) -> Program:
        """``program`` with exchanges and updates in shared launches, as far as the device runs them.

        All ranks call it.
        """
        ...

    def compile(self, program: Program, lowered: Any = None) -> Executable:
        """``program`` compiled for this device.

        With `lowered`, the `Executable.lowered` of the same Program, kernels and memory plan are not chosen again.
        """
        ...

    def lowering_key(self) -> str | None:
        """What passes and kernel choices depend on besides the Program; None if their result must not be cached."""
        ...

    def memory(self, program: Program) -> Memory:
        """The memory that ``program`` needs once compiled. Compiles and allocates nothing."""
        ...

    def available(self) -> int | None:
        """Bytes that this process can use for arrays and Programs, including those in use; None if unknown."""
        ...

    def allocated(self) -> int | None:
        """Bytes of the device that this process has allocated for arrays and Programs; None if unknown."""
        ...

    def synchronize(self) -> None:
        """Wait until all work that was started is complete."""
        ...

    def side_by_side(self, count: int) -> AbstractContextManager[Sequence[Callable[[], AbstractContextManager[None]]]]:
        """A context with up to `count` functions; none if the device runs one Program at a time.

        Within the context that such a function returns, work is started that does not wait for the work of the others,
        and must not use their arrays. Work before the outer context is complete when it begins, and all work in it when
        it ends.
        """
        ...

    def device_name(self) -> str:
        """The product name of the device."""
        ...

    def identity(self) -> str:
        """The device, and its driver or compiler. Measured times are valid for one identity."""
        ...

    def compiler_name(self) -> str:
        """The compiler of Programs, with version and options; without a compiler, the reason."""
        ...


def usable_device(device: str) -> str:
    """The name of the device that ``device`` stands for: itself, or for "auto" the GPU if there is one, else the CPU.

    Raises:
        DeviceError: the device is not available.
    """
    try:
        backend("gpu" if device == "auto" else device)
    except DeviceError:
        if device != "auto":
            raise
        return "cpu"
    return "gpu" if device == "auto" else device


def backend(device: str) -> Backend:
    """The backend of ``device``.

    Raises:
        DeviceError: the device is not available.
    """
    return cast(Backend, find_device(device))
