"""The members of a sweep, and their groups: members of a group are trained by one Program.

Also what the members of a wave get in a step, beside their states: the order of their examples, and their settings.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from threading import Lock
from typing import Any

import numpy as np

from adtrain import config, data, nn, optim
from adtrain.child_process import end, started
from adtrain.config import Config
from adtrain.config.build import REGRESSION
from adtrain.config.files import varied
from adtrain.config.problems import MAX_LISTED, ConfigError, Problem
from adtrain.core.array import Array, array
from adtrain.core.vmap import vmap
from adtrain.data import DataSet, Split, shuffle
from adtrain.data.shuffle import permutation
from adtrain.metrics import Metric
from adtrain.optim.optimizer import is_zero
from adtrain.sweeps.records import Criterion
from adtrain.sweeps.step import Programs, Settings
from adtrain.text import counted
from adtrain.training.checks import warn_of_init_from
from adtrain.training.evaluation import higher_is_better, metrics_of
from adtrain.training.experiment import LOG_ROWS, Experiment
from adtrain.training.preparation import of_data, read_data, with_absolute_paths
from adtrain.training.tasks import Regression

_log = logging.getLogger(__name__)

REFUSED = {
    ("training", "checkpoint_every"): "a sweep chooses when it saves; --set training.checkpoint_every=null",
    ("training", "validate_every"): "a sweep evaluates after each epoch; --set training.validate_every=null",
    ("data", "shards"): "a member trains on whole batches; --set data.shards=null",
    ("data", "order"): "a sweep shuffles the sequences; --set data.order=null",
    ("training", "micro_batch"): "a member trains on whole batches; --set training.micro_batch=null",
}
"""Keys that a sweep does not take, and why."""
ALLOWED = {"shards": 1, "order": "shuffled"}
"""Values of these keys that change nothing."""


@dataclass(frozen=True)
class Member:
    """One training of a sweep. `number` counts from 0; `values` has what the sweep sets, by key."""

    number: int
    values: dict[str, Any]
    config: Config


@dataclass(frozen=True)
class Group:
    """Members that differ only in what `step.Settings` holds and in their initial weights.

    Attributes:
        experiment: that of its first member.
        whole: the training part with the validation images.
        shared_seed: the seed of the order and the validation split that all members share; None: each has its own.
    """

    number: int
    members: Sequence[Member]
    experiment: Experiment
    whole: Split
    shared_seed: int | None

    def of_member(self, member: Member) -> Experiment:
        """The experiment of one member, as `adtrain train` has it. With `shared_seed` the split is that of all."""
        first, cfg = self.experiment, member.config
        cfg = cfg.changed("training", init_from=with_absolute_paths(cfg).training.init_from)
        own = {key: getattr(cfg, key) for key in ("name", "optimizer", "parameter_groups", "schedule", "training")}
        found = replace(
            first,
            config=first.config.model_copy(update=own),
            optimizer=config.build.grouped_optimizer(cfg, first.network.parameter_shapes),
            schedule=config.build.schedule(cfg, first.steps_per_epoch, first.total_steps),
        )
        seed = self.data_seed(member)
        if first.validation is None or seed == self.data_seed(self.members[0]):
            return found
        train, validation = data.split_validation(self.whole, cfg.data.validation, seed, first.data.validation_rows)
        found = replace(found, input_weights=first.network.input_weights(train.images))
        data_set, network = first.data.with_train(train), first.network
        if isinstance(network.task, Regression):
            task = replace(network.task, mean=data_set.target_mean, std=data_set.target_std)
            network = replace(network, task=task)
        return replace(found, data=data_set, network=network, validation=validation)

    @property
    def has_own_targets(self) -> bool:
        """Whether each member normalizes its targets by its own training part, which its seed chooses."""
        task, own_split = self.experiment.network.task, self.shared_seed is None and self.experiment.validation
        return bool(own_split) and isinstance(task, Regression) and task.normalized

    def data_seed(self, member: Member) -> int:
        """The seed of a member's order and validation split."""
        return member.config.training.seed if self.shared_seed is None else self.shared_seed

    def metrics(self, rank_by: str) -> dict[str, Metric]:
        """The metrics that are not in the scores, by name: those of the config, and the one that ranks members."""
        return metrics_of(self.experiment.config, self.experiment.network.task, rank_by.partition("_")[2])

    def criterion(self, rank_by: str) -> Criterion:
        """The criterion of a ranking by a metric such as "validation_accuracy"."""
        return Criterion.of(rank_by, higher_is_better(rank_by.partition("_")[2], self.metrics(rank_by)))

    def halving_criterion(self, criterion: Criterion) -> Criterion:
        """The criterion by which members are dropped; the test part must not decide it.

        Metrics that are not in the scores are measured on the validation part only.
        """
        if criterion.part != "test":
            return criterion
        in_scores = criterion.metric in self.experiment.network.task.score_kind._fields
        return replace(criterion, part="train" if in_scores else "validation")

    @cached_property
    def programs(self) -> Programs:
        """The staged functions of its members."""
        return Programs(self.experiment)

    @cached_property
    def options(self) -> Sequence[str]:
        """The options of the optimizer that the Program takes as arrays: its numbers that are not 0."""
        return [name for name, value in self.experiment.optimizer.numbers().items() if not is_zero(value)]

    @cached_property
    def least_members(self) -> int:
        """The least number of members in a Program: 2 with convolutions, otherwise 1.

        `vmap` makes one grouped convolution of those of several members, whose kernels differ from those for one. So a
        member that is alone is trained twice, and has the bytes that it has among others.
        """
        network = self.experiment.network
        kinds = [row.kind for row in nn.describe(network.model, network.input_shape)]
        return 2 if any(kind.startswith("conv") for kind in kinds) else 1

    @cached_property
    def all_rows(self) -> Split:
        """The rows of `whole` with their labels. Without a validation part all seeds share them."""
        return Split(np.arange(len(self.whole)), self.whole.labels)

    def rows(self, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The rows of `whole` for training and for validation, int64, with this seed."""
        fraction, last = self.experiment.config.data.validation, self.experiment.data.validation_rows
        train, validation = data.split_validation(self.all_rows, fraction, seed, last)
        return np.asarray(train.images), None if validation is None else np.asarray(validation.images)


def with_seeds(first: int, count: int) -> str:
    """The override of a config for a sweep of `count` seeds from `first` on."""
    return f"sweep={{training.seed: {{range: [{first}, {first + count}]}}}}"


def members_of(cfg: Config) -> list[Member]:
    """The members of a config with a section `sweep`. Of equal members, such as with 0.01 and 1e-2, there is one.

    Raises ConfigError, with the problems of all members, where a value does not fit, or a member has a key that a sweep
    does not take.
    """
    found: dict[str, Member] = {}
    problems: dict[tuple[str, str], Problem] = {}  # by path and message: one for all values of a wrong key
    all_values = config.build.sweep(cfg).members()
    for values in all_values:
        plain = {key: node.plain() for key, node in values.items()}
        try:
            member = Member(len(found), plain, varied(cfg, values))
            _refuse_keys(member.config)
        except ConfigError as error:
            problems = {(x.path, x.message): x for x in error.problems} | problems
            if len(problems) < MAX_LISTED:
                continue
            break
        found.setdefault(member.config.model_dump_json(), member)
    if problems:
        raise ConfigError(list(problems.values()))
    if equal := len(all_values) - len(found):
        where, number = cfg.where(("sweep",)), counted(equal, "members")
        _log.warning("adtrain: warning: %s: sweep: left out %s with the same values as another one", where, number)
    return list(found.values())


def _refuse_keys(cfg: Config) -> None:
    for (section, key), reason in REFUSED.items():
        value = getattr(getattr(cfg, section), key)
        if value is not None and value != ALLOWED.get(key):
            raise cfg.error_at((section, key), f"found it in a sweep, expected none: {reason}")


def groups_of(cfg: Config, members: Sequence[Member]) -> list[Group]:
    """The groups, in the order of their first members. Data that several groups train on are read once.

    Raises ConfigError and DataError as `training.prepare` does.
    """
    shared_seed = cfg.training.seed if config.build.sweep(cfg).shared_order else None
    alike: dict[str, list[Member]] = {}
    for member in members:
        alike.setdefault(signature(member.config), []).append(member)
    read: dict[str, DataSet] = {}
    groups = []
    for number, same in enumerate(alike.values()):
        first = with_absolute_paths(same[0].config)
        key = _data_signature(first)
        if key not in read:
            read[key] = read_data(first)
        seeded = first if shared_seed is None else first.changed("training", seed=shared_seed)
        experiment = of_data(seeded, read[key])
        warn_of_init_from(experiment)
        groups.append(Group(number, tuple(same), experiment, read[key].train, shared_seed))
    return groups


def signature(cfg: Config) -> str:
    """A text that is equal for configs whose trainings are one Program."""
    values: dict[str, Any] = cfg.model_dump(mode="json")
    values["name"] = None
    if cfg.schedule.kind != optim.Plateau.kind():  # its state is a part of the step
        values["schedule"] = None
    values["training"].update(seed=None, init_from=None)
    optimizer = config.build.optimizer(cfg)
    # Of numbers only whether they are 0: an option of 0 leaves an operation out.
    values["optimizer"] = repr(optimizer.with_traced({name: is_zero(x) for name, x in optimizer.numbers().items()}))
    for group in values["parameter_groups"] or ():
        group.update({name: is_zero(x) for name, x in group.items() if isinstance(x, float)})
    return json.dumps(values, sort_keys=True)


def _data_signature(cfg: Config) -> str:
    """A text that is equal for configs whose data are read in the same way."""
    section = cfg.data.model_dump(mode="json", exclude={"batch_size", "validation", "augment", "views"})
    model = cfg.model.model_dump(mode="json") if cfg.loss.kind in REGRESSION else cfg.model.input_shape
    return json.dumps([section, cfg.loss.kind, model], sort_keys=True)


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
