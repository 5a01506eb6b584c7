"""Times training steps of many networks together, and of one: microseconds for each network and step.

    python benchmarks/sweep_steps.py mlp-small --device gpu --members 1000 16 > times.json

Samples of the sizes are taken alternately. A sample is nine times a hundred steps, about an epoch of MNIST in batches
of 64. It ends when the device has finished, as an epoch of a sweep does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

from adtrain import config, training
from adtrain.bench.sampling import in_turns
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.backend import backend
from adtrain.sweeps.members import groups_of, members_of
from adtrain.sweeps.session import step_arguments

SAMPLES, LAUNCHES, STEPS = 7, 9, 100


def together(name: str, order: str, members: int, device: str) -> Callable[[], None]:
    """A function that takes LAUNCHES times STEPS steps of `members` networks."""
    cfg = config.load(name, [f"sweep={{order: {order}, training.seed: {{range: {members}}}}}"])
    (group,) = groups_of(cfg, members_of(cfg))
    arguments = tree.map(lambda x: array(np.asarray(x, order="C"), device=device), step_arguments(group, members))
    rng = np.random.default_rng(0)
    rows = array(rng.integers(0, len(group.whole), arguments[-1].shape), device=device)
    step = group.programs.step
    carry: list[Any] = list(arguments[:2])

    def take() -> None:
        for _ in range(LAUNCHES):
            carry[1] = carry[1]._replace(position=array(np.int64(0), device=device))
            carry[:] = step.repeat(STEPS, *carry, *arguments[2:-1], rows)
        backend(device).synchronize()

    return take


def alone(name: str, device: str) -> Callable[[], None]:
    """A function that takes LAUNCHES times STEPS steps of one network, as `adtrain train` does."""
    experiment = training.prepare(config.load(name))
    steps = training.continuation(experiment, experiment.initial_state(device), device)

    def take() -> None:
        for _ in range(LAUNCHES):
            steps(STEPS)
        backend(device).synchronize()

    return take


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--members", type=int, nargs="+", default=[16])
    given = parser.parse_args()
    work = {"1 by adtrain train": (1, alone(given.config, given.device))}
    for count in given.members:
        for order in ("own", "shared"):
            work[f"{count}, {order} order"] = (count, together(given.config, order, count, given.device))
    for _, take in work.values():
        take()

    def sample(count: int, take: Callable[[], None]) -> tuple[float, float]:
        """Microseconds of the wall clock and of the processors, for each network and step."""
        started, used = perf_counter(), process_time()
        take()
        both = perf_counter() - started, process_time() - used
        return both[0] / (LAUNCHES * STEPS * count) * 1e6, both[1] / (LAUNCHES * STEPS * count) * 1e6

    found = in_turns({name: partial(sample, *each) for name, each in work.items()}, SAMPLES)
    wall, processor = ({name: [each[i] for each in times] for name, times in found.items()} for i in (0, 1))
    result = {
        "config": given.config,
        "device": backend(given.device).device_name(),
        "unit": "microseconds for each network and step",
        "steps of a sample": LAUNCHES * STEPS,
        "steps": {
            name: {"median": median(wall[name]), "processor": median(processor[name]), "samples": wall[name]}
            for name in work
        },
    }
    json.dump(result, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
