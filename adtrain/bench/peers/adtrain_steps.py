"""adtrain's own training step, as `adtrain train` runs it."""

from __future__ import annotations

from itertools import cycle

from adtrain import training
from adtrain.bench.peers.steps import CHUNK, Job, Runner
from adtrain.core.array import Value
from adtrain.training.step import empty_log, repeated


def runner(job: Job, form: str) -> Runner:
    """A call uploads the order of its batches, and runs the staged step CHUNK times."""
    experiment, device, chunk = job.experiment, job.device, CHUNK[job.device]
    state, seed = experiment.initial_state(device), experiment.seed(device)
    examples = training.on_device(experiment.train, device)
    orders = cycle(job.orders)

    def losses_of_call() -> Value:
        nonlocal state
        carried = state, empty_log(experiment.network.task, chunk, device)
        state, log = repeated(experiment.logged_step, chunk, carried, seed, *examples.batches(next(orders)))
        return log.loss

    def run(calls: int) -> float:
        for _ in range(calls):
            losses = losses_of_call()
        return float(losses.numpy()[-1])

    return Runner(lambda: losses_of_call().numpy().tolist(), run)
