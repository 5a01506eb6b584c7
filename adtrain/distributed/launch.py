"""`--ranks N`: the command starts itself N times on this host, and watches over the processes."""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from adtrain.distributed.environment import DIED
from adtrain.distributed.rendezvous import SECRET
from adtrain.distributed.watchdog import GRACE_SECONDS, Watchdog
from adtrain.signals import Handler, handled

ADDRESS, TOKEN = "ADTRAIN_WATCHDOG", "ADTRAIN_WATCHDOG_TOKEN"
"""The variables that tell a rank where its watchdog listens, and what to present to it."""
TICK_SECONDS = 0.05
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
        while any(process.poll() is None for process in processes) and not over.wait(TICK_SECONDS):
            if dead := _dead_early(processes, watchdog):
                first_dead = min(first_dead, monotonic())
                if monotonic() - first_dead > GRACE_SECONDS:  # others may have the same error
                    watchdog.end(None if 0 in dead else f"rank {dead[0]} has ended before the training began")
        codes = end(processes)
    deadline = monotonic() + GRACE_SECONDS  # until then the watchdog may report a reason
    while any(codes) and watchdog.undecided and monotonic() < deadline and not over.wait(TICK_SECONDS):
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
