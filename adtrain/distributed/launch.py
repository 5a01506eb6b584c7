"""`--ranks N`: the command starts itself N times under the environment's mpiexec, and watches over the processes."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TextIO

from adtrain.core.errors import AdtrainError
from adtrain.distributed.mpi import ADVICE
from adtrain.distributed.watchdog import GRACE_SECONDS, Watchdog

ADDRESS, TOKEN = "ADTRAIN_WATCHDOG", "ADTRAIN_WATCHDOG_TOKEN"
"""The variables that tell a rank where its watchdog listens, and what to present to it."""
BANNER = (b"YOUR APPLICATION TERMINATED", b"This typically refers to a problem", b"Please see the FAQ page")
"""What MPICH's mpiexec prints when a process dies."""
DIED = 1
"""The exit code of a job in which a rank died or hung."""


def launch(ranks: int, arguments: Sequence[str], timeout: float, report: Callable[[str], None]) -> int:
    """Run `adtrain` with these arguments as `ranks` processes of this host; returns the exit code.

    SIGINT, SIGTERM and SIGHUP are passed on once to each rank; a second one kills them. `report` prints a line: which
    rank died or hung.

    Raises:
        AdtrainError: mpi4py or mpiexec is not installed.
    """
    command = [mpiexec(), "-disable-auto-cleanup", "-n", str(ranks), sys.executable, "-m", "adtrain", *arguments]
    reasons: list[str | None] = []
    over = threading.Event()

    def ended(line: str | None) -> None:
        reasons.append(line)
        over.set()

    token = secrets.token_hex(16)
    watchdog = Watchdog(ranks, timeout, token, ended)
    environment = {**os.environ, ADDRESS: f"127.0.0.1:{watchdog.port}", TOKEN: token}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_package(), os.environ.get("PYTHONPATH"))))
    # A session of its own: Ctrl-C reaches the launcher only, which passes it on once.
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    streams = (process.stdout, sys.stdout), (process.stderr, sys.stderr)
    forwarding = [threading.Thread(target=_forward, args=pair, daemon=True) for pair in streams]
    for thread in forwarding:
        thread.start()
    previous = _pass_on_signals(watchdog, process)
    try:
        while True:
            try:
                code = process.wait(0.05)
                break
            except subprocess.TimeoutExpired:
                if over.is_set():
                    code = _end(process, watchdog)
                    break
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    over.wait(0 if code in (0, 2) else GRACE_SECONDS)  # the watchdog may still have to say why
    for thread in forwarding:
        thread.join(1)
    for line in filter(None, reasons):
        report(f"adtrain: error: {line}")
    if watchdog.code is not None:
        return watchdog.code
    if any(reasons):
        return DIED
    return code if code >= 0 else 128 - code


def _end(process: subprocess.Popen[bytes], watchdog: Watchdog) -> int:
    """Wait for the ranks to end, then kill those that do not."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(2) or DIED
    watchdog.kill()
    with suppress(subprocess.TimeoutExpired):
        return process.wait(2) or DIED
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait() and DIED


def _pass_on_signals(watchdog: Watchdog, process: subprocess.Popen[bytes]) -> dict[int, signal._HANDLER]:
    seen: list[int] = []

    def handle(number: int, frame: object) -> None:
        seen.append(number)
        if len(seen) == 1:
            watchdog.send_signal(number)
        else:
            watchdog.kill()
            os.killpg(process.pid, signal.SIGKILL)

    return {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


def _forward(source: IO[bytes], stream: TextIO) -> None:
    """Copy a stream of the ranks, but not what mpiexec says of a process that died."""
    for line in source:
        if not line.startswith(BANNER):
            with suppress(OSError):
                stream.buffer.write(line)
                stream.flush()


def mpiexec() -> str:
    """The mpiexec beside this Python, or the first on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None or find_spec("mpi4py") is None:
        missing = "mpi4py" if found is not None else "mpiexec"
        raise AdtrainError(f"--ranks needs mpi4py and mpiexec; {missing} is not installed: {ADVICE}")
    return found


def _package() -> str:
    """The folder that the package is imported from, so that the ranks import the same one."""
    return str(Path(__file__).resolve().parents[2])
