"""`--ranks N`: the command starts itself N times on this host, and watches over the processes.

The watchdog ends all ranks of a job when one dies, fails or hangs, and says which. Each rank has a TCP connection to
it. It runs in the launcher, or else in rank 0. A connection that closes before the message `done` is a death. Every
second a rank sends a heartbeat: how many exchanges it has begun and ended. So the watchdog sees which rank the others
wait for. The watchdog sends heartbeats too: if it is in rank 0, and rank 0 hangs or is stopped, the others end. Seconds
in which the watching process itself is stopped do not count. None of this uses MPI or NCCL, where a call that waits for
a dead rank may never return.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from adtrain.distributed.environment import DIED
from adtrain.distributed.rendezvous import SECRET
from adtrain.signals import Handler, handled

BEAT_SECONDS = 1.0
"""The time between two heartbeats of a rank."""
TICK_SECONDS = 0.1
"""The longest time between two checks of the watchdog."""
GRACE_SECONDS = 1.0
"""How long the watchdog waits after a rank has reported an error. Rank 0 may have the same one, and prints its own."""


@dataclass
class _Rank:
    """What the watchdog knows of a rank."""

    connection: socket.socket
    last_heartbeat: float
    progressed_at: float  # when `entered` or `left` last changed
    rank: int = -1
    host: str = ""
    pid: int = 0
    buffer: bytes = b""
    entered: int = 0
    left: int = 0
    done: bool = False
    failed: str | None = None
    code: int = 0  # the exit code that it announced with the failure

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


class Watchdog:
    """Watches ranks from a thread.

    Args:
        ranks: their number.
        timeout: seconds without a heartbeat, or without joining an exchange that others wait for, after which a rank
            hangs.
        token: what a rank must present.
        ended: called with one line when the job has to end, and with None where rank 0 has printed the reason. Then
            the ranks are told to end.
        afterwards: called after that.
        address: where to listen.
    """

    def __init__(
        self,
        ranks: int,
        timeout: float,
        token: str,
        ended: Callable[[str | None], None],
        afterwards: Callable[[], None] = lambda: None,
        address: str = "127.0.0.1",
    ) -> None:
        self.ranks, self.timeout, self.token = ranks, timeout, token
        self.ended, self.afterwards = ended, afterwards
        self.listener = socket.create_server((address, 0))
        self.port: int = self.listener.getsockname()[1]
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.known: dict[socket.socket, _Rank] = {}
        self.failed_at: float | None = None
        self.over = False
        self.now = 0.0
        """Seconds in which this process ran, at the last check."""
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.thread.start()

    def end(self, line: str | None) -> None:
        """End all ranks, once."""
        with self.lock:
            if self.over:
                return
            self.over = True
        self.ended(line)  # first: when a rank ends, its launcher may kill this process
        self._send_to_all({"end": True})
        self.afterwards()

    def dismiss(self) -> None:
        """Tell all ranks to end, because rank 0 does."""
        with self.lock:
            self.over = True
        self._send_to_all({"end": True})

    @property
    def undecided(self) -> bool:
        """Whether the watchdog may still end the job: a rank has failed, or has not reported that it is done."""
        return any(rank.failed is not None or not rank.done for rank in list(self.known.values()))

    @property
    def code(self) -> int | None:
        """The exit code of the first rank that has failed; None if none has."""
        failed = [rank for rank in list(self.known.values()) if rank.failed is not None]
        return min(failed, key=lambda rank: rank.rank).code if failed else None

    def kill(self) -> None:
        """Kill the ranks of this host that are not done."""
        host = socket.gethostname()
        for rank in list(self.known.values()):
            if rank.host == host and rank.pid != os.getpid() and not rank.done:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.pid, signal.SIGKILL)

    def _send_to_all(self, message: dict[str, Any]) -> None:
        for rank in list(self.known.values()):
            if not rank.done:
                with suppress(OSError):
                    # A rank that is stopped reads nothing: do not wait until there is space.
                    rank.connection.send(json.dumps(message).encode() + b"\n", socket.MSG_DONTWAIT)

    def _run(self) -> None:
        checked_at, next_beat = monotonic(), 0.0
        while not self.over:
            ready = self.selector.select(TICK_SECONDS)
            self.now += min(monotonic() - checked_at, BEAT_SECONDS)
            checked_at = monotonic()
            if self.now >= next_beat:
                self._send_to_all({"beat": True})
                next_beat = self.now + BEAT_SECONDS
            for key, _ in ready:
                if key.fileobj is self.listener:
                    connection, _ = self.listener.accept()
                    self.known[connection] = _Rank(connection, self.now, self.now)
                    self.selector.register(connection, selectors.EVENT_READ)
                else:
                    self._read(self.known[key.fileobj])  # type: ignore[index]
            self._check()

    def _read(self, rank: _Rank) -> None:
        try:
            received = rank.connection.recv(1 << 16)
        except OSError:
            received = b""
        rank.last_heartbeat = self.now
        rank.buffer += received
        *lines, rank.buffer = rank.buffer.split(b"\n")
        for line in lines:
            self._handle(rank, line)
        if not received:
            self.selector.unregister(rank.connection)
            if rank.rank >= 0 and not rank.done and rank.failed is None:
                self.end(f"{rank.name} died; all ranks end")
            rank.done = True

    def _handle(self, rank: _Rank, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return
        if message.get("token") == self.token:
            rank.rank, rank.host, rank.pid = message["rank"], message["host"], message["pid"]
        if rank.rank < 0:
            return
        if (counts := message.get("beat")) is not None and counts != [rank.entered, rank.left]:
            (rank.entered, rank.left), rank.progressed_at = counts, self.now
        rank.done = rank.done or bool(message.get("done"))
        if (failed := message.get("failed")) is not None:
            rank.failed, rank.code, self.failed_at = failed, message["code"], self.failed_at or self.now

    def _check(self) -> None:
        now, ranks = self.now, [rank for rank in self.known.values() if rank.rank >= 0]
        failed = [rank for rank in ranks if rank.failed is not None]
        if self.failed_at is not None and (len(failed) == self.ranks or now - self.failed_at > GRACE_SECONDS):
            first = min(failed, key=lambda rank: rank.rank)
            self.end(None if first.rank == 0 else f"{first.name}: {first.failed}")
            return
        working = [rank for rank in ranks if not rank.done and rank.failed is None]
        for rank in working:
            if now - rank.last_heartbeat > self.timeout:
                self.end(f"{rank.name} has not answered for {self.timeout:g} s; all ranks end")
                return
        waiting = [rank for rank in working if rank.entered > rank.left and now - rank.progressed_at > self.timeout]
        late = [rank for rank in ranks if rank.entered < max((other.entered for other in waiting), default=0)]
        if late:
            first = min(late, key=lambda rank: rank.entered)
            self.end(f"{first.name} has not come to an exchange for {self.timeout:g} s; all ranks end")


class WatchdogClient:
    """This rank's connection to the watchdog.

    Args:
        counts: returns the numbers of exchanges begun and ended.
        end: called when the watchdog ends the job; must not return.
        patience: seconds without a message from the watchdog after which `silent` is called.
        silent: called when the watchdog's process hangs or is stopped; must not return. None if that is no fault: a
            user may stop a launcher for a while.

    Attributes:
        over: set when the watchdog has ended the job, or is gone.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        rank: int,
        counts: Callable[[], tuple[int, int]],
        end: Callable[[], None],
        patience: float,
        silent: Callable[[], None] | None,
    ) -> None:
        self.counts, self.end, self.patience, self.silent = counts, end, patience, silent
        self.done, self.over = threading.Event(), threading.Event()
        self.connection = socket.create_connection(address, timeout=60)
        self.connection.settimeout(None)
        self.lock = threading.Lock()
        self.send(token=token, rank=rank, host=socket.gethostname(), pid=os.getpid())
        for target in (self._send_heartbeats, self._wait_for_end):
            threading.Thread(target=target, name="watched", daemon=True).start()

    def send(self, **message: Any) -> None:
        with self.lock, suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Tell the watchdog that this rank is done."""
        self.done.set()
        self.send(done=True)

    def _send_heartbeats(self) -> None:
        while not self.done.wait(BEAT_SECONDS):
            self.send(beat=self.counts())

    def _wait_for_end(self) -> None:
        received, waited = b"", 0.0  # only seconds in which this process ran
        with suppress(OSError):
            while b'"end"' not in received:
                if select.select([self.connection], [], [], TICK_SECONDS)[0]:
                    part, waited = self.connection.recv(1 << 12), 0.0
                    if not part:
                        break
                    received = (received + part)[-64:]
                else:
                    waited += TICK_SECONDS
                    if waited > self.patience and self.silent is not None and not self.done.is_set():
                        self.silent()
        self.over.set()
        if not self.done.is_set():  # told to end, or the watchdog is gone
            self.end()


ADDRESS, TOKEN = "ADTRAIN_WATCHDOG", "ADTRAIN_WATCHDOG_TOKEN"
"""The variables that tell a rank where its watchdog listens, and what to present to it."""
POLL_SECONDS = 0.05
"""How often the processes are polled."""
END_SECONDS = 2.0
"""How long processes may take to end before they are killed."""


def launch(ranks: int, arguments: Sequence[str], timeout: float, report: Callable[[str], None]) -> int:
    """Run `adtrain` with these arguments as `ranks` processes of this host; returns the exit code.

    SIGINT, SIGTERM and SIGHUP are passed on once to each rank; a second one kills them. `report` prints a line: which
    rank died or hung.
    """
    reasons: list[str | None] = []
    over = threading.Event()

    def ended(line: str | None) -> None:
        reasons.append(line)
        over.set()

    token = secrets.token_hex(16)
    watchdog = Watchdog(ranks, timeout, token, ended)
    variables = {ADDRESS: f"127.0.0.1:{watchdog.port}", TOKEN: token}
    processes = start(ranks, [sys.executable, "-m", "adtrain", *arguments], variables)
    first_dead = math.inf
    with handled(_passing_on(processes)):
        while any(process.poll() is None for process in processes) and not over.wait(POLL_SECONDS):
            if dead := _dead_early(processes, watchdog):
                first_dead = min(first_dead, monotonic())
                if monotonic() - first_dead > GRACE_SECONDS:  # others may have the same error
                    watchdog.end(None if 0 in dead else f"rank {dead[0]} has ended before the training began")
        codes = end(processes)
    deadline = monotonic() + GRACE_SECONDS  # until then the watchdog may report a reason
    while any(codes) and watchdog.undecided and monotonic() < deadline and not over.wait(POLL_SECONDS):
        pass
    for line in filter(None, reasons):
        report(f"adtrain: error: {line}")
    if watchdog.code is not None:
        return watchdog.code
    if any(reasons):
        return DIED
    first = next(filter(None, codes), 0)
    return first if first >= 0 else 128 - first


def _dead_early(processes: Sequence[subprocess.Popen[Any]], watchdog: Watchdog) -> list[int]:
    """The ranks that have failed before they came to the watchdog."""
    known = [rank.pid for rank in list(watchdog.known.values())]
    return [i for i, process in enumerate(processes) if process.poll() and process.pid not in known]


def start(
    ranks: int, command: Sequence[str], environment: Mapping[str, str], **options: Any
) -> list[subprocess.Popen[Any]]:
    """Start a command as `ranks` processes of this host, which meet over TCP.

    Args:
        environment: more variables.
        options: of Popen.
    """
    shared = {**os.environ, **environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), SECRET: secrets.token_hex(16)}
    package = str(Path(__file__).resolve().parents[2])  # so that the ranks import the same one
    shared["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    # Sessions of their own: Ctrl-C reaches the launcher only, which passes it on once.
    return [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )
        for rank in range(ranks)
    ]


def end(processes: Sequence[subprocess.Popen[Any]]) -> list[int]:
    """Wait for processes that are about to end, kill those that do not, and return the exit codes."""
    deadline = monotonic() + END_SECONDS
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - monotonic()))
    _kill(processes)
    return [process.wait() for process in processes]


def _kill(processes: Sequence[subprocess.Popen[Any]]) -> None:
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _passing_on(processes: Sequence[subprocess.Popen[Any]]) -> Handler:
    """A handler that passes signals on to the processes, and kills them at the second one."""
    seen: list[int] = []

    def handle(number: int, frame: object) -> None:
        seen.append(number)
        if len(seen) > 1:
            _kill(processes)
        for process in processes:
            process.send_signal(number)

    return handle


def _free_port() -> int:
    """A port that is free; rank 0 takes one of those after it if another process is quicker."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
