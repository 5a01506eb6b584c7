"""What the members of a wave get in a step, beside their states: the order of their examples, and their settings."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import numpy as np

from adtrain import optim
from adtrain.child_process import end, started
from adtrain.core.array import Array, array
from adtrain.core.vmap import vmap
from adtrain.data import shuffle
from adtrain.data.shuffle import permutation
from adtrain.sweeps.members import Group, Member
from adtrain.sweeps.step import Settings
from adtrain.training.experiment import LOG_ROWS

WORKERS = min(8, os.cpu_count() or 1)
"""Maximum processes that shuffle at a time."""

PROGRAM = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
"""What a process runs: the file `data/shuffle.py`, without the package around it. So it starts fast."""


class ShufflePool:
    """Up to WORKERS processes that shuffle, and a thread that waits for each.

    NumPy holds the GIL while it shuffles, so threads alone would delay training.

    Attributes:
        idle: processes that wait for the next order.
    """

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(WORKERS, "shuffle")
        self.lock, self.idle = Lock(), list[subprocess.Popen[bytes]]()
        atexit.register(self.close)

    def submit(self, rows: np.ndarray, seed: int, epoch: int) -> Future[np.ndarray]:
        """`rows` in the order of an epoch. If the other process fails, a thread of this one computes the order."""
        return self.threads.submit(self._shuffled, rows, seed, epoch)

    def _shuffled(self, rows: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        order = self._from_process(len(rows), seed, epoch)
        ordered: np.ndarray = rows[permutation(len(rows), seed, epoch) if order is None else order]
        return ordered

    def _from_process(self, count: int, seed: int, epoch: int) -> np.ndarray | None:
        """The order of `count` examples, from an idle process or a new one; None if it fails."""
        with self.lock:
            process = self.idle.pop() if self.idle else None
        with suppress(OSError):
            process = process or started([sys.executable, "-I", "-c", PROGRAM, shuffle.__file__, *sys.path])
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"%d %d %d\n" % (count, seed, epoch))
            process.stdin.flush()
            order = process.stdout.read(count * np.int64().itemsize)
            if len(order) == count * np.int64().itemsize:
                with self.lock:
                    self.idle.append(process)
                return np.frombuffer(order, np.int64)
        if process is not None:
            end(process)
        return None

    def close(self) -> None:
        """End the processes that are idle."""
        with self.lock:
            ending, self.idle = self.idle, []
        end(*ending)


@cache
def shared_pool() -> ShufflePool:
    """The pool that all waves share."""
    return ShufflePool()


MIN_SEEDS = 64
"""Minimum data seeds for which other processes compute the orders while the device trains. An order takes 0.6 ms."""


class WaveInputs:
    """The seeds, options and schedules of a wave's members on a device.

    Attributes:
        experiments, data_seeds: of each member.
        targets: see `Settings`.
        rows: by data seed the rows of `Group.whole` for training and for validation.
    """

    def __init__(self, group: Group, members: Sequence[Member], device: str) -> None:
        self.group, self.device = group, device
        self.data_seeds = [group.data_seed(member) for member in members]
        self.next_epoch, self.next_orders = 0, dict[int, Future[np.ndarray]]()
        """The epoch whose orders other processes compute, and these by data seed; 0 and empty without one."""
        self.rows = {seed: group.rows(seed) for seed in dict.fromkeys(self.data_seeds)}
        seeds = [member.config.training.seed for member in members]
        words = [[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds]
        self.seeds = array(np.array(words, np.uint32), device=device)
        self.experiments = [group.of_member(member) for member in members]
        self.targets = [
            array(np.array([getattr(x.network.task, name) for x in self.experiments]), device=device)
            for name in (("mean", "std") if group.has_own_targets else ())
        ]
        numbers = [experiment.optimizer.numbers() for experiment in self.experiments]
        self.options = {name: self._option([x[name] for x in numbers]) for name in group.options}
        self.schedules: list[optim.Schedule] = []
        self.schedule_of: list[int] = []
        for experiment in self.experiments:
            if experiment.schedule not in self.schedules:
                self.schedules.append(experiment.schedule)
            self.schedule_of.append(self.schedules.index(experiment.schedule))

    def _option(self, values: Sequence[Any]) -> Any:
        """An option of all members: float64 (members,), or a list of such arrays."""
        if not isinstance(values[0], tuple):
            return array(np.array(values, np.float64), device=self.device)
        return [array(np.array(x, np.float64), device=self.device) for x in zip(*values, strict=True)]

    def prefetch(self, number: int) -> None:
        """Start to compute the orders of an epoch in other processes, if this saves time.

        On the CPU it does not: training uses all cores.
        """
        shuffled = not self.group.experiment.config.data.sets_steps_per_epoch
        if shuffled and self.device != "cpu" and len(self.rows) >= MIN_SEEDS and number <= self.group.experiment.epochs:
            submit = shared_pool().submit
            self.next_epoch = number
            self.next_orders = {seed: submit(rows, seed, number) for seed, (rows, _) in self.rows.items()}

    def epoch(self, number: int) -> EpochInputs:
        """The inputs of an epoch, from 1."""
        per_epoch = self.group.experiment.steps_per_epoch
        if self.next_epoch == number:
            orders = {seed: order.result() for seed, order in self.next_orders.items()}
        else:
            order = self.group.experiment.order
            orders = {seed: rows[order(len(rows), seed, number)] for seed, (rows, _) in self.rows.items()}
        self.prefetch(number + 1)
        steps = array(np.arange(per_epoch, dtype=np.int64) + (number - 1) * per_epoch)
        factors = [vmap(schedule)(steps).numpy() for schedule in self.schedules]
        return EpochInputs(self, orders, [factors[which] for which in self.schedule_of])

    def validation_rows(self) -> np.ndarray:
        """The rows of the validation part: (count,), or (members, count) if the members have different ones."""
        rows = {seed: found for seed, (_, found) in self.rows.items() if found is not None}
        if len(rows) == 1:
            return next(iter(rows.values()))
        return np.stack([rows[seed] for seed in self.data_seeds])


@dataclass(frozen=True)
class EpochInputs:
    """The inputs of the steps of an epoch. Batches count from 0.

    Attributes:
        orders: by data seed the rows of all batches, one after the other.
        factors: for each member what its schedule gives for each step.
    """

    inputs: WaveInputs
    orders: Mapping[int, np.ndarray]
    factors: Sequence[np.ndarray]

    def order(self, first: int, count: int, size: int) -> np.ndarray:
        """The rows of `count` batches of `size` examples from batch `first` on: int64 (members, LOG_ROWS, size), or
        (LOG_ROWS, size) if all members share them."""
        group = self.inputs.group
        begin = first * group.experiment.config.data.batch_size
        batches = {seed: rows[begin : begin + count * size].reshape(-1, size) for seed, rows in self.orders.items()}
        if group.shared_seed is not None:
            shared = np.zeros((LOG_ROWS, size), np.int64)
            shared[:count] = batches[group.shared_seed]
            return shared
        order = np.zeros((len(self.factors), LOG_ROWS, size), np.int64)
        for i, seed in enumerate(self.inputs.data_seeds):
            order[i, :count] = batches[seed]
        return order

    def rows(self, count: int) -> list[np.ndarray]:
        """For each member its first `count` rows in the epoch."""
        return [self.orders[seed][:count] for seed in self.inputs.data_seeds]

    def settings(self, first: int, count: int) -> Settings:
        """The settings of `count` steps from batch `first` on."""
        inputs = self.inputs
        factors = np.zeros((len(self.factors), LOG_ROWS))
        for i, of_member in enumerate(self.factors):
            factors[i, :count] = of_member[first : first + count]
        on_device: Array = array(factors, device=inputs.device)
        return Settings(inputs.seeds, on_device, inputs.options, inputs.targets)
