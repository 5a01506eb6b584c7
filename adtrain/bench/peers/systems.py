"""The systems that are compared, adtrain and its peers: which of them can run here, and their worker processes.

A worker is stopped by signal except while it works on a request.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

from adtrain.config.problems import known
from adtrain.core.errors import AdtrainError, OptionError

ADTRAIN = "adtrain"
"""The system that all others are compared with."""


Work: TypeAlias = Literal["steps", "operation", "race", "members"]
"""What is compared: training steps, single operations, whole trainings, or steps of many networks together."""


class System(NamedTuple):
    """A package, in one of the forms in which it runs.

    Attributes:
        name: package and form; unique.
        package: what must be installed.
        devices: where it runs.
        works: the work that the form does. The module PACKAGE_system in this package has a function for each:
            `steps(job, form)` takes training steps; `members(job, form)` those of all networks of a `MembersJob`;
            `operation(case, phase, device, form)` runs a single operation; `race(job, form)` makes a function that
            trains such jobs to the end.
        in_place_of_float32: the precision in which it computes a config in float32.
    """

    name: str
    package: str
    devices: Sequence[str]
    works: Sequence[Work]
    in_place_of_float32: str = "float32"

    @property
    def form(self) -> str:
        return self.name.partition("-")[2]

    def obstacle(self, device: str, work: Work) -> str | None:
        """Why it cannot do the work on the device; None if it can."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if work == "race" and work not in self.works:
            return "takes steps and runs operations, but no whole training"
        if find_spec(self.package) is None:
            return f"{self.package} is not installed (pip install {self.package})"
        if work == "operation" and work not in self.works:
            return "runs whole steps only"
        if work == "steps" and work not in self.works:
            return "trains many networks together; give --members N"
        if work == "members" and work not in self.works:
            return "trains one network at a time"
        return None


SYSTEMS = {
    system.name: system
    for system in (
        System(ADTRAIN, "adtrain", ("cpu", "gpu"), ("steps", "operation", "race", "members")),
        System("torch-eager", "torch", ("cpu", "gpu"), ("steps", "operation", "race")),
        System("torch-compile", "torch", ("cpu", "gpu"), ("steps", "race")),
        System("torch-graph", "torch", ("gpu",), ("steps", "operation", "race")),
        System("torch-max", "torch", ("cpu", "gpu"), ("steps", "race")),
        System("torch-max-tf32", "torch", ("gpu",), ("steps", "race"), "tf32"),
        System("torch-vmap", "torch", ("cpu", "gpu"), ("members",)),
        System("torch-vmap-compile", "torch", ("cpu", "gpu"), ("members",)),
        System("jax-jit", "jax", ("cpu", "gpu"), ("steps", "operation")),
        System("jax-scan", "jax", ("cpu", "gpu"), ("steps",)),
        System("jax-vmap", "jax", ("cpu", "gpu"), ("members",)),
        System("numpy", "numpy", ("cpu",), ("steps", "operation")),
    )
}
"""torch-compile: forward pass and loss, and so their gradients, by torch.compile. torch-graph: the whole step as one
CUDA graph of eager kernels. torch-max: forward pass and loss compiled in one piece (fullgraph), for this batch size;
images and filters channels last; clipping compiled too, and the optimizer where PyTorch has no fused one; on a GPU the
whole step is one CUDA graph. torch-max-tf32: the same with TF32, for a config in float32. jax-jit: one call a step.
jax-scan: many steps in one call, a lax.scan over batches. The forms "vmap" train many networks. torch-vmap maps the
gradients of one network; on a GPU the whole step is one CUDA graph. torch-vmap-compile also compiles the gradients.
jax-vmap maps the step, in a lax.scan."""


def precision_of(name: str, given: str) -> str:
    """The precision in which a system computes a config of the given precision."""
    return SYSTEMS[name].in_place_of_float32 if given == "float32" and name in SYSTEMS else given


PEERS = [system for system in SYSTEMS.values() if system.name != ADTRAIN]


class Choice(NamedTuple):
    """The peers that can run, and why others cannot, by name."""

    runnable: Sequence[System]
    skipped: dict[str, str]


def chosen(names: Sequence[str], device: str, work: Work) -> Choice:
    """The peers with these names that can do the work. The name of a package selects its forms for one network, or
    those for many if the work is "members".

    Raises:
        OptionError: no peer has the name, or none of them can run.
    """
    possible = dict.fromkeys([*(peer.package for peer in PEERS), *(peer.name for peer in PEERS)])
    for name in names:
        if name not in possible:
            raise OptionError(f"{name}: no such peer; {known(name, list(possible))}")
    forms = [peer for peer in PEERS if ("members" in peer.works) == (work == "members")]
    selected = [peer for peer in PEERS if peer.name in names or (peer.package in names and peer in forms)]
    skipped = {peer.name: reason for peer in selected if (reason := peer.obstacle(device, work))}
    runnable = [peer for peer in selected if peer.name not in skipped]
    if not runnable:
        by_reason = {reason: [name for name in skipped if skipped[name] == reason] for reason in skipped.values()}
        raise OptionError("; ".join(f"{', '.join(found)}: {reason}" for reason, found in by_reason.items()))
    return Choice(runnable, skipped)


def load(system: System) -> ModuleType:
    """The module of the system's package. It is imported only when used, because it may need an optional package."""
    return import_module(f"adtrain.bench.peers.{system.package}_system")


def made(name: str, work: Work, *given: Any) -> Any:
    """The work in a system, ready to run; see `System.works`. Raises Unsupported where the system lacks something."""
    return getattr(load(SYSTEMS[name]), work)(*given, SYSTEMS[name].form)


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
