"""Steps on batches: the loop that gives the device its work, many batches at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
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
    """Steps on one batch after the other, of which the host gives out many at a time.

    `log` is that of the last steps; it begins anew with each LOG_ROWS of them.
    """

    def __init__(
        self, experiment: Experiment, state: TrainState, seed: Array, examples: Examples, batches: Iterable[np.ndarray]
    ) -> None:
        self.step = experiment.logged_step
        self.state, self.log = state, empty_log(LOG_ROWS, seed.device)
        self.seed, self.examples = seed, examples
        self.pieces, self.left, self.taken = examples.pieces(batches, LOG_ROWS), 0, 0
        self.at_once = 1  # steps between two reports of progress

    def compile(self, sizes: Iterable[int]) -> None:
        """Compile the step for batches of these sizes: what is done once is not part of any step's time."""
        if isinstance(self.step, Staged):
            for size in sizes:
                for piece in self.examples.pieces([np.zeros(size, np.int64)], LOG_ROWS):
                    self.step.compile(self.state, self.log, self.seed, *piece.given)

    @property
    def row(self) -> int:
        """The row of the log that the next step writes."""
        return self.taken % LOG_ROWS

    def steps(self, count: int) -> Iterator[tuple[int, int]]:
        """Take so many steps; says how many more are done, in steps and in images.

        Who does not go on then takes no more steps.
        """
        while count:
            if not self.left:
                self.piece = next(self.pieces)
                self.left = self.piece.steps
                if not self.piece.position:
                    self.log = empty_log(LOG_ROWS, self.seed.device)
            before, times = perf_counter(), min(self.at_once, self.left, count)
            self.state, self.log = repeated(self.step, times, (self.state, self.log), self.seed, *self.piece.given)
            self.at_once = max(1, int(REPORT_SECONDS / max((perf_counter() - before) / times, 1e-9)))
            self.taken += times
            self.left -= times
            count -= times
            yield times, times * self.piece.size


def continuation(experiment: Experiment, state: TrainState, device: str = "cpu") -> Callable[[int], TrainState]:
    """A function that takes so many more steps each time it is called, for measuring; the caller keeps `state`.

    It returns the new state, which lasts until the next call. Only batches of the full size are used, so that all
    steps do the same work.
    """
    examples = on_device(experiment.train, device)
    epochs = (batches_of(experiment, experiment.epochs + i) for i in count(1))
    full = (indices for batches in epochs for indices in batches if len(indices) == experiment.full_batch)
    walk = Walk(experiment, copied(state), experiment.seed(device), examples, full)

    def take_steps(times: int = 1) -> TrainState:
        for _ in walk.steps(times):
            pass
        return walk.state

    return take_steps


def batches_of(experiment: Experiment, epoch: int) -> Iterator[np.ndarray]:
    """The batches of an epoch (from 1), int64 indices, in the order that the seed gives it."""
    seed = experiment.config.training.seed
    return data.batches(len(experiment.train), experiment.config.data.batch_size, seed, epoch)
