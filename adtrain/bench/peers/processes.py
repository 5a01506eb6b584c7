"""Worker processes, one for each system, that are stopped by signal except while they work on a request."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adtrain.core.errors import AdtrainError


class WorkerFailed(AdtrainError):
    """A system could not do what was requested."""


class Unsupported(WorkerFailed):
    """A system has no counterpart of what was requested."""


class WorkerProcess:
    """A process that runs the main function of `adtrain.bench.peers.worker` for one system. It runs only between `send`
    and `receive`.

    Args:
        script: a file in place of that module, which calls this function.
    """

    def __init__(
        self, name: str, device: str, threads: int, autotune: str = "cached", script: Path | None = None
    ) -> None:
        run = ["-m", "adtrain.bench.peers.worker"] if script is None else [str(script)]
        self.name, self.device = name, device
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *run, name, device, str(threads), autotune],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **environment(device, threads, autotune)},
            start_new_session=True,  # its children are stopped and killed with it, as one process group
        )

    def ask(self, do: str, **details: Any) -> Any:
        """The answer to a request; see `adtrain.bench.peers.worker`. Raises WorkerFailed or Unsupported."""
        self.send(do, **details)
        return self.receive()

    def send(self, do: str, **details: Any) -> None:
        """Continue the process with a request, and do not wait for the answer."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # `receive` reports it
            self.process.stdin.write(json.dumps({"do": do, **details}) + "\n")
            self.process.stdin.flush()

    def receive(self) -> Any:
        """Wait for the answer to the last request, and stop the process. Raises WorkerFailed or Unsupported."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            last = last_line(self.errors.read().decode(errors="replace")) or "stderr is empty"
            raise WorkerFailed(f"{self.name}: the process ended early; {last}")
        self._signal(signal.SIGSTOP)
        (kind, content), *_ = json.loads(line).items()
        if kind == "answer":
            return content
        raise (Unsupported if kind == "unsupported" else WorkerFailed)(content)

    def close(self) -> None:
        """Kill the process and its children."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()  # type: ignore[union-attr]

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def last_line(*outputs: str) -> str:
    """The last line of the first of the outputs that has any text; empty if none has."""
    return next((output.strip().splitlines()[-1].strip() for output in outputs if output.strip()), "")


@contextlib.contextmanager
def started(
    names: Sequence[str], device: str, threads: int, autotune: str = "cached", script: Path | None = None
) -> Iterator[dict[str, WorkerProcess]]:
    """A worker for each system, killed when the block ends or fails. adtrain and torch.compile use `autotune`."""
    workers: dict[str, WorkerProcess] = {}
    try:
        for name in names:
            workers[name] = WorkerProcess(name, device, threads, autotune, script)
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def environment(device: str, threads: int, autotune: str = "cached") -> Mapping[str, str]:
    """Environment variables for all workers: the same number of threads, and no memory allocated in advance.

    With `autotune` "full", torch.compile searches as in its mode "max-autotune-no-cudagraphs".
    """
    pools = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    searches = ("TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING")
    return {
        **dict.fromkeys(pools, str(threads)),
        **(dict.fromkeys(searches, "1") if autotune == "full" else {}),
        "JAX_PLATFORMS": "cpu" if device == "cpu" else "cuda",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
    }
