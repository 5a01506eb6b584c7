"""model.safetensors: a trained model's arrays, and the metadata needed to apply it to images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from adtrain import config, nn
from adtrain.config import Config
from adtrain.config.overrides import Overrides
from adtrain.config.plugged import NONE, Trust
from adtrain.config.records import plain
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.errors import AdtrainError
from adtrain.core.precision import FULL
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.data import DataSet, Options, Split, csv_table, formats, npz, of_arrays, text_file
from adtrain.data import load as load_data
from adtrain.data.datasets import ClassType, class_values
from adtrain.data.errors import printable
from adtrain.data.formats import FileFormat
from adtrain.data.image_folder import ImageOptions
from adtrain.data.part import Known
from adtrain.data.statistics import PIXEL_MAX
from adtrain.data.table_encoder import TableEncoder, is_rows
from adtrain.data.tokenizer import Tokenizer
from adtrain.passes import ALL
from adtrain.text import counted, first_names
from adtrain.training import equations, network, tensor_file
from adtrain.training.checkpoint import ModelMetadata, of_model
from adtrain.training.checks import check_targets, check_views
from adtrain.training.evaluation import Evaluation
from adtrain.training.examples import on_device
from adtrain.training.experiment import TOTALS, Experiment
from adtrain.training.network import Network
from adtrain.training.preparation import Arrays, read_data, takes_numbers, with_absolute_paths
from adtrain.training.step import EvaluationStep, TrainState, evaluation_step
from adtrain.training.tensor_file import TensorFile


@dataclass(frozen=True)
class TrainedModel:
    """A network with its trained arrays on a device.

    `classes` are the names of the classes, `targets` those of the numbers or labels to predict; one of them is empty.
    `image_shape` is (C, H, W). `encoder` makes the images of a table's rows; it is None if the network was trained on
    other data. `class_type` is the type of the labels whose texts `classes` has. `tokenizer` is that of a text of
    tokens.
    """

    config: Config
    network: Network
    params: nn.Params
    statistics: nn.State
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    encoder: TableEncoder | None = None
    targets: tuple[str, ...] = ()
    class_type: ClassType = "str"
    tokenizer: Tokenizer | None = None

    @classmethod
    def of(cls, experiment: Experiment, state: TrainState) -> TrainedModel:
        """The model of a state on a device."""
        data = experiment.data
        return cls(
            experiment.config, experiment.network, state.params, state.statistics, data.classes,
            experiment.image_shape, data.encoder, data.targets, data.class_type, data.tokenizer,
        )  # fmt: skip

    @property
    def known(self) -> Known:
        """What was learnt from the training part, for readers of data."""
        return Known(None if self.encoder is None else self.encoder.columns, self.classes, self.tokenizer)

    def test_split(
        self, path: Path | None = None, format: FileFormat | None = None, arrays: Arrays | None = None
    ) -> Split:
        """The test examples of the config; or those at `path`, without a test part all of them; or `arrays`.

        `format` is that of the file; by default the config's, or its suffix tells it. Labels are the numbers of the
        classes that have their names in the training.

        Raises:
            AdtrainError: the examples have another shape or type than in training, or classes that it did not have.
            ConfigError, DataError: as `read_data` does.
        """
        if arrays is not None:
            found, place = self._in_memory(arrays), "data"
            test = found.train
        elif path is None:
            found = self.data()
            test, place = found.test, self.config.data.path or found.name
        else:
            found, place = self._read(path, format), str(path)
            test = found.test if len(found.test) else found.train
        if self.config.data.points is None:
            check_targets(self.config, found, [test])
        if len(found.targets) != len(self.targets):
            expected, other = (counted(len(x), "targets") if x else "classes" for x in (self.targets, found.targets))
            raise AdtrainError(f"{place}: found {other}, expected {expected} as the run was trained on")
        wanted = ArrayType(self.image_shape, self.network.image_dtype)
        given = ArrayType(test.images.shape[1:], test.images.dtype)
        if given != wanted:
            raise AdtrainError(f"{place}: found images of type {given}, expected {wanted} as the run was trained on")
        if self.targets or found.classes == self.classes:
            return test
        return replace(test, labels=self._numbered(np.asarray(test.labels), found.classes, place))

    def merged(self) -> TrainedModel:
        """The same with the products of low-rank adaptation in the weights."""
        if not isinstance(self.network.model, nn.LowRankSequential):
            return self
        net = replace(self.network, model=nn.Sequential(*self.network.model.layers))
        return replace(self, network=net, params=nn.with_products(self.params))

    def data(self) -> DataSet:
        """The data of the config, with what was learnt from the training part. Raises as `read_data` does."""
        return read_data(with_absolute_paths(self.config), **self._learnt)

    @property
    def _learnt(self) -> dict[str, Any]:
        """What was learnt from the training part, as arguments of functions that read data."""
        found = {"encoder": self.encoder, "classes": self.classes, "tokenizer": self.tokenizer}
        return {**found, "offset": self.network.offset}

    def _read(self, path: Path, format: FileFormat | None) -> DataSet:
        """The data at `path`, read with those options of the config that fit their format."""
        data = self.config.data
        sdf, points = data.point_options.sdf, data.points
        of_points = {"sdf": sdf, "reference": points, "image": data.image, "volume": data.volume}
        if key := next((key for key, x in of_points.items() if x is not None), None):
            raise AdtrainError(f"{path}: found data for a run on points, expected them by --set data.{key}={path}")
        given = data.options
        if format is not None:
            given = replace(given, format=format)
        format_ = formats.format_of(path, given.format)
        options = {name: getattr(given, name) for name in given.given if name in format_.takes}
        if format_.options is ImageOptions:
            channels, height, width = self.image_shape
            options = {"channels": channels, "image_size": (height, width)} | options
        numbers = takes_numbers(self.config)
        return load_data(path=path, options=Options(**options), need_test=False, numbers=numbers, **self._learnt)

    def _in_memory(self, arrays: Arrays) -> DataSet:
        """The data in memory, read with those options of the config that fit them."""
        given = self.config.data.options
        own = (csv_table.FORMAT if is_rows(arrays.data) else npz.FORMAT).own_options
        options = Options(**{name: getattr(given, name) for name in given.given if name in own})
        return of_arrays(*arrays, options, takes_numbers(self.config), self.network.offset, False, self.encoder)

    def _numbered(self, labels: np.ndarray, classes: tuple[str, ...], place: str) -> np.ndarray:
        """The labels, numbers of `classes`, as numbers of the run's classes of the same names."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        found: np.ndarray = np.array([numbers.get(plain(name), -1) for name in classes], np.int64)[labels]
        if (unknown := found < 0).any():
            name, names = classes[labels[unknown.argmax()]], list(map(printable, self.classes))
            what = f"{unknown.sum():,} examples of classes that the run was not trained on, such as {printable(name)}"
            raise AdtrainError(f"{place}: found {what}; expected {first_names(names)}")
        return found

    def evaluation(self, split: Split, device: str, name: str = "test") -> Evaluation:
        """The evaluation on a split on the model's device; `name` is that of the split, for errors."""
        return Evaluation(self.evaluation_step, self.network.task, on_device(split, device), name)

    @cached_property
    def evaluation_step(self) -> EvaluationStep:
        """The evaluation of a batch as a staged function."""
        return stage(evaluation_step(self.network), ALL, donate=TOTALS)


def encode(experiment: Experiment, state: TrainState) -> Sequence[bytes | memoryview]:
    """The file's content in parts, from a state on the host: the same bytes for the same arrays and config.

    Tensors have the names that torch.nn.Sequential gives them.
    """
    return tensor_file.parts(tensor_file.named(state.params, state.statistics), of_model(experiment))


def config_of(run: Path, trust: Trust = NONE, overrides: Overrides = ()) -> Config:
    """The resolved config of the run in a folder, with overrides.

    Raises AdtrainError where the folder holds no run, or a plug-in that `trust` does not allow.
    """
    cfg = config.load(_config_file(run), overrides, run_plugin=trust.run)
    trust.check(cfg.plugins)
    return cfg


def settings_of(run: Path) -> dict[str, Any]:
    """The resolved config of the run in a folder as plain values, with the names that its plug-ins define.

    No plug-in is run. Raises AdtrainError where the folder holds no run.
    """
    values = config.plain(_config_file(run))
    if "plugins" in values:
        return values
    return config_of(run).model_dump(mode="json", exclude_none=True)


def _config_file(run: Path) -> Path:
    if not run.is_dir():
        what = "a file" if run.exists() else "nothing"
        hint = f"; did you mean {Path('runs') / run}?" if (Path("runs") / run / "config.yaml").is_file() else ""
        raise AdtrainError(f"{run}: found {what}, expected the folder of a run{hint}")
    if not (run / "config.yaml").is_file():
        found = "found no config.yaml, expected the folder of a run of adtrain train"
        raise AdtrainError(f"{run}: {config.sweep_for_run(run) or found}")
    return run / "config.yaml"


def load(run: Path, device: str = "cpu", trust: Trust = NONE, overrides: Overrides = ()) -> TrainedModel:
    """The trained model in a run's folder, with overrides of its config.

    It computes in the run's precision; on the CPU always with full float32 products.

    Raises:
        ConfigError: config.yaml is invalid.
        AdtrainError: a plug-in is not allowed, config.yaml or model.safetensors is missing, or the model is damaged or
            does not fit the config.
    """
    cfg = config_of(run, trust, overrides)
    path = run / tensor_file.MODEL
    if not path.is_file():
        raise AdtrainError(f"{run}: found no model.safetensors; the run ended before its first checkpoint, train again")
    file = TensorFile(path)
    about = file.metadata(ModelMetadata)
    channels, height, width = about.image_shape
    token_bytes = () if about.tokenizer is None else about.tokenizer.tokens
    end_of_text = None if about.tokenizer is None else about.tokenizer.end_of_text
    task = network.task_of(cfg, about.target_mean, about.target_std, token_bytes, end_of_text)
    net = equations.build(cfg, about.mean, about.std, about.scale, task)
    factor, summand = net.normalization()
    if not (
        len(about.mean) == len(about.std) == channels
        and len(about.targets) == len(about.target_mean) == len(about.target_std)
        and (not about.targets or net.model.output_shape(net.input_shape) == (len(about.targets),))
        and about.scale in (1, PIXEL_MAX)
        and (not cfg.data.is_text or text_file.are_classes(about.classes, cfg.data.options.unit, about.tokenizer))
        and channels * height * width == prod(cfg.model.input_shape)
        and (about.encoder is None or about.encoder.fits(cfg.data.options, about.image_shape))
        and (factor > 0).all()
        and all(np.isfinite(x).all() for x in (factor, summand))
        and _are_labels(about.classes, about.class_type)
    ):
        raise AdtrainError(f"{path}: found metadata that do not fit the model of config.yaml, train again")
    check_views(cfg, net, about.image_shape)
    if device == "cpu":
        net = replace(net, products=FULL)  # the CPU has no kernels for other precisions
    rng = np.random.default_rng(0)
    params, statistics = net.model.new_arrays(net.input_shape, rng, net.dtype)
    arrays = file.read(tensor_file.named(params, statistics), "the model of config.yaml")
    params, statistics = tree.unflatten(
        tree.flatten((params, statistics))[1], [array(x, device=device) for x in arrays.values()]
    )
    return TrainedModel(
        cfg,
        net,
        params,
        statistics,
        about.classes,
        about.image_shape,
        about.encoder,
        about.targets,
        about.class_type,
        about.tokenizer,
    )


def _are_labels(classes: tuple[str, ...], kind: ClassType) -> bool:
    try:
        class_values(classes, kind, len(classes))
    except (ValueError, OverflowError):
        return False
    return True
