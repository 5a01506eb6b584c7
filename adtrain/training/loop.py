"""Steps on batches: the loop that gives the device its work, many batches at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, groupby, islice
from time import perf_counter

import numpy as np

from adtrain import data
from adtrain.core.array import Array
from adtrain.core.staging import Staged
from adtrain.training.examples import Examples, on_device
from adtrain.training.experiment import LOG_ROWS, Experiment
from adtrain.training.step import TrainState, copied, empty_log, repeated

REPORT_SECONDS = 0.1
"""About how long the steps take between two reports of progress, and until a request to stop is heard."""


class Walk:
    """Steps on batches that the host gives out many at a time."""

    def __init__(self, experiment: Experiment, state: TrainState, seed: Array, examples: Examples) -> None:
        self.step = experiment.logged_step
        self.state, self.log = state, empty_log(LOG_ROWS, seed.device)
        self.seed, self.examples = seed, examples
        self.at_once = 1  # steps between two reports of progress

    def compile(self, batches: Sequence[np.ndarray]) -> None:
        """Compile the step for the sizes of these batches: what is done once is not part of any step's time."""
        if isinstance(self.step, Staged):
            for size in {len(indices) for indices in batches}:
                given = self.examples.batches(np.zeros((LOG_ROWS, size), np.int64))
                self.step.compile(self.state, self.log, self.seed, *given)

    def steps(self, batches: Sequence[np.ndarray]) -> Iterator[tuple[int, int]]:
        """Take a step on each of at most LOG_ROWS batches, with a log of their own; says how many more are done.

        In steps and in images; who does not go on then takes no more steps.
        """
        self.log, done = empty_log(LOG_ROWS, self.seed.device), 0
        for size, alike in groupby(batches, key=len):
            rows = list(alike)
            order = np.zeros((LOG_ROWS, size), np.int64)
            order[done : done + len(rows)] = rows
            given = self.examples.batches(order)
            end = done + len(rows)
            while done < end:
                before, times = perf_counter(), min(self.at_once, end - done)
                self.state, self.log = repeated(self.step, times, (self.state, self.log), self.seed, *given)
                self.at_once = max(1, int(REPORT_SECONDS / max((perf_counter() - before) / times, 1e-9)))
                done += times
                yield times, times * size


def continuation(experiment: Experiment, state: TrainState, device: str = "cpu") -> Callable[[int], TrainState]:
    """A function that takes so many more steps each time it is called, for measuring; the caller keeps `state`.

    It returns the new state, which lasts until the next call. Only batches of the full size are used, so that all
    steps do the same work.
    """
    examples = on_device(experiment.train, device)
    walk = Walk(experiment, copied(state), experiment.seed(device), examples)
    epochs = (batches_of(experiment, experiment.epochs + i) for i in count(1))
    full = (indices for batches in epochs for indices in batches if len(indices) == experiment.full_batch)

    def take_steps(times: int = 1) -> TrainState:
        for done in range(0, times, LOG_ROWS):
            for _ in walk.steps(list(islice(full, min(times - done, LOG_ROWS)))):
                pass
        return walk.state

    return take_steps


def batches_of(experiment: Experiment, epoch: int) -> Iterator[np.ndarray]:
    """The batches of an epoch (from 1), int64 indices, in the order that the seed gives it."""
    seed = experiment.config.training.seed
    return data.batches(len(experiment.train), experiment.config.data.batch_size, seed, epoch)
