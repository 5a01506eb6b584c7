"""What the ranks of a job do together, also if there is only one: join, agree on results and errors, and end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from adtrain.core import communicator
from adtrain.core.errors import AdtrainError
from adtrain.distributed.environment import DIED, place

if TYPE_CHECKING:
    from adtrain.distributed.session import Session

T = TypeVar("T")
INTERRUPTED = 130
"""The exit code after SIGINT."""


@contextmanager
def joined(
    timeout: float, report: Callable[[str], None], describe: Callable[[Exception], tuple[str, int]]
) -> Iterator[Session | None]:
    """Let this process be a rank of its job in a block; None for a process that is alone.

    An exception that leaves the block ends all ranks, unless it is raised by all of them (`agreed`).

    Args:
        timeout: seconds after which a rank that does not answer is considered to hang.
        report: prints a line.
        describe: the message and the exit code for an exception.
    """
    process = place(os.environ)
    if process is None or process.size == 1:
        yield None
        return
    from adtrain.distributed.session import Session  # it imports sockets and secrets

    session = Session(process, timeout, report)
    try:
        with communicator.using(session.ranks):
            yield session
    except (AgreedError, AgreedExit):
        session.close()
        raise
    except KeyboardInterrupt:
        if session.ranks.rank == 0:
            report("adtrain: interrupted")
        session.fail("interrupted", INTERRUPTED)
    except SystemExit as error:  # SIGTERM or SIGHUP
        session.fail("interrupted", error.code if isinstance(error.code, int) and error.code else DIED)
    except Exception as error:
        message, code = describe(error)
        if session.ranks.rank == 0:
            report(message)
        session.fail(message, code)
    session.close()


class AgreedError(AdtrainError):
    """An error that all ranks raise. Rank 0 prints it."""

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(str(self).splitlines())


class AgreedExit(SystemExit):
    """The end of the command, which all ranks raise with the same exit code."""


def agreed(function: Callable[[], T]) -> T:
    """The result of `function`, which exchanges nothing, if it succeeds on all ranks.

    Raises:
        AgreedError: it failed on a rank; the message is that of rank 0, or names the first rank that failed.
    """
    ranks = communicator.current()
    if ranks.size == 1:
        return function()
    problem, result = "", None
    try:
        result = function()
    except AdtrainError as error:
        problem = "\n".join(error.lines)
    problems = communicator.gathered_texts(problem)
    if any(problems):
        rank = next(i for i, text in enumerate(problems) if text)
        raise AgreedError(problems[rank] if rank == 0 else f"rank {rank}: {problems[rank]}")
    return result  # type: ignore[return-value]


def same_everywhere(values: Callable[[], dict[str, str]]) -> None:
    """Check that all ranks have the same values, such as the text of the config. With one rank `values` is not called.

    Raises:
        AgreedError: a rank has another value than rank 0; shows the first lines that differ.
    """
    if communicator.current().size == 1:
        return
    own = json.dumps([os.uname().nodename, values()])
    by_rank = [json.loads(text) for text in communicator.gathered_texts(own)]
    for rank, (host, others) in enumerate(by_rank):
        for name, expected in by_rank[0][1].items():
            if others[name] != expected:
                ours, theirs = _first_difference(expected, others[name])
                raise AgreedError(
                    f"rank {rank} on {host} has another {name} than rank 0: found {theirs}, expected {ours}"
                )


def _first_difference(expected: str, other: str) -> tuple[str, str]:
    both = expected.splitlines() or [""], other.splitlines() or [""]
    pairs = enumerate(zip(*both, strict=False))
    first = next((i for i, (line, other_line) in pairs if line != other_line), min(map(len, both)))
    return tuple(repr(lines[first].strip()) if first < len(lines) else "nothing" for lines in both)  # type: ignore[return-value]
