"""The training step of many networks of one config, which differ in their seeds, together.

All systems start from the same weights. Each member has an order of the data of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from adtrain import config, training
from adtrain.bench.peers.steps import CHUNK, CHUNKS, Job, by_path
from adtrain.core import tree
from adtrain.sweeps.members import Group, groups_of, members_of


@dataclass(frozen=True)
class MembersJob(Job):
    """The input of every system. All arrays have a leading axis of members.

    Attributes:
        group: the members; `experiment` is that of the first one.
    """

    group: Group

    @property
    def count(self) -> int:
        return len(self.group.members)

    @cached_property
    def orders(self) -> np.ndarray:
        """Indices of batches: int64 (CHUNKS, CHUNK, members, batch)."""
        size, steps = self.experiment.full_batch, CHUNKS * CHUNK[self.device]
        found = np.empty((steps, self.count, size), np.int64)
        for i, member in enumerate(self.group.members):
            found[:, i] = list(islice(self._batches(self.group.data_seed(member)), steps))
        return found.reshape(CHUNKS, CHUNK[self.device], self.count, size)

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        return by_path(self.initial_state.params)

    @cached_property
    def statistics(self) -> dict[str, np.ndarray]:
        return by_path(self.initial_state.statistics)

    @cached_property
    def initial_state(self) -> training.TrainState:
        """The states of all members before the first step, as NumPy arrays."""
        states = [self.group.of_member(member).initial_state("cpu") for member in self.group.members]
        return tree.map(lambda *xs: np.stack([x.numpy() for x in xs]), *states)


def job(cfg: config.Config, device: str) -> MembersJob:
    """The members of a config with a section `sweep`, which are one group."""
    (group,) = groups_of(cfg, members_of(cfg))
    return MembersJob(group.experiment, device, group)
