"""An experiment: a config joined with its data, checked before anything is trained or written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from adtrain import __version__, config, nn, optim
from adtrain.augment import Augmentation
from adtrain.config import Config
from adtrain.core import tree
from adtrain.core.array import Array, Placeholder, Value, array
from adtrain.core.backend import Executable
from adtrain.core.program import Program
from adtrain.core.staging import Pass, Staged, stage
from adtrain.core.views import subview
from adtrain.data import DataSet, Split, points, shuffle
from adtrain.metrics import Metric
from adtrain.nn.init import TypesOnly
from adtrain.passes import ALL, SIMPLIFY, passes_of_ranks
from adtrain.training import names, tensor_file
from adtrain.training.evaluation import higher_is_better, metrics_of
from adtrain.training.network import Network
from adtrain.training.program_cache import PersistentProgramCache, targets
from adtrain.training.progress import Best, ScoredEpoch
from adtrain.training.sharding import Buckets, ShardedStep, Sharding, evaluation_of_vectors, shard_seeds
from adtrain.training.step import (
    AVERAGE,
    PLATEAU,
    POINTS,
    EvaluationStep,
    LoggedStep,
    StepParts,
    TrainState,
    TrainStep,
    all_finite,
    empty_log,
    evaluation_step,
    logged_step,
    train_step,
)
from adtrain.training.tensor_file import initial_weights

T = TypeVar("T")

# The first stream of the seed that `data` does not use.
INIT_STREAM = 16

STATE, STATE_AND_LOG, TOTALS = (0,), (0, 1), (0,)
"""The donated arguments of `train_step`, `logged_step` and `evaluation_step`, by position."""

LOG_ROWS = 100
"""Steps between two readings of the log. Each reading waits for the device."""


class Mode(Enum):
    """How a step runs: operation by operation, as a Program with one kernel per operation, or with fused kernels."""

    EAGER = "eager"
    STAGED = "staged"
    FUSED = "fused"


@dataclass(frozen=True)
class Experiment:
    """A network, its data and its training schedule. Made by `prepare`; `data.train` excludes `validation`."""

    config: Config
    network: Network
    data: DataSet
    validation: Split | None
    optimizer: optim.Optimizer
    schedule: optim.Schedule
    steps_per_epoch: int
    total_steps: int
    augmentations: Sequence[Augmentation] = ()
    mode: Mode = Mode.FUSED
    sharding: Sharding | None = None  # of batches; None for one shard
    average: optim.Average | None = None  # of the weights
    input_weights: nn.Params = field(default_factory=dict)  # computed from the training images

    @property
    def train(self) -> Split:
        return self.data.train

    @property
    def test(self) -> Split:
        return self.data.test

    def identity(self, device: str) -> dict[str, str]:
        """Texts that are equal on all ranks, by what they describe: version, device, config, digests of the data."""
        splits = {"training set": self.train, "test set": self.test}
        of_data = {
            name: "\n".join([f"{len(split)} examples", *(f"{x} sha256 {y}" for x, y in split.digests.items())])
            for name, split in splits.items()
        }
        common = {"version of adtrain": __version__, "kind of device": device, "config": self.config_text}
        return {**common, **of_data}

    def order(self, count: int, seed: int, epoch: int) -> np.ndarray:
        """The order of the examples of an epoch; see `data.batches`."""
        if self.draws_examples:
            return np.broadcast_to(np.int64(0), (self.examples_per_epoch,))
        if self.config.data.points is not None:
            return points.order(len(self.train), self.full_batch, self.steps_per_epoch, epoch)
        options = self.config.data.options
        if options.order == "random_offsets":
            return shuffle.offsets(count, seed, epoch, options.length)
        return (shuffle.in_order if options.order == "in_order" else shuffle.permutation)(count, seed, epoch)

    @property
    def digests(self) -> dict[str, str]:
        """The digests of what the training reads, such as that of the "training labels"."""
        parts = {"training": self.train, "validation": self.validation, "test": self.test}
        return {
            f"{part} {name}": digest
            for part, split in parts.items()
            if split is not None
            for name, digest in split.digests.items()
        }

    @property
    def epochs(self) -> int:
        """Passes over the training images, including a last one that `training.steps` cuts short."""
        return -(-self.total_steps // self.steps_per_epoch)

    @property
    def draws_examples(self) -> bool:
        """Whether each step draws its examples by `augment.Drawn`, in place of those of an order."""
        return self.config.data.field is not None

    @property
    def examples_per_epoch(self) -> int:
        """The number of examples in a complete epoch."""
        return self.full_batch * self.steps_per_epoch if self.config.data.sets_steps_per_epoch else len(self.train)

    @property
    def full_batch(self) -> int:
        """The images in a batch; the last batch of an epoch can be smaller. A field can have fewer elements."""
        size = self.config.data.batch_size
        return size if self.draws_examples else min(size, len(self.train))

    @property
    def batch_note(self) -> str | None:
        """What to tell the user about a batch size that the config does not set, or that is larger than the data."""
        given, examples = self.config.data.batch_size, len(self.train)
        if self.full_batch < given:
            return f"data.batch_size {given} exceeds the {examples:,} training examples: each step takes all of them"
        return None if "batch_size" in self.config.data.model_fields_set else f"data.batch_size is {given} by default"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @cached_property
    def config_text(self) -> str:
        """The resolved config as YAML. Cached, because every model file and checkpoint contains it."""
        return config.dump(self.config)

    @property
    def best_by(self) -> str:
        """The metric that decides which epoch is the best."""
        default = "train_loss" if self.validation is None else f"validation_{self.network.task.default_metric}"
        return self.config.training.best_by or default

    @property
    def best_start(self) -> Best:
        """The record of the best epoch before the first one ends."""
        return Best.start(self.best_by, higher_is_better(self.best_by.partition("_")[2], self.metrics))

    def best_after(self, best: Best, epoch: ScoredEpoch) -> Best:
        """The record of the best epoch after another one ended."""
        stopping = self.config.training.early_stopping
        min_delta = stopping.min_delta if stopping else 0.0
        return best.after(epoch, min_delta)

    def stops_early(self, best: Best) -> bool:
        """Whether early stopping ends a training with this record of the best epoch."""
        stopping = self.config.training.early_stopping
        return stopping is not None and best.waited >= stopping.patience

    @property
    def restores_best(self) -> bool:
        """Whether the training ends with the state of the best epoch, and not with that of the last one."""
        training = self.config.training
        if training.final_model is not None:
            return training.final_model == "best"
        return self.validation is not None or training.early_stopping is not None

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """The metrics by name, in addition to those of the task."""
        return metrics_of(self.config, self.network.task)

    def initial_state(self, device: str, random: bool = False) -> TrainState:
        """The state before the first step; no two arrays share memory, because a step may overwrite each of them.

        Weights are drawn from the config's seed, computed from training images, or read from `training.init_from`; with
        `random` no file is read. Raises AdtrainError where the file cannot be read or does not fit.
        """
        numbers = self.initial_numbers(None if random else self.config.training.init_from)
        found: TrainState = tree.map(lambda x: array(x, device=device), numbers)
        return found

    def initial_numbers(self, init_from: str | None) -> TrainState:
        """`initial_state` with weights from `init_from`, as NumPy arrays that must not be written to. Those of zeros
        are broadcast views of one number."""
        seed = np.random.SeedSequence(self.config.training.seed, spawn_key=(INIT_STREAM,))
        found: TrainState = tree.map(lambda x: x.buffer, self._initial_arrays(init_from, np.random.default_rng(seed)))
        return found

    def _initial_arrays(self, init_from: str | None, rng: np.random.Generator) -> TrainState:
        training = self.config.training
        params, statistics = self.network.model.new_arrays(self.network.input_shape, rng, self.network.dtype)
        trees = nn.with_weights(params, self.input_weights), statistics
        if init_from is not None:
            partial = bool(training.init_partial)
            if training.names is None:
                trees = initial_weights(Path(init_from), *trees, partial=partial)
            else:
                table = names.table_of(training.names)
                expected = {at: x for at, x in tensor_file.named(*trees).items() if not nn.is_low_rank(at)}
                arrays = names.read(Path(init_from), table, self.network.model, expected, partial)
                trees = tensor_file.replaced(*trees, arrays)
        params, statistics = trees
        state = TrainState(params, statistics, self.optimizer.init(params))
        if self.average is not None:
            state.optimizer[AVERAGE] = self.average.init(params, statistics)
        if self.plateau is not None:
            state.optimizer[PLATEAU] = self.plateau.init()
        if self.config.data.points is not None and self.config.data.point_options.adaptive:
            first = np.asarray(self.train.images[: self.full_batch])
            state.optimizer[POINTS] = array(first.astype(self.network.dtype))
        return state

    @property
    def plateau(self) -> optim.Plateau | None:
        """The schedule, if it lowers the rate where the loss stops falling."""
        return optim.plateau_of(self.schedule)

    @cached_property
    def buckets(self) -> Buckets | None:
        """The division of gradients and optimizer state among ranks; None for one shard."""
        return None if self.sharding is None else Buckets(self.state_types.params, self.sharding, self.optimizer)

    @cached_property
    def state_types(self) -> TrainState:
        """Placeholders for `initial_state`, on the host."""
        return placeholders(self._initial_arrays(None, TypesOnly()), "cpu")

    @cached_property
    def divided_types(self) -> TrainState:
        """Placeholders for this rank's part of a state, on the host."""
        if self.buckets is None:
            return self.state_types
        zeros = tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), self.state_types)
        return placeholders(self.divided(zeros), "cpu")

    def divided(self, state: TrainState) -> TrainState:
        """This rank's part of a state on the host: the vectors of `Buckets`, and slices of the optimizer's averages."""
        if self.buckets is None:
            return state
        optimizer = _with_params(self.buckets.divided_state(state.optimizer), self.buckets.flatten)
        return TrainState(self.buckets.flatten(state.params), state.statistics, optimizer)

    def whole(self, state: TrainState) -> TrainState:
        """The whole state on the host, from this rank's part; the reverse of `divided`. All ranks call it together."""
        if self.buckets is None:
            return state
        optimizer = self.buckets.whole_state(state.optimizer, self.state_types.optimizer)
        optimizer = _with_params(optimizer, self.buckets.unflatten_numpy)
        return TrainState(self.buckets.unflatten_numpy(state.params), state.statistics, optimizer)

    def without_padding(self, state: TrainState) -> TrainState:
        """This rank's part of a state on a device, without the padding of vectors.

        An optimizer updates the padding too. Without `eps` it divides 0 by 0 there.
        """
        if self.buckets is None:
            return state
        optimizer = self.buckets.without_padding(state.optimizer, self.state_types.optimizer)
        unflatten = partial(self.buckets.unflatten, subview=subview)
        return TrainState(unflatten(state.params), state.statistics, _with_params(optimizer, unflatten))

    def with_params(self, state: TrainState) -> TrainState:
        """A divided state on the device whose parameters are a tree, not vectors."""
        if self.buckets is None:
            return state
        params = self.buckets.unflatten_numpy([x.numpy() for x in tree.leaves(state.params)])
        return state._replace(params=tree.map(lambda x: array(x, device=state.step.device), params))

    def part(self, batch: np.ndarray) -> np.ndarray:
        """This rank's indices of a batch of indices."""
        return batch if self.sharding is None else self.sharding.part(batch)

    def batch_arguments(self, size: int) -> tuple[int, ...]:
        """The arguments of a step after the indices, for a batch that has `size` examples over all ranks."""
        return () if self.sharding is None else (size,)

    def seed(self, device: str) -> Array:
        """The config's seed as the step's argument: uint32 (2,), low word first; see `shard_seeds` for shards."""
        seed = self.config.training.seed
        words = array(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), device=device)
        return words if self.buckets is None else shard_seeds(words, self.buckets)

    @cached_property
    def train_step(self) -> TrainStep:
        """The step in `mode`. A staged step donates its state argument."""
        return self.eager_step if self.mode is Mode.EAGER else stage(self.eager_step, self.passes, donate=STATE)

    @cached_property
    def logged_step(self) -> LoggedStep:
        """`train_step` on the next batch of an order, in `mode`. A staged step donates state and log."""
        return self._in_mode(logged_step(self.eager_step), "step", STATE_AND_LOG)

    @cached_property
    def evaluation_step(self) -> EvaluationStep:
        """The evaluation of the next batch of an order, in `mode`. A staged step donates the totals."""
        step = evaluation_step(self.network)
        if self.buckets is not None:
            step = evaluation_of_vectors(step, self.buckets)
        return self._in_mode(step, "evaluation", TOTALS)

    @cached_property
    def finite_check(self) -> Callable[[TrainState], Value]:
        """Whether all numbers of a divided state on a device are finite, as bool (), in `mode`."""
        return self._in_mode(lambda state: all_finite(self.without_padding(state)), "finite check")

    def _in_mode(self, function: Callable[..., Any], name: str, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """The function in `mode`. A staged one donates these arguments, and takes its Programs from the cache."""
        if self.mode is Mode.EAGER:
            return function
        return stage(function, self.passes, donate=donate, cache=self._program_cache(name))

    def _program_cache(self, name: str) -> PersistentProgramCache | None:
        """The cached Programs of the function `name`; None if they depend on code of the user or on ranks.

        The seed is an argument of the Programs, so all seeds share them.
        """
        cfg, net = self.config, self.network
        specs = [cfg.model.layers, cfg.loss, cfg.optimizer, cfg.schedule, cfg.training.average, cfg.data.augment]
        of_package = all(target.__module__.partition(".")[0] == "adtrain" for target in targets(specs))
        if self.sharding is not None or cfg.plugins or not of_package:
            return None
        of_data = net.input_shape, net.dtype, net.mean, net.std, net.scale, self.steps_per_epoch, self.total_steps
        seedless = config.dump(cfg.without_seed())
        return PersistentProgramCache(name, self.mode, seedless, net.model, net.task, net.products, of_data)

    @property
    def passes(self) -> Sequence[Pass]:
        """The passes that are applied to the step's Program."""
        passes = ALL if self.mode is Mode.FUSED else SIMPLIFY
        return passes if self.sharding is None else passes_of_ranks(passes)

    def step_program(self, device: str = "cpu", passes: Sequence[Pass] | None = None) -> Program:
        """The Program of the logged step on full batches, after `passes` (default: `self.passes`). Nothing is run."""
        step = stage(logged_step(self.eager_step), self.passes if passes is None else passes, donate=STATE_AND_LOG)
        return step.program(*self._placeholders(device))

    def compiled_step(self, device: str) -> Executable | None:
        """What runs the logged step on full batches, if it was compiled."""
        if not isinstance(self.logged_step, Staged):
            return None
        return self.logged_step.executable(*self._placeholders(device))

    def _placeholders(self, device: str) -> tuple[Any, ...]:
        """The arguments of the logged step on full batches, without elements."""
        given = placeholders(self._step_argument_types, device).values()
        return (*given, *self.batch_arguments(self.full_batch))

    @property
    def step_inputs(self) -> Sequence[str]:
        """The names of the inputs of `step_program`, such as "0.weight", "adam.exp_avg.0.weight" and "images"."""
        names = {"state.params.": "", "state.statistics.": "", "state.optimizer": self.config.optimizer.kind}
        found = tree.paths(self._step_argument_types)
        for prefix, name in names.items():
            found = [path.replace(prefix, name, 1) if path.startswith(prefix) else path for path in found]
        return found

    @cached_property
    def _step_argument_types(self) -> dict[str, Any]:
        """The arguments of `logged_step`, as placeholders."""
        indices = self.part(np.zeros(self.full_batch, np.int64))
        return placeholders(self.step_arguments(self.divided_types, indices), "cpu")

    def step_arguments(self, state: TrainState, indices: np.ndarray) -> dict[str, Any]:
        """The arguments of `logged_step` by name, on the host.

        Args:
            state: this rank's part of a state.
            indices: this rank's part of the indices of a batch, which each row of the order has.
        """
        return {
            "state": state,
            "log": empty_log(self.network.task, LOG_ROWS, "cpu"),
            "seed": self.seed("cpu"),
            "images": self.train.images,
            "labels": self.train.labels,
            "order": np.broadcast_to(indices, (LOG_ROWS, len(indices))),
        }

    @property
    def step_parts(self) -> StepParts:
        """What the step consists of."""
        training = self.config.training
        return StepParts(
            network=self.network,
            optimizer=self.optimizer,
            schedule=self.schedule,
            clip_norm=training.clip_norm,
            clip_value=training.clip_value,
            augmentations=self.augmentations,
            steps_per_epoch=self.steps_per_epoch,
            average=self.average,
            plateau=self.plateau,
        )

    @property
    def eager_step(self) -> TrainStep:
        """The step, run operation by operation. It does not modify its arguments."""
        return train_step(self.step_parts) if self.buckets is None else ShardedStep(self.step_parts, self.buckets)


def placeholders(values: T, device: str) -> T:
    """The arrays of a tree without their elements, on the device."""
    found: T = tree.map(lambda x: Placeholder(x.shape, x.dtype, device), values)
    return found


def _with_params(optimizer: optim.OptState, changed: Callable[[Any], Any]) -> optim.OptState:
    """An optimizer's state with `changed` of the parameters in the average, if there is one."""
    if AVERAGE not in optimizer:
        return optimizer
    average = optimizer[AVERAGE]
    return {**optimizer, AVERAGE: {**average, "params": changed(average["params"])}}
