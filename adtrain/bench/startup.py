"""The time from a command to the trained network, and that of peers from their import to their first steps.

Each system runs in processes with an empty cache folder, and again with the filled one. As a program, `python -m
adtrain.bench.startup NAME DEVICE CONFIG [KEY=VALUE]...`, this module takes the first steps of one peer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

from adtrain import config, training
from adtrain.backends.cpu.threads import usable_cores
from adtrain.bench.machine import Progress, observed_load, protocol
from adtrain.bench.peers import jobs
from adtrain.bench.peers.comparison import loss_tolerance
from adtrain.bench.peers.systems import ADTRAIN, SYSTEMS, Choice, environment, last_line
from adtrain.bench.result import NamedTime, TimedResult, of_samples
from adtrain.bench.sampling import in_turns
from adtrain.bench.view import Column, Note, Table, View, absent
from adtrain.core.errors import AdtrainError
from adtrain.table import TEXT, CellFormat
from adtrain.training.summary import SUMMARY

CACHES = {
    "XDG_CACHE_HOME": "cache",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "JAX_COMPILATION_CACHE_DIR": "jax",
    "CUDA_CACHE_PATH": "cuda",
}
"""Environment variables of cache folders, and the names of the folders."""

TIMEOUT_SECONDS = 600


class Start(NamedTuple):
    """The start-up of one process.

    Attributes:
        seconds: the total.
        spans: the seconds of each activity.
        loss: of the first step; None for adtrain's whole training.
    """

    seconds: float
    spans: Mapping[str, float]
    loss: float | None = None


class Task(NamedTuple):
    """The training that every process starts."""

    config: str
    overrides: Sequence[str]
    device: str


@dataclass(frozen=True)
class Starts:
    """The starts of a system with "cold" (empty) or "warm" (filled) caches: medians, and the seconds of each."""

    system: str
    cache: str
    seconds: float
    samples: list[float]
    spans: dict[str, float]

    @property
    def caches(self) -> str:
        return {"cold": "empty", "warm": "filled"}.get(self.cache, self.cache)

    @property
    def activities(self) -> str:
        """The seconds of each activity, longest first."""
        longest = sorted(self.spans.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest if seconds >= MIN_SECONDS)


MIN_SECONDS = 0.02
"""Shorter activities are not listed."""

COLUMNS: tuple[Column[Starts], ...] = (
    Column("system", lambda row: row.system, TEXT),
    Column("caches", lambda row: row.caches, TEXT),
    Column("seconds", lambda row: row.seconds, CellFormat("{:.2f}".format), bar=lambda row: (row.seconds, "")),
)


@dataclass(frozen=True, kw_only=True)
class Startup(TimedResult):
    """The result of `adtrain bench startup`.

    Attributes:
        losses: of the first step, by system.
        different: systems whose first loss is not adtrain's.
    """

    kind = "startup"
    config: str
    starts: list[Starts]
    losses: dict[str, float]
    different: list[str]
    skipped: dict[str, str]
    failed: dict[str, str]

    def times(self) -> Iterator[NamedTime]:
        for row in self.starts:
            yield of_samples(f"{row.system}, {row.caches} caches", [seconds * 1e3 for seconds in row.samples])

    def view(self) -> View:
        notes = [f"{row.system}, {row.caches}: {row.activities}" for row in self.starts]
        notes += absent(self.skipped, self.failed)
        notes += [f"{name}: the first loss is {self.losses[name]:.6g}, expected adtrain's" for name in self.different]
        about = (
            f"Start-up of {self.config}: medians of {self.protocol.samples[0]} processes. adtrain trains to the end; "
            "the seconds are those of the whole process. A peer imports its package and takes its first steps; the "
            "seconds leave out the start of Python."
        )
        return View(f"Start-up of {self.config}", [Note(about), Table(COLUMNS, self.starts, notes)])


def result(task: Task, precision: str, peers: Choice, samples: int, progress: Progress) -> Startup:
    """The measurements: `samples` rounds of all systems, each cold and warm, and the first losses.

    Raises AdtrainError where adtrain itself fails; a peer that fails is left out with its reason.
    """
    load = observed_load(progress)
    names = [ADTRAIN, *(peer.name for peer in peers.runnable)]
    failed, losses = dict[str, str](), dict[str, float]()
    rounds = count(1)

    def started(name: str) -> list[Start]:
        """Cold and warm."""
        if name == ADTRAIN:
            progress(f"bench: starting {', '.join(names)}, cold and warm, round {next(rounds)} of {samples}")
        with TemporaryDirectory(prefix="adtrain-startup-") as folder:
            starts = [run(name, task, Path(folder), cache) for cache in ("cold", "warm")]
            if name != ADTRAIN:
                losses.setdefault(name, starts[0].loss or 0.0)
            elif peers.runnable and name not in losses:
                losses[name] = first_steps(name, task, Path(folder)).loss or 0.0
        return starts

    found = in_turns({name: partial(started, name) for name in names}, samples, failed)
    measured = {
        (name, cache): [starts[i] for starts in found[name]]
        for name in names
        if name in found
        for i, cache in enumerate(("cold", "warm"))
    }
    reference = losses.get(ADTRAIN, 0.0)
    tolerances = {name: loss_tolerance(name, precision) * abs(reference) for name in losses}
    conditions = protocol(task.device, load)
    return Startup(
        protocol=replace(conditions, samples=(samples, samples)),
        config=task.config,
        starts=[record(*key, starts) for key, starts in measured.items()],
        losses=losses,
        different=[name for name, x in losses.items() if not abs(x - reference) <= tolerances[name]],
        skipped=dict(peers.skipped),
        failed=failed,
    )


def record(name: str, cache: str, starts: Sequence[Start]) -> Starts:
    """The medians of a system's seconds and spans."""
    activities = dict.fromkeys(activity for start in starts for activity in start.spans)
    spans = {activity: median(start.spans.get(activity, 0.0) for start in starts) for activity in activities}
    seconds = [start.seconds for start in starts]
    return Starts(name, cache, median(seconds), seconds, spans)


def run(name: str, task: Task, folder: Path, cache: str) -> Start:
    """Start a system with the caches in the folder: adtrain trains to the end, a peer takes its first steps."""
    if name != ADTRAIN:
        return first_steps(name, task, folder)
    output = folder / f"run-{cache}"
    settings = [word for override in task.overrides for word in ("--set", override)]
    arguments = ["adtrain", "train", task.config, *settings, "--device", task.device, "--quiet"]
    start = perf_counter()
    _output([*arguments, "--output-dir", str(output)], task.device, folder)
    seconds = perf_counter() - start
    spans = defaultdict[str, float](float)
    for span in json.loads((output / SUMMARY).read_bytes())["spans"]:
        spans[span["name"]] += span["seconds"]
    return Start(seconds, {**spans, "exit": seconds - sum(spans.values())})


def first_steps(name: str, task: Task, folder: Path) -> Start:
    """The import of a system's package and its first steps, in a process of its own."""
    words = [name, task.device, task.config, *task.overrides]
    answer = json.loads(_output(["adtrain.bench.startup", *words], task.device, folder).splitlines()[-1])
    return Start(sum(answer["spans"].values()), answer["spans"], answer["loss"])


def main(name: str, device: str, config_name: str, *overrides: str) -> None:
    """Print the seconds of the import of a peer's package and of its first steps, and the loss of the first one.

    What adtrain does to prepare data, weights and batches is not counted.
    """
    job = jobs.Job(training.prepare(config.load(config_name, overrides)), device)
    for prepared in ("orders", "weights", "statistics", "normalization"):
        getattr(job, prepared)
    start = perf_counter()
    import_module(SYSTEMS[name].package)
    imported = perf_counter()
    losses = jobs.runner(name, job).losses()
    spans = {"imports": imported - start, "first steps": perf_counter() - imported}
    print(json.dumps({"spans": spans, "loss": losses[0]}))


def _output(words: Sequence[str], device: str, folder: Path) -> str:
    """The output of `python -m WORDS`. Raises AdtrainError with the last line of its messages if it fails."""
    caches = {variable: str(folder / name) for variable, name in CACHES.items()}
    caches["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    variables = {**os.environ, **caches}
    if words[0] != ADTRAIN:
        variables |= environment(device, usable_cores() or 1)
    try:
        process = subprocess.run(
            [sys.executable, "-m", *words], env=variables, capture_output=True, encoding="utf-8", errors="replace",
            timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise AdtrainError(f"{words[0]} took longer than {TIMEOUT_SECONDS} s") from None
    if process.returncode:
        reason = last_line(process.stderr, process.stdout, "no output")
        raise AdtrainError(reason.removeprefix("adtrain: error: "))
    return process.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
