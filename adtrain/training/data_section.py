"""What a config says about its data, and what the data say about the config."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from adtrain import config, data
from adtrain.config import Config, ConfigError
from adtrain.config.build import REGRESSION
from adtrain.data import DataOptionError, DataSet
from adtrain.data.table_encoder import TableEncoder
from adtrain.nn import Shape


class Arrays(NamedTuple):
    """A data set in memory: pairs of images and labels as `data.of_arrays` takes them, the second one or None."""

    data: Any
    test_data: Any = None


def read_data(
    cfg: Config,
    arrays: Arrays | None = None,
    encoder: TableEncoder | None = None,
    classes: tuple[str, ...] = (),
    offset: tuple[float, ...] | None = None,
) -> DataSet:
    """The data of a config, or those in `arrays`.

    `encoder` makes the images of a table's rows; by default it is learnt from the training part. `classes` are those of
    a text; by default the characters that occur. `offset` is that of a trained network; by default it is learnt.
    Raises ConfigError for an option that does not fit the data, and DataError where they are missing or damaged.
    """

    def read(numbers: bool) -> DataSet:
        options = cfg.data.options
        shift = offset if cfg.data.normalize else ()
        if arrays is None:
            source = config.build.data_source(cfg) if cfg.data.dataset is not None else None
            return data.load(
                source, cfg.data.path, options, encoder=encoder, numbers=numbers, classes=classes, offset=shift
            )
        return data.of_arrays(*arrays, options, numbers, shift)

    try:
        if cfg.model.input:
            return read(takes_numbers(cfg))
        data_set = read(False)
        numbers = not data_set.targets and takes_numbers(with_shape(cfg, data_set.train.images.shape[1:]))
        return read(True) if numbers else data_set
    except DataOptionError as error:
        raise cfg.error_at(("data", error.option), error.reason) from error


def takes_numbers(cfg: Config) -> bool:
    """Whether integer labels are numbers to predict: a regression loss compares them with a single output."""
    return cfg.loss.kind in REGRESSION and config.build.model(cfg).output_shape(cfg.model.input) == (1,)


def with_input(cfg: Config) -> Config:
    """The config with `model.input`. Where that is missing, it is that of the data; all but texts are read for it.

    Raises ConfigError and DataError as `read_data` and `with_shape` do.
    """
    if cfg.model.input:
        return cfg
    if cfg.data.is_text:
        return with_shape(cfg, (1, 1, cfg.data.options.length))
    entry = config.build.data_source(cfg) if cfg.data.dataset is not None else None
    if isinstance(entry, data.Entry):
        return with_shape(cfg, entry.shape)
    return with_shape(cfg, read_data(cfg).train.images.shape[1:])


def with_shape(cfg: Config, shape: Shape) -> Config:
    """The config with `model.input` for images of this shape (C, H, W), if it is missing.

    It is the number of features for rows of a table, (length,) for a text, and flat too if the first layer is linear. A
    recurrent first layer gets rows of pixels, if there is one channel.
    Raises ConfigError where the layers do not fit it.
    """
    if cfg.model.input:
        return cfg
    first = cfg.model.layers[0].kind
    if shape[1:] == (1, 1) or first == "linear" or cfg.data.is_text:
        shape = (prod(shape),)
    elif shape[0] == 1 and first in ("rnn", "lstm", "gru"):
        shape = shape[1:]
    model = cfg.model.model_copy(update={"input": shape})
    cfg = cfg.model_copy(update={"model": model})
    if problems := config.build.check(cfg):
        raise ConfigError(problems)
    return cfg
