"""From a config to an experiment: reads the data, builds the model, and checks that they fit together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adtrain import config, data
from adtrain.config import Config, ConfigError, plugged
from adtrain.config.build import REGRESSION
from adtrain.config.document import Plugin
from adtrain.config.problems import PathParts
from adtrain.core import communicator
from adtrain.core.backend import backend
from adtrain.data import DataError, DataOptionError, DataSet, Split, points
from adtrain.data.errors import printable
from adtrain.data.file_array import machine_memory
from adtrain.data.table_encoder import TableEncoder
from adtrain.data.tokenizer import Tokenizer
from adtrain.nn import Shape
from adtrain.training import checks, equations, network
from adtrain.training.costs import planned_peak
from adtrain.training.experiment import Experiment, Mode
from adtrain.training.loop import largest
from adtrain.training.sharding import Sharding


class Arrays(NamedTuple):
    """A data set in memory as `data.of_arrays` takes it: pairs of images and labels, the second one or None; or a table
    and None."""

    data: Any
    test_data: Any = None


def read_data(
    cfg: Config,
    arrays: Arrays | None = None,
    encoder: TableEncoder | None = None,
    classes: tuple[str, ...] = (),
    offset: tuple[float, ...] | None = None,
    tokenizer: Tokenizer | None = None,
) -> DataSet:
    """The data of a config, or those in `arrays`.

    `encoder` makes the images of a table's rows; by default it is learnt from the training part. `classes` are those of
    a text, and `tokenizer` makes its tokens; by default both are those of the text. `offset` is that of a trained
    network; by default it is learnt.
    Raises ConfigError for an option that does not fit the data, and DataError where they are missing or damaged.
    """

    if cfg.data.points is not None:
        return equations.read_data(cfg)
    if (field := cfg.data.field) is not None:
        kind, file = field
        return points.load_field(file, kind)

    def read(numbers: bool) -> DataSet:
        options = cfg.data.options
        shift = offset if cfg.data.normalize else ()
        if arrays is None:
            return data.load(
                _source(cfg),
                cfg.data.path,
                options,
                encoder=encoder,
                numbers=numbers,
                classes=classes,
                offset=shift,
                tokenizer=tokenizer,
            )
        return data.of_arrays(*arrays, options, numbers, shift)

    try:
        if cfg.model.input_shape:
            return read(takes_numbers(cfg))
        data_set = read(False)
        numbers = not data_set.targets and takes_numbers(with_shape(cfg, data_set.train.images.shape[1:]))
        return read(True) if numbers else data_set
    except DataOptionError as error:
        raise cfg.error_at(("data", error.option), error.reason) from error


def _source(cfg: Config) -> Any:
    """What `data.dataset` names: an entry of the catalogue, or a function of a plug-in; None without it."""
    return config.build.data_source(cfg) if cfg.data.dataset is not None else None


def takes_numbers(cfg: Config) -> bool:
    """Whether integer labels are numbers to predict: a regression loss compares them with a single output."""
    return cfg.loss.kind in REGRESSION and config.build.model(cfg).output_shape(cfg.model.input_shape) == (1,)


def with_input(cfg: Config) -> Config:
    """The config with `model.input`. Where that is missing, it is that of the data; all but texts are read for it.

    Raises ConfigError and DataError as `read_data` and `with_shape` do.
    """
    if cfg.model.input_shape:
        return cfg
    if cfg.data.is_text:
        return with_shape(cfg, (1, 1, cfg.data.options.length))
    if isinstance(entry := _source(cfg), data.Entry):
        return with_shape(cfg, entry.shape)
    return with_shape(cfg, read_data(cfg).train.images.shape[1:])


def with_shape(cfg: Config, shape: Shape) -> Config:
    """The config with `model.input` for images of this shape (C, H, W), if it is missing.

    It is the number of features for rows of a table, (length,) for a text, and flat too if the first layer is linear. A
    recurrent first layer gets rows of pixels, if there is one channel.
    Raises ConfigError where the layers do not fit it.
    """
    if cfg.model.input_shape:
        return cfg
    first = cfg.model.layers[0].kind
    if shape[1:] == (1, 1) or first == "linear" or cfg.data.is_text:
        shape = (prod(shape),)
    elif shape[0] == 1 and first in ("rnn", "lstm", "gru"):
        shape = shape[1:]
    cfg = cfg.changed("model", input=shape)
    if problems := config.build.check(cfg):
        raise ConfigError(problems)
    return cfg


def prepare(
    cfg: Config,
    mode: Mode = Mode.FUSED,
    arrays: Arrays | None = None,
    read: Callable[[], DataSet] | None = None,
    device: str | None = None,
) -> Experiment:
    """Build the model, read the data, and check that they fit together.

    Args:
        arrays: the data. `data.path` is then only a name: the file that they are stored in, if any.
        read: returns the result of `read_ahead`, or raises its errors. None: the data are read here.
        device: that of the training, for `training.micro_batch: auto`. All ranks call this together.

    Raises:
        ConfigError: the model's layers do not fit together, or layers, augmentations or an option do not fit the data.
        DataError: the data are missing or damaged.
    """
    if cfg.sweep is not None:
        advice = "adtrain sweep trains its members, and --set sweep=null leaves it out"
        raise cfg.error_at(("sweep",), f"found a sweep, expected none for one training: {advice}")
    cfg, fits = with_absolute_paths(cfg, data_too=arrays is None), None
    if cfg.training.micro_batch == "auto" and cfg.data.shards is None and device is not None:
        cfg, fits = cfg.changed("training", micro_batch=None), device
    cfg = with_shards(cfg)
    data_set = read_data(cfg, arrays) if read is None else read()
    experiment = of_data(cfg, data_set, mode)
    if fits is None or (shards := fitting_shards(experiment, fits)) == (cfg.data.shards or 1):
        return experiment
    return of_data(cfg.changed("data", shards=shards), data_set, mode)


def read_ahead(cfg: Config) -> DataSet:
    """The data of a config, for `prepare`; it can run in another thread. Raises the data errors of `prepare`."""
    return read_data(with_absolute_paths(cfg))


def of_data(cfg: Config, data_set: DataSet, mode: Mode = Mode.FUSED) -> Experiment:
    """`prepare` for a config with absolute paths and its data, whose training part includes the validation images."""
    if len(data_set.classes) == 1 and not cfg.data.is_text:
        name, place = printable(data_set.classes[0]), cfg.data.path or data_set.name
        raise DataError(f"{place}: found one class, {name}, in all examples; expected at least two to tell apart")
    cfg = with_shape(cfg, data_set.train.images.shape[1:])
    if data_set.validation_rows and cfg.data.validation:
        there = f"{cfg.data.path} has a folder of validation images"
        if cfg.data.is_text:
            there = "data.validation_tokens is set"
        raise cfg.error_at(("data", "validation"), f"found {cfg.data.validation}, but {there}; remove this key")
    if cfg.data.is_text and data_set.validation_rows >= len(data_set.train):
        most = (len(data_set.train) - 1) * cfg.data.options.length
        found = f"found {cfg.data.options.validation_tokens:,}, expected at most {most:,}, so that a sequence is left"
        raise cfg.error_at(("data", "validation_tokens"), found)
    train, validation = data.split_validation(
        data_set.train, cfg.data.validation, cfg.training.seed, data_set.validation_rows
    )
    if validation is None and cfg.training.validate_every is not None:
        reason = "expected none, for there are no validation examples (data.validation)"
        raise cfg.error_at(("training", "validate_every"), f"found {cfg.training.validate_every}, {reason}")
    if cfg.data.options.order == "random_offsets":
        train = train.at_offsets()
    token_bytes = () if data_set.tokenizer is None else data_set.tokenizer.tokens
    if cfg.data.points is None:
        robust = cfg.data.normalize_targets == "robust"
        data_set = replace(data_set, robust_targets=robust).with_train(train)
    experiment = _experiment(cfg, data_set, validation, mode, token_bytes)
    checks.check_augmentations(experiment)
    checks.check_embeddings(experiment)
    if cfg.data.is_text and (seen := checks.sees_later(experiment)):
        reason = f"the output at position {seen[0]} depends on the input at position {seen[1]}, which it has to predict"
        raise cfg.error_at(("model", "layers"), f"{reason}; expected layers that use earlier positions only")
    return experiment


def outline(cfg: Config) -> Experiment:
    """The experiment with placeholder data, to get its Program: images are black, labels are 0.

    No file is read if the config has `model.input`. A data set of the catalogue has its real image counts and shape.
    Other data are assumed to be one batch of images in the shape of the model's input, with one class, or one number to
    predict, per output of the model. There is such a batch for the validation if `training.best_by` needs one.
    Raises ConfigError as `prepare` does, but does not check augmentations, because the images' shape is a guess.
    """
    cfg = with_shards(with_input(cfg))
    size = cfg.data.batch_size
    if cfg.data.sets_steps_per_epoch:
        if cfg.data.field:
            numbers = prod(config.build.model(cfg).output_shape(cfg.model.input_shape))
            data_set = points.field_placeholder(cfg.name, size, prod(cfg.model.input_shape), numbers)
        else:
            data_set = read_data(cfg)
        return _experiment(cfg, data_set, None, Mode.FUSED)
    if isinstance(entry := _source(cfg), data.Entry):
        held_out = data.validation_size(entry.train_images, cfg.data.validation)
        train, test = _black(entry.train_images - held_out, entry.shape), _black(entry.test_images, entry.shape)
        validation = _black(held_out, entry.shape) if held_out else None
        neutral = (0.0,) * entry.shape[0], (1.0,) * entry.shape[0]
        mean, std = (entry.mean, entry.std) if entry.mean else neutral
        data_set = DataSet(entry.name, train, test, entry.classes, mean, std)
    else:
        shape = cfg.model.input_shape
        if len(shape) != 3:
            shape = (1, 1, prod(shape))
        split, outputs = _black(size, shape), config.build.model(cfg).output_shape(cfg.model.input_shape)
        if cfg.data.is_text:
            tokens = np.broadcast_to(np.float32(0), (size, *shape)), np.broadcast_to(np.int32(0), (size, prod(shape)))
            split, outputs = Split(*tokens), outputs[-1:]
        names = tuple(map(str, range(prod(outputs))))
        name = cfg.data.dataset.kind if cfg.data.dataset is not None else str(cfg.data.path)
        data_set = DataSet(name, split, split, names, (0.0,) * shape[0], (1.0,) * shape[0])
        if cfg.data.options.target is not None or takes_numbers(cfg):
            split = Split(split.images, np.broadcast_to(np.float64(0), (size, len(names))))
            data_set = replace(data_set, test=split, classes=(), targets=names).with_train(split)
        validation = split if (cfg.training.best_by or "").startswith("validation") else None
    token_bytes = [b""] * len(data_set.classes) if cfg.data.options.unit == "token" else ()
    return _experiment(cfg, data_set, validation, Mode.FUSED, token_bytes)


def _black(count: int, shape: tuple[int, ...]) -> Split:
    """`count` black images of `shape` (C, H, W), as broadcast views of one pixel."""
    return Split(np.broadcast_to(np.uint8(0), (count, *shape)), np.broadcast_to(np.int64(0), (count,)))


def _experiment(
    cfg: Config, data_set: DataSet, validation: Split | None, mode: Mode, token_bytes: Sequence[bytes] = ()
) -> Experiment:
    if cfg.data.points is None:
        checks.check_targets(
            cfg, data_set, [part for part in (data_set.train, validation, data_set.test) if part is not None]
        )
    cfg = with_class_weights(cfg, np.asarray(data_set.train.labels), len(data_set.classes))
    end_of_text = 0 if data_set.tokenizer is None else data_set.tokenizer.end_of_text
    task = network.task_of(cfg, data_set.target_mean, data_set.target_std, token_bytes, end_of_text)
    net = equations.build(cfg, data_set.mean, data_set.std, data_set.scale, task)
    checks.check_documents(cfg, net)
    checks.check_memory(cfg, net)
    checks.check_fit(cfg, net, data_set)
    checks.check_views(cfg, net, data_set.train.images.shape[1:])
    checks.warn_of_lost_digits(cfg, net, data_set)
    checks.check_last_batch(cfg, net, len(data_set.train))
    if validation is None and (cfg.training.best_by or "").startswith("validation"):
        reason = "expected train_accuracy or train_loss, for there are no validation examples (data.validation)"
        raise cfg.error_at(("training", "best_by"), f"found {cfg.training.best_by}, {reason}")
    checks.check_metrics(cfg, task)
    checks.check_equations(cfg, net, len(data_set.train))
    steps_per_epoch = -(-len(data_set.train) // cfg.data.batch_size)
    if cfg.data.sets_steps_per_epoch:
        steps_per_epoch = cfg.data.point_options.steps_per_epoch
    ends = [] if cfg.training.steps is None else [cfg.training.steps]
    if cfg.training.epochs is not None:
        ends.append(steps_per_epoch * cfg.training.epochs)
    total_steps = min(ends)
    schedule = config.build.schedule(cfg, steps_per_epoch, total_steps)
    checks.warn_of_warm_up(cfg, schedule, total_steps)
    return Experiment(
        config=cfg,
        network=net,
        data=data_set,
        validation=validation,
        optimizer=config.build.grouped_optimizer(cfg, net.parameter_shapes),
        schedule=schedule,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        augmentations=(*config.build.augmentations(cfg), *equations.resampling(cfg, net)),
        mode=mode,
        average=config.build.average(cfg),
        input_weights=net.input_weights(data_set.train.images),
        sharding=_sharding(cfg, len(data_set.train)),
    )


MOST_SHARDS = 4096
"""The largest number of `data.shards`."""


def with_class_weights(cfg: Config, labels: np.ndarray, classes: int) -> Config:
    """The config with numbers in place of `weight: balanced` of its loss.

    As in scikit-learn, the weight of a class is the number of examples divided by the number of classes and by the
    number of its own examples. A class without any has the weight of one example.
    """
    if cfg.loss.options().get("weight") != "balanced":
        return cfg
    counts = np.maximum(np.bincount(labels.reshape(-1), minlength=classes), 1)
    weight = tuple((labels.size / (len(counts) * counts)).tolist())
    return cfg.changed("loss", weight=weight)


def fitting_shards(experiment: Experiment, device: str) -> int:
    """The least number of shards, from the experiment's on, with which a step fits on the device of each rank.

    The most shards that leave two examples in each, if no number fits.
    """
    cfg, batch = experiment.config, experiment.full_batch
    limit = backend(device).available() or machine_memory()
    shards: int = cfg.data.shards or 1
    while 2 * shards <= min(MOST_SHARDS, batch // 2):
        divided = cfg.changed("data", shards=shards)
        candidate = replace(experiment, config=divided, sharding=_sharding(divided, len(experiment.train)))
        if limit is None or planned_peak(candidate, device) <= limit:
            break
        shards *= 2
    return largest(shards)


def with_shards(cfg: Config) -> Config:
    """The config with `data.shards` in place of `training.micro_batch`; by default one for each rank.

    Unchanged where there is one rank and no `micro_batch`.
    """
    ranks = communicator.current().size
    if (size := cfg.training.micro_batch) is not None:
        if cfg.data.shards is not None:
            raise cfg.error_at(
                ("training", "micro_batch"), f"found {size} and data.shards {cfg.data.shards}, expected one of them"
            )
        if isinstance(size, str):
            reason = "expected a number of examples: only a training knows the memory of its device"
            raise cfg.error_at(("training", "micro_batch"), f"found {size}, {reason}")
        shards = 1
        while shards < ranks or shards * size < cfg.data.batch_size:
            shards *= 2
        if shards > (most := min(MOST_SHARDS, cfg.data.batch_size)):
            parts = f"which divides batches of {cfg.data.batch_size} into {shards} parts, expected at most {most}"
            raise cfg.error_at(("training", "micro_batch"), f"found {size}, {parts}")
        return cfg.changed("training", micro_batch=None).changed("data", shards=shards)
    if cfg.data.shards is not None or ranks == 1:
        return cfg
    if ranks & (ranks - 1):
        raise cfg.error_at(
            ("data", "shards"), f"found {ranks} ranks and no data.shards, expected a power of two of ranks"
        )
    return cfg.changed("data", shards=ranks)


def _sharding(cfg: Config, examples: int) -> Sharding | None:
    """The division of batches, or None for one shard. Raises ConfigError where ranks or batches do not fit it."""
    shards, ranks, batch = cfg.data.shards or 1, communicator.current(), min(cfg.data.batch_size, examples)
    if ranks.size & (ranks.size - 1):
        raise cfg.error_at(("data", "shards"), f"found {ranks.size} ranks, expected a power of two of ranks")
    if shards % ranks.size:
        expected = f"expected a multiple of the number of ranks, {ranks.size}"
        raise cfg.error_at(("data", "shards"), f"found {shards}, {expected}")
    if shards > batch:
        raise cfg.error_at(("data", "shards"), f"found {shards} shards of batches of {batch}, expected at most {batch}")
    return Sharding(shards, ranks.size, ranks.rank) if shards > 1 else None


def with_absolute_paths(cfg: Config, data_too: bool = True) -> Config:
    """The config with absolute paths, so that the copy in the run's folder works from any directory."""
    data_keys = ["path", "test_path", "tokenizer", "measurements", "sdf", "image", "volume"] if data_too else []
    if data_too and cfg.data.reference_file is not None:
        data_keys.append("reference")
    for name, keys in {"data": data_keys, "training": ["init_from"]}.items():
        section = getattr(cfg, name)
        cfg = cfg.changed(name, **{key: _absolute(cfg, (name, key), getattr(section, key)) for key in keys})
    if cfg.plugins is not None:  # `RunFolder` writes copies of the files
        cfg = cfg.model_copy(update={"plugins": [_copied(plugin) for plugin in cfg.plugins]})
    return cfg


def _copied(plugin: Plugin) -> Plugin:
    """The plug-in with the path of its copy in the run's folder."""
    if not plugin.file.endswith(".py"):
        return plugin
    return plugin.model_copy(update={"file": f"{plugged.FOLDER}/{Path(plugin.file).name}"})


def _absolute(cfg: Config, key: PathParts, path: str | None) -> str | None:
    if path is None:
        return None
    absolute = os.path.abspath(os.path.expanduser(path))
    try:
        absolute.encode()
    except UnicodeEncodeError:
        raise cfg.error_at(key, f"found the path {absolute}, expected one in UTF-8, as config.yaml stores it") from None
    return absolute
