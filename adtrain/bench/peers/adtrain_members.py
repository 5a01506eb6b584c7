"""The training step of many networks in adtrain, as `adtrain sweep` runs it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from adtrain.bench.peers.members import MembersJob
from adtrain.bench.peers.steps import CHUNK, Runner
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.sweeps.inputs import WaveInputs
from adtrain.sweeps.step import Settings, empty_tally
from adtrain.sweeps.wave import Programs
from adtrain.training import on_device


def runner(job: MembersJob, form: str) -> Runner:
    """The training of all members. A call uploads the orders of its batches, and runs the staged step CHUNK times."""
    group, device, chunk = job.group, job.device, CHUNK[job.device]
    inputs, step = WaveInputs(group, group.members, device), Programs(group).step
    rates = array(np.repeat(np.array(inputs.rates)[:, None], chunk, axis=1), device=device)
    settings = Settings(inputs.seeds, rates, inputs.options)
    state: Any = tree.map(lambda x: array(x, device=device), job.initial_state)
    tally = empty_tally(job.experiment.network.task, job.count, device)
    examples = on_device(group.whole, device)
    orders = cycle(np.ascontiguousarray(job.orders.swapaxes(1, 2)))
    total = np.zeros(job.count)

    def start_call() -> tuple[Any, ...]:
        """The images, labels and orders of the next call, whose steps begin with the first row of the orders."""
        nonlocal tally
        tally = tally._replace(position=array(np.int64(0), device=device))
        return examples.batches(next(orders))

    def take(steps: int, batches: tuple[Any, ...]) -> None:
        nonlocal state, tally
        state, tally = step.repeat(steps, state, tally, settings, *batches)

    def added_losses() -> np.ndarray:
        """float64 (members,): the sum of each member's losses over the examples since the last call."""
        nonlocal total
        before, total = total, tally.loss.numpy()
        return total - before

    def losses() -> Sequence[list[float]]:
        batches, found = start_call(), []
        for _ in range(chunk):
            take(1, batches)
            found.append((added_losses() / job.experiment.full_batch).tolist())
        return found

    def run(calls: int) -> float:
        for _ in range(calls):
            take(chunk, start_call())
        return float(np.mean(added_losses())) / (calls * chunk * job.experiment.full_batch)

    return Runner(losses, run)
