"""Library calls as candidates, and as work on a stream."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from adtrain.core.errors import AdtrainError, DeviceError
from adtrain.core.program import Equation
from adtrain.passes.plan_memory import ALIGNMENT

CHOICES = 3
"""Candidates of a library for one problem: the algorithms that it ranks first."""

WORKSPACE = 32 << 20
"""Bytes of workspace that a call may need, in addition to a copy of each operand."""

WORKSPACE_ALIGNMENT = 256
"""Bytes that a workspace's address is a multiple of."""


class NotOffered(DeviceError):
    """The library offers fewer algorithms for the problem."""


class Plan(NamedTuple):
    """One algorithm for a problem, ready to run.

    Attributes:
        workspace: bytes of device memory that it needs.
        enqueue: puts the work on a stream, which may be captured. Arguments: the addresses of the equation's inputs and
            outputs, the address of the workspace, and the stream's handle.
    """

    workspace: int
    enqueue: Callable[[Sequence[int], int, int], object]


class Library(Protocol):
    """A library that computes some equations."""

    name: str
    """Name and version, for which measured times are valid."""

    def problem(self, equation: Equation) -> Hashable | None:
        """A key of the problem; None where the library does not compute the equation in the requested precision."""
        ...

    def plan(self, equation: Equation, choice: int) -> Plan:
        """The algorithm at position ``choice`` of the library's ranking. A problem's plans are made once.

        Raises:
            NotOffered: the ranking is shorter.
            DeviceError: the library cannot be loaded, or fails.
        """
        ...


@dataclass(frozen=True, eq=False)
class LibraryCall:
    """A candidate for an equation: a plan of a library. See `CudaKernel` for the other kind."""

    library: Library
    equation: Equation
    choice: int

    @property
    def label(self) -> str:
        return f"{self.library.name} choice={self.choice}"

    @property
    def scratch(self) -> int:
        """Bytes of the equation's scratch: the workspace, and what it takes to align it, as scratch is aligned less."""
        workspace = self.library.plan(self.equation, self.choice).workspace
        return workspace + WORKSPACE_ALIGNMENT - ALIGNMENT if workspace else 0

    def prepare(self) -> None:
        """Make the library's plan.

        Raises:
            NotOffered: see `Library.plan`.
            DeviceError: the library cannot be loaded, or fails.
        """
        self.library.plan(self.equation, self.choice)

    def enqueue(self, addresses: Sequence[int], scratch: int, stream: int) -> None:
        """Put the work on a stream.

        Raises:
            DeviceError: the library fails.
        """
        with translated(self.library):
            workspace = -(-scratch // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
            self.library.plan(self.equation, self.choice).enqueue(addresses, workspace, stream)


def calls(equation: Equation, libraries: Sequence[Library]) -> list[LibraryCall]:
    """The candidates of the libraries for an equation."""
    if not all(v.size for v in (*equation.inputs, *equation.outputs)):
        return []
    able = [library for library in libraries if library.problem(equation) is not None]
    return [LibraryCall(library, equation, choice) for library in able for choice in range(CHOICES)]


def workspace_limit(equation: Equation) -> int:
    """The most bytes of workspace: a call may convert the layout of each operand."""
    return WORKSPACE + sum(v.nbytes for v in (*equation.inputs, *equation.outputs))


@contextmanager
def translated(library: Library) -> Iterator[None]:
    """Translates what a library's package raises to DeviceError, in one line."""
    try:
        yield
    except AdtrainError:
        raise
    except Exception as error:  # each package has errors of its own, without a common base
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeviceError(f"device gpu: {library.name}: {first}") from None
