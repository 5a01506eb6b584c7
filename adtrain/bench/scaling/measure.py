"""Weak and strong scaling of a config, and its exchanges alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from adtrain.bench.peers.systems import ADTRAIN
from adtrain.bench.scaling.request import PEERS, Measured, Request
from adtrain.bench.scaling.worker import SAMPLE_SECONDS, SAMPLES
from adtrain.bench.timing.protocol import observed_load, protocol
from adtrain.config.problems import known
from adtrain.core.errors import AdtrainError, OptionError
from adtrain.distributed.launch import end, start

WORKER_SECONDS = 600
SCALINGS = ("weak", "strong")
"""Weak: the batch grows with the ranks. Strong: it stays."""


class Point(NamedTuple):
    """The time of a step with a number of ranks.

    Attributes:
        system: adtrain or a peer.
        weak: whether the batch grows with the ranks; otherwise it stays.
        step_us: the median, microseconds.
        efficiency: 1 is ideal. Weak, or strong on the CPU, where all numbers of ranks use the same cores: the time of
            a step with the first number of ranks, divided by this time. Strong on GPUs: also divided by the factor by
            which the number of ranks has grown.
        exchange_us: the sum over all ranks of a vector as long as the gradients, alone; 0 where it was not measured.
        hidden: the fraction of the exchanges that other work hides: 1 minus the growth of a step divided by
            `exchange_us`; only for weak scaling.
    """

    system: str
    weak: bool
    ranks: int
    batch_size: int
    step_us: float
    efficiency: float
    exchange_us: float
    hidden: float | None


class Scaling(NamedTuple):
    """A config's points, and what they were measured on."""

    config: str
    device_name: str
    gradient_bytes: int
    points: list[Point]


def scaling(
    config: str,
    overrides: Sequence[str],
    device: str,
    batch_size: int,
    ranks: Sequence[int],
    systems: Sequence[str] = (ADTRAIN,),
    scalings: Sequence[str] = SCALINGS,
) -> Scaling:
    """Measure a config on these numbers of ranks of this machine; weak scaling with `batch_size` images a rank.

    On the CPU each rank has the machine's cores divided by the largest number of ranks in weak scaling, and by its own
    number of ranks in strong scaling, so that strong scaling uses the same cores.

    Args:
        systems: adtrain, and names in `PEERS`. They are measured one after another with each number of ranks.
        scalings: of `SCALINGS`.

    Raises:
        AdtrainError: a measurement fails.
    """
    most, cores = max(ranks), os.cpu_count() or 1
    points, about = list[Point](), None
    exchanges: dict[int, float] = {}
    for weak in (name == "weak" for name in scalings):
        first: dict[str, tuple[int, float]] = {}
        for count, system in product(ranks, systems):
            size = batch_size * count if weak else batch_size
            threads = max(1, cores // (most if weak else count))
            request = Request(config, tuple(overrides), device, size, system=system)
            measured = run(request, count, threads)
            step = median(measured.microseconds)
            exchange = 0.0
            if about is None or system == ADTRAIN:
                about = measured
            if system == ADTRAIN and count > 1:
                if count not in exchanges or device == "cpu":  # on the CPU the number of cores of a rank differs
                    alone = run(request._replace(exchange_bytes=measured.gradient_bytes), count, threads)
                    exchanges[count] = median(alone.microseconds)
                exchange = exchanges[count]
            first_count, first_us = first.setdefault(system, (count, step))
            ideal = first_us if weak or device == "cpu" else first_us * first_count / count
            hidden = None if not weak or not exchange else 1 - (step - first_us) / exchange
            points.append(Point(system, weak, count, size, step, ideal / step, exchange, hidden))
    assert about is not None
    return Scaling(config, about.device, about.gradient_bytes, points)


def _check(ranks: Sequence[int], peers: Sequence[str], device: str) -> None:
    if odd := [count for count in ranks if count & (count - 1)]:
        raise OptionError(f"--ranks: found {odd[0]}, expected powers of two")
    if unknown := [name for name in peers if name not in PEERS]:
        raise OptionError(f"--against {unknown[0]}: {known(unknown[0], PEERS)}")
    if peers and find_spec("torch") is None:
        raise OptionError(f"{', '.join(peers)}: torch is not installed (pip install torch)")
    for name in peers:
        if device not in PEERS[name]:
            raise OptionError(f"{name}: runs on {' and '.join(PEERS[name])} only")


def run(request: Request, ranks: int, threads: int) -> Measured:
    """The measurement of a number of ranks. Raises AdtrainError with the last line of its output where it fails."""
    worker = [sys.executable, "-m", "adtrain.bench.scaling.worker", json.dumps(request._asdict())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = start(ranks, worker, {"OMP_NUM_THREADS": str(threads)}, **pipes)
    try:
        output, errors = processes[0].communicate(timeout=WORKER_SECONDS)
    except subprocess.TimeoutExpired:
        raise AdtrainError(f"{ranks} ranks took longer than {WORKER_SECONDS} s") from None
    finally:
        code = end(processes)[0]
        for process in processes:
            process.__exit__(None, None, None)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if code or not lines:
        reason = (errors.strip() or output.strip() or "no output").splitlines()[-1]
        raise AdtrainError(f"{ranks} ranks: exit code {code}: {reason}")
    values: dict[str, Any] = json.loads(lines[-1])
    return Measured(**{**values, "microseconds": tuple(values["microseconds"])})


def result(
    config: str, overrides: Sequence[str], device: str, batch_size: int, ranks: Sequence[int],
    peers: Sequence[str], progress: Callable[[str], object],
) -> dict[str, Any]:  # fmt: skip
    """The result of `scaling` as JSON values, with the protocol.

    Raises:
        AdtrainError: a measurement fails.
        OptionError: a number of ranks is no power of two, torch is not installed, or a peer does not run on the device.
    """
    _check(ranks, peers, device)
    conditions = protocol(device, observed_load(progress), min_sample_ms=1e3 * SAMPLE_SECONDS)
    conditions["samples"] = [SAMPLES, SAMPLES]
    progress(f"bench: timing steps of {config} on {' and '.join(map(str, ranks))} ranks, about a minute")
    found = scaling(config, overrides, device, batch_size, ranks, (ADTRAIN, *peers))
    return {
        "kind": "scaling",
        "protocol": conditions,
        **found._asdict(),
        "points": [point._asdict() for point in found.points],
    }
