"""A rank's membership in a job of several: the communicator, the watchdog, and how a rank ends."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from adtrain.core import communicator
from adtrain.core.errors import AdtrainError
from adtrain.distributed.communicators import MpiCommunicator, TcpCommunicator, version
from adtrain.distributed.environment import DIED, Place
from adtrain.distributed.launch import ADDRESS, GRACE_SECONDS, TOKEN, Watchdog, WatchdogClient
from adtrain.distributed.rendezvous import meeting


class Session:
    """A rank of a job.

    Args:
        report: prints a line, on any rank.

    Attributes:
        ranks: the communicator.
    """

    def __init__(self, process: Place, timeout: float, report: Callable[[str], None]) -> None:
        self.process, self.timeout, self.report = process, timeout, report
        self.watchdog: Watchdog | None = None
        with self._limited("start", _kill_this):
            self.ranks = connected(process, timeout)
            self.watchdog_client = self._watch()

    def _watch(self) -> WatchdogClient:
        """Connect to the launcher's watchdog; without one, to a watchdog in rank 0."""
        with communicator.using(self.ranks):
            address, token = os.environ.get(ADDRESS), os.environ.get(TOKEN, "")
            launched = address is not None
            if not launched and self.ranks.rank == 0:
                token = secrets.token_hex(16)
                self.watchdog = Watchdog(self.ranks.size, self.timeout, token, self._ended, self._end, "")
                address = f"{socket.gethostname()}:{self.watchdog.port}"
            address, token, pid = json.loads(communicator.gathered_texts(json.dumps([address, token, os.getpid()]))[0])
        host, port = address.rsplit(":", 1)
        silent = None if launched or self.watchdog is not None else lambda: self._first_is_silent(host, pid)
        here = "127.0.0.1" if host == socket.gethostname() else host
        ranks = self.ranks
        return WatchdogClient(
            (here, int(port)),
            token,
            ranks.rank,
            lambda: (ranks.entered, ranks.left),
            _exit_now if self.watchdog is None else lambda: None,  # a watchdog here ends the job, then this process
            self.timeout + self._later,
            silent,
        )

    @property
    def _later(self) -> float:
        """How long this rank leaves it to those before it to report that another one hangs."""
        return GRACE_SECONDS * min(self.process.rank, 2)

    def _first_is_silent(self, host: str, pid: int) -> None:
        """Rank 0, which has the watchdog, hangs or is stopped."""
        self.report(f"adtrain: error: rank 0 on {host} has not answered for {self.timeout:g} s; all ranks end")
        if host == socket.gethostname():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _exit_now()

    @contextmanager
    def _limited(self, what: str, end: Callable[[], None]) -> Iterator[None]:
        """End this process if it waits too long for the other ranks in a block that no watchdog watches."""

        def give_up() -> None:
            name = f"rank {self.process.rank} on {socket.gethostname()}"
            self.report(
                f"adtrain: error: {name} waited {self.timeout:g} s for the {what} of other ranks; all ranks end"
            )
            end()

        timer = threading.Timer(self.timeout + self._later, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Leave the job, after this rank's work."""
        self.watchdog_client.close()
        with self._limited("end", _exit_now):
            self.ranks.close()

    def _ended(self, line: str | None) -> None:
        """The watchdog in this process has ended the job."""
        if line is not None:
            self.report(f"adtrain: error: {line}")

    def _end(self) -> None:
        """The watchdog in this process has told all ranks to end."""
        assert self.watchdog is not None
        self.watchdog.kill()
        _exit_now(self.watchdog.code or DIED)

    def fail(self, message: str, code: int) -> NoReturn:
        """End this process and all others after an error of this rank."""
        self.watchdog_client.done.set()
        self.watchdog_client.send(failed=message.removeprefix("adtrain: "), code=code)
        if self.ranks.rank == 0:
            if self.watchdog is not None:
                self.watchdog.dismiss()
        else:
            self.watchdog_client.over.wait(self.timeout)  # until the message, or rank 0's own, is printed
        _exit_now(code)


def connected(process: Place, timeout: float) -> MpiCommunicator | TcpCommunicator:
    """The communicator of a process that a launcher has started: TCP where MASTER_ADDR says where to meet, else MPI.

    A step of Slurm meets over TCP if MPI is missing, or is not the one of Slurm and finds one process.

    Raises:
        AdtrainError: MPI does not know all processes, or some do not come within `timeout` seconds.
    """
    where = meeting(os.environ, process.size)
    if "MASTER_ADDR" not in os.environ:
        try:
            ranks = MpiCommunicator()
            if (ranks.rank, ranks.size) == (process.rank, process.size):
                return ranks
            ranks.close()
            problem = AdtrainError(
                f"{process.launcher} started {process.size} processes, but mpi4py uses {version()}, which finds "
                f"{ranks.size}: use the mpiexec of that library, or --ranks, which needs no MPI"
            )
        except AdtrainError as error:
            problem = error
        if where is None:
            raise problem
    assert where is not None
    return TcpCommunicator(where, process.rank, process.size, timeout)


def _exit_now(code: int = DIED) -> NoReturn:
    """End the process without MPI's clean-up, which would wait for ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, RuntimeError, ValueError):
            stream.flush()
    os._exit(code)


def _kill_this() -> None:
    """End the process by a signal: before MPI has started, mpiexec ends the other ranks for no exit code."""
    os.kill(os.getpid(), signal.SIGKILL)
