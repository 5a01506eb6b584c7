"""Processes that take turns: each answers a question with a line of JSON, and is stopped while another one works."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from adtrain.core.errors import AdtrainError


class SideFailed(AdtrainError):
    """A side cannot do what it was asked for."""


class SideSkips(SideFailed):
    """A side has no counterpart for what it was asked for."""


class Side:
    """A process that runs `adtrain.bench.peers.side` for one peer. It may work from a question to the answer only."""

    def __init__(self, name: str, device: str, threads: int, autotune: str = "cached") -> None:
        self.name, self.device = name, device
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "adtrain.bench.peers.side", name, device, str(threads), autotune],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, **environment(device, threads)},
            start_new_session=True,  # with the processes that it starts, it is stopped and ended as a group
        )

    def ask(self, do: str, **details: Any) -> Any:
        """The answer to a question; see `adtrain.bench.peers.side`. Raises SideFailed or SideSkips, which say why."""
        self.tell(do, **details)
        return self.answer()

    def tell(self, do: str, **details: Any) -> None:
        """Let the side go on with a question."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            self.process.stdin.write(json.dumps({"do": do, **details}) + "\n")
            self.process.stdin.flush()

    def answer(self) -> Any:
        """What it answers to the last question. It is stopped then."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SideFailed(f"{self.name}: the process ended early; {self._last_words()}")
        self._signal(signal.SIGSTOP)
        (kind, found), *_ = json.loads(line).items()
        if kind == "answer":
            return found
        raise (SideSkips if kind == "skips" else SideFailed)(found)

    def close(self) -> None:
        """End the process and those it has started."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()  # type: ignore[union-attr]

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _last_words(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


@contextlib.contextmanager
def started(names: Sequence[str], device: str, threads: int, autotune: str = "cached") -> Iterator[dict[str, Side]]:
    """A side for each of the peers, until the block ends, in whatever way. `autotune` is for adtrain's own."""
    sides: dict[str, Side] = {}
    try:
        for name in names:
            sides[name] = Side(name, device, threads, autotune)
        yield sides
    finally:
        for side in sides.values():
            side.close()


def environment(device: str, threads: int) -> Mapping[str, str]:
    """What the libraries of all sides read: as many threads for each, and no memory taken before it is needed."""
    pools = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {
        **dict.fromkeys(pools, str(threads)),
        "JAX_PLATFORMS": "cpu" if device == "cpu" else "cuda",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
    }
