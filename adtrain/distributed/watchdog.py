"""Ends all ranks of a job when one dies, fails or hangs, and says which.

Each rank has a TCP connection to the watchdog, which runs in the launcher, or else in rank 0. A connection that closes
before the message `done` is a death. Every second a rank sends a heartbeat: how many exchanges it has begun and ended.
So the watchdog sees which rank the others wait for. None of this uses MPI or NCCL, where a call that waits for a dead
rank may never return.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

BEAT_SECONDS = 1.0
"""The time between two heartbeats of a rank."""
TICK_SECONDS = 0.1
"""The longest time between two checks of the watchdog."""
GRACE_SECONDS = 1.0
"""How long after the report of an error the watchdog waits for others: rank 0 prints its own."""


@dataclass
class _Rank:
    """What the watchdog knows of a rank."""

    connection: socket.socket
    rank: int = -1
    host: str = ""
    pid: int = 0
    buffer: bytes = b""
    last_heartbeat: float = field(default_factory=monotonic)
    entered: int = 0
    left: int = 0
    moved: float = field(default_factory=monotonic)  # when `entered` or `left` last changed
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
        self.lock = threading.Lock()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def end(self, line: str | None) -> None:
        """End all ranks, once."""
        with self.lock:
            if self.over:
                return
            self.over = True
        self.ended(line)  # first: when a rank ends, its launcher may kill this process
        self._tell({"end": True})
        self.afterwards()

    def dismiss(self) -> None:
        """Tell all ranks to end, because rank 0 does."""
        with self.lock:
            self.over = True
        self._tell({"end": True})

    @property
    def code(self) -> int | None:
        """The exit code of rank 0, if it has failed."""
        return next((x.code for x in self.known.values() if x.rank == 0 and x.failed is not None), None)

    def kill(self) -> None:
        """Kill the ranks of this host that are not done."""
        host = socket.gethostname()
        for rank in list(self.known.values()):
            if rank.host == host and rank.pid != os.getpid() and not rank.done:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.pid, signal.SIGKILL)

    def _tell(self, what: dict[str, Any]) -> None:
        for rank in list(self.known.values()):
            if not rank.done:
                with suppress(OSError):
                    rank.connection.sendall(json.dumps(what).encode() + b"\n")

    def _run(self) -> None:
        while not self.over:
            for key, _ in self.selector.select(TICK_SECONDS):
                if key.fileobj is self.listener:
                    connection, _ = self.listener.accept()
                    self.known[connection] = _Rank(connection)
                    self.selector.register(connection, selectors.EVENT_READ)
                else:
                    self._read(self.known[key.fileobj])  # type: ignore[index]
            self._check()

    def _read(self, rank: _Rank) -> None:
        try:
            received = rank.connection.recv(1 << 16)
        except OSError:
            received = b""
        rank.last_heartbeat = monotonic()
        rank.buffer += received
        *lines, rank.buffer = rank.buffer.split(b"\n")
        for line in lines:
            self._hear(rank, line)
        if not received:
            self.selector.unregister(rank.connection)
            if rank.rank >= 0 and not rank.done and rank.failed is None:
                self.end(f"{rank.name} died; all ranks end")
            rank.done = True

    def _hear(self, rank: _Rank, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return
        if message.get("token") == self.token:
            rank.rank, rank.host, rank.pid = message["rank"], message["host"], message["pid"]
        if rank.rank < 0:
            return
        if (found := message.get("beat")) is not None and found != [rank.entered, rank.left]:
            (rank.entered, rank.left), rank.moved = found, monotonic()
        rank.done = rank.done or bool(message.get("done"))
        if (failed := message.get("failed")) is not None:
            rank.failed, rank.code, self.failed_at = failed, message["code"], self.failed_at or monotonic()

    def _check(self) -> None:
        now, ranks = monotonic(), [x for x in self.known.values() if x.rank >= 0]
        if self.failed_at is not None and now - self.failed_at > GRACE_SECONDS:
            failed = [x for x in ranks if x.failed is not None]
            first = min(failed, key=lambda x: x.rank)
            self.end(None if first.rank == 0 else f"{first.name}: {first.failed}")
            return
        working = [x for x in ranks if not x.done and x.failed is None]
        for rank in working:
            if now - rank.last_heartbeat > self.timeout:
                self.end(f"{rank.name} has not answered for {self.timeout:g} s; all ranks end")
                return
        waiting = [x for x in working if x.entered > x.left and now - x.moved > self.timeout]
        late = [x for x in ranks if x.entered < max((y.entered for y in waiting), default=0)]
        if late:
            first = min(late, key=lambda x: x.entered)
            self.end(f"{first.name} has not come to an exchange for {self.timeout:g} s; all ranks end")


class Watched:
    """This rank's connection to the watchdog.

    Args:
        counts: returns the numbers of exchanges begun and ended.
        end: called when the watchdog ends the job; must not return.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        rank: int,
        counts: Callable[[], tuple[int, int]],
        end: Callable[[], None],
    ) -> None:
        self.counts, self.end, self.done = counts, end, threading.Event()
        self.connection = socket.create_connection(address, timeout=60)
        self.connection.settimeout(None)
        self.lock = threading.Lock()
        self.say(token=token, rank=rank, host=socket.gethostname(), pid=os.getpid())
        for target in (self._beat, self._listen):
            threading.Thread(target=target, name="watched", daemon=True).start()

    def say(self, **what: Any) -> None:
        with self.lock, suppress(OSError):
            self.connection.sendall(json.dumps(what).encode() + b"\n")

    def close(self) -> None:
        """Tell the watchdog that this rank is done."""
        self.done.set()
        self.say(done=True)

    def _beat(self) -> None:
        while not self.done.wait(BEAT_SECONDS):
            self.say(beat=self.counts())

    def _listen(self) -> None:
        with suppress(OSError), self.connection.makefile("rb") as lines:
            for line in lines:
                if json.loads(line).get("end"):
                    break
        if not self.done.is_set():  # told to end, or the watchdog is gone
            self.end()
