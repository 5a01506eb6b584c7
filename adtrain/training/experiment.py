"""A config joined with its data: everything that training needs, checked before anything is trained or written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from adtrain import config, data, nn, optim
from adtrain.config import Config
from adtrain.config.problems import found, known
from adtrain.core import tree
from adtrain.core.array import Array, array
from adtrain.core.staging import stage
from adtrain.data import DataSet, Split
from adtrain.passes import SIMPLIFY
from adtrain.training import network
from adtrain.training.network import Network
from adtrain.training.step import TrainState, TrainStep, train_step

# The streams of the seed that `data` leaves free start here.
INIT_STREAM = 16


@dataclass(frozen=True)
class Experiment:
    """What is trained, on what, and for how long. Made by `prepare`."""

    config: Config
    network: Network
    data: DataSet
    train: Split
    validation: Split | None
    test: Split
    optimizer: optim.Optimizer
    schedule: optim.Schedule
    steps_per_epoch: int
    total_steps: int
    eager: bool = False

    @property
    def epochs(self) -> int:
        """Passes over the training images, counting the last one where `training.steps` cuts it short."""
        return -(-self.total_steps // self.steps_per_epoch)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    def initial_state(self, device: str) -> TrainState:
        """The state before the first step, drawn from the config's seed."""
        rng = np.random.default_rng(np.random.SeedSequence(self.config.training.seed, spawn_key=(INIT_STREAM,)))
        trees = self.network.model.init(self.network.input_shape, rng, self.network.dtype)
        params, statistics = tree.map(lambda x: x.to(device), trees)
        return TrainState(params, statistics, self.optimizer.init(params))

    def seed(self, device: str) -> Array:
        """The config's seed as the step takes it: uint32 (2,), low word first."""
        seed = self.config.training.seed
        return array(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), device=device)

    @cached_property
    def train_step(self) -> TrainStep:
        """The step, staged as a Program unless `eager`."""
        training = self.config.training
        step = train_step(self.network, self.optimizer, self.schedule, training.clip_norm, training.clip_value)
        return step if self.eager else stage(step, SIMPLIFY)


def prepare(cfg: Config, eager: bool = False) -> Experiment:
    """Build the model, read the data, and check that they fit together.

    Raises:
        ConfigError: the model's layers do not fit together, or do not fit the data.
        DataError: the data are missing or damaged.
    """
    cfg = _with_absolute_path(cfg)
    if cfg.data.dataset is not None and cfg.data.dataset not in data.CATALOGUE:
        unknown = f"unknown data set {found(cfg.data.dataset)}; {known(cfg.data.dataset, data.CATALOGUE)}"
        raise cfg.refused(("data", "dataset"), unknown)
    images = data.load(cfg.data.dataset, cfg.data.path)
    net = network.build(cfg, images.mean, images.std)
    _check_fit(cfg, net, images)
    train, validation = data.split_validation(images.train, cfg.data.validation, cfg.training.seed)
    _check_last_batch(cfg, net, len(train))
    steps_per_epoch = -(-len(train) // cfg.data.batch_size)
    total_steps = steps_per_epoch * cfg.training.epochs
    if cfg.training.steps is not None:
        total_steps = min(total_steps, cfg.training.steps)
    return Experiment(
        config=cfg,
        network=net,
        data=images,
        train=train,
        validation=validation,
        test=images.test,
        optimizer=config.build.optimizer(cfg),
        schedule=config.build.schedule(cfg, steps_per_epoch, total_steps),
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        eager=eager,
    )


def _with_absolute_path(cfg: Config) -> Config:
    """The same config, its data found from any folder: a run's copy of it is used from other ones."""
    if cfg.data.path is None:
        return cfg
    path = os.path.abspath(os.path.expanduser(cfg.data.path))
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"path": path})})


def _check_fit(cfg: Config, net: Network, images: DataSet) -> None:
    shape = images.train.images.shape[1:]
    if net.input_shape not in (shape, (prod(shape),)):
        expected = f"expected {found(shape)}, the shape of the images, or [{prod(shape)}] for flat input"
        raise cfg.refused(("model", "input"), f"found {found(net.input_shape)}, {expected}")
    outputs, classes = net.model.output_shape(net.input_shape), len(images.classes)
    last_layer = ("model", "layers", len(cfg.model.layers) - 1)
    if len(outputs) != 1:
        raise cfg.refused(last_layer, f"found the output {found(outputs)}, expected [{classes}], one a class")
    if outputs[0] < classes:
        labels = f"the labels of {cfg.data.path or images.name} are 0 to {classes - 1}"
        raise cfg.refused(last_layer, f"found {outputs[0]} outputs, expected at least {classes}: {labels}")
    if not any(row.parameters for row in nn.describe(net.model, net.input_shape)):
        raise cfg.refused(("model", "layers"), "found no parameters, expected a layer that has some to train")


def _check_last_batch(cfg: Config, net: Network, count: int) -> None:
    """Batch normalisation has no variance in a batch of one value a channel, and such a batch comes last."""
    batch_size = cfg.data.batch_size
    if batch_size > 1 and count % batch_size != 1 and count > 1:
        return
    for row in nn.describe(net.model, net.input_shape):
        if row.kind.startswith("batch_norm") and prod(row.output_shape[1:]) == 1:
            raise cfg.refused(
                ("data", "batch_size"),
                f"found {batch_size}, which leaves 1 of {count} images for the last batch, "
                f"expected another size: layer {row.name} ({row.kind}) needs 2 images a batch",
            )
