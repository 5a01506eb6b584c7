"""How a call of a library stands beside a kernel: as a candidate, and as work that is put on a stream."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from adtrain.core.errors import AdtrainError, DeviceError
from adtrain.core.program import Equation
from adtrain.passes.arena import ALIGNMENT
from adtrain.passes.plan_memory import nbytes

CHOICES = 3
"""Of a library's ways to compute something, the ones it ranks first, so many are candidates."""

WORKSPACE = 32 << 20
"""Bytes that a call may need beside a copy of each of its operands."""

WORKSPACE_ALIGNMENT = 256
"""Of a workspace's address, in bytes."""


class NotOffered(DeviceError):
    """The library has no such choice for the problem."""


class Plan(NamedTuple):
    """One way to compute an operation, made ready.

    Attributes:
        workspace: bytes of device memory for its own use.
        enqueue: puts the work on a stream, which may be recording: given the addresses of the equation's inputs and
            outputs, that of the workspace, and the stream's handle.
    """

    workspace: int
    enqueue: Callable[[Sequence[int], int, int], object]


class Library(Protocol):
    """A library that computes some equations."""

    name: str
    """With its version: measured times hold for it alone."""

    def problem(self, equation: Equation) -> Hashable | None:
        """What the library is asked to compute; None where it does not compute the equation as precisely as asked."""
        ...

    def plan(self, equation: Equation, choice: int) -> Plan:
        """The library's ``choice``-th way, by its own ranking, made once for each problem.

        Raises:
            NotOffered: it has fewer.
            DeviceError: it cannot be loaded, or fails.
        """
        ...


@dataclass(frozen=True, eq=False)
class LibraryCall:
    """A candidate for an equation, beside `CudaKernel`."""

    library: Library
    equation: Equation
    choice: int

    @property
    def label(self) -> str:
        return f"{self.library.name} choice={self.choice}"

    @property
    def scratch(self) -> int:
        """Bytes of the equation's scratch, which is aligned less than a workspace is."""
        workspace = self.library.plan(self.equation, self.choice).workspace
        return workspace + WORKSPACE_ALIGNMENT - ALIGNMENT if workspace else 0

    def prepare(self) -> None:
        """Make the library's plan.

        Raises:
            NotOffered: there is none.
            DeviceError: the library cannot be loaded, or fails.
        """
        self.library.plan(self.equation, self.choice)

    def enqueue(self, addresses: Sequence[int], scratch: int, stream: int) -> None:
        """Put the work on a stream.

        Raises:
            DeviceError: the library refuses.
        """
        with translated(self.library):
            workspace = -(-scratch // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
            self.library.plan(self.equation, self.choice).enqueue(addresses, workspace, stream)


def calls(equation: Equation, libraries: Sequence[Library]) -> list[LibraryCall]:
    """The candidates that libraries have for an equation."""
    if not all(v.size for v in (*equation.inputs, *equation.outputs)):
        return []
    able = [library for library in libraries if library.problem(equation) is not None]
    return [LibraryCall(library, equation, choice) for library in able for choice in range(CHOICES)]


def workspace_limit(equation: Equation) -> int:
    """Bytes of workspace, at most: each operand may be laid out anew."""
    return WORKSPACE + sum(map(nbytes, (*equation.inputs, *equation.outputs)))


@contextmanager
def translated(library: Library) -> Iterator[None]:
    """Whatever a library's package raises, as an error of ours in a line."""
    try:
        yield
    except AdtrainError:
        raise
    except Exception as error:  # each package has its own, without a common base
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeviceError(f"device gpu: {library.name}: {first}") from None
