"""Checks that a config, its model and its data fit together: ConfigError at the place in the config, or a warning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import TypeVar

import numpy as np

from adtrain import config, curvature, nn, ops, optim
from adtrain.config import Config
from adtrain.config.build import REGRESSION, takes_labels
from adtrain.config.problems import found
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.errors import ShapeError
from adtrain.core.precision import PRECISIONS
from adtrain.core.types import Shape
from adtrain.data import DataSet, Split
from adtrain.data.errors import printable, warn
from adtrain.data.file_array import machine_memory
from adtrain.data.part import Column
from adtrain.data.split import chunks
from adtrain.data.statistics import lossy_channels
from adtrain.metrics import METRICS
from adtrain.text import counted, first_names
from adtrain.training import tensor_file
from adtrain.training.experiment import Experiment
from adtrain.training.network import Network
from adtrain.training.tasks import Classification, NextClass, NextToken, Regression, Solution, Task

T = TypeVar("T")


def embeddings_of(module: nn.Module, columns: Sequence[T]) -> Iterator[tuple[nn.Embedding, Sequence[T]]]:
    """Each embedding in a module with the columns that it gets, of the `columns` that the module gets.

    Embeddings behind other layers than `select` and containers are left out: their input has no columns.
    """
    if isinstance(module, nn.Sequential):
        for layer in module.layers:
            yield from embeddings_of(layer, columns)
            if not isinstance(layer, nn.Select):
                return
            columns = [columns[i] for i in layer.indices]
    elif isinstance(module, nn.Branches):
        for branch in module.branches:
            yield from embeddings_of(branch, columns)
    elif isinstance(module, nn.Embedding):
        yield module, columns


def embedding_problems(module: nn.Module, columns: Sequence[Column]) -> Iterator[str]:
    """One line for each embedding in a module that cannot take its columns, of the `columns` that the module gets."""
    for embedding, own in embeddings_of(module, columns):
        for column in own:
            name, size = printable(column.title), embedding.num_embeddings
            if column.categories is None:
                yield f"column {name} has numbers, expected categories before an embedding; select picks columns"
            elif size <= len(column.categories):
                count = len(column.categories)
                what = f"column {name} has {count} categories, and 0 stands for others"
                yield f"found num_embeddings {size}, expected at least {count + 1}: {what}"


MOST_NAMES = 8
"""The most names of targets in an error."""

NEGLIGIBLE = 1e-6
"""A change below this fraction of the largest output is rounding."""


def check_precision(cfg: Config, device: str) -> None:
    """Raise ConfigError where `device` has no kernels for the config's precision."""
    if device == "cpu" and cfg.training.precision in PRECISIONS:
        reason = "expected float32 or float64 on the cpu: set one of them, or use a GPU (--device gpu)"
        raise cfg.error_at(("training", "precision"), f"found {cfg.training.precision}, {reason}")


def check_whole_batches(cfg: Config) -> None:
    """Raise ConfigError where batches are divided into shards, for what times steps on whole batches."""
    if (cfg.data.shards or 1) > 1:
        reason = "expected none: steps on whole batches are timed; --set data.shards=null leaves it out"
        raise cfg.error_at(("data", "shards"), f"found {cfg.data.shards}, {reason}")


def check_fit(cfg: Config, net: Network, data_set: DataSet) -> None:
    """Check that the network's input and output have the shapes of the data, and that it has parameters."""
    shape = data_set.train.images.shape[1:]
    rows = [shape[1:]] if shape[0] == 1 else []
    if net.input_shape not in (shape, *rows, (prod(shape),)):
        as_rows = f"{found(rows[0])} for rows of pixels, " if rows else ""
        expected = f"expected {found(shape)}, the shape of the images, {as_rows}or [{prod(shape)}] for flat input"
        if names := data_set.features:
            listed = first_names(list(map(printable, names)))
            expected = f"expected [{len(names)}], the features of a row: {listed}"
        if cfg.data.is_text:
            expected = f"expected [{prod(shape)}], the length of a sequence (data.length)"
        raise cfg.error_at(("model", "input"), f"found {found(net.input_shape)}, {expected}")
    if data_set.encoder is not None and any(data_set.encoder.indexed):
        for problem in embedding_problems(net.model, data_set.encoder.sources):
            raise cfg.error_at(("model", "layers"), problem)
    positions = (net.task.length,) if isinstance(net.task, NextClass) else ()
    outputs, classes = net.model.output_shape(net.input_shape), len(data_set.targets or data_set.classes)
    last_layer = ("model", "layers", len(cfg.model.layers) - 1)
    if data_set.targets and outputs != (classes,):
        expected = f"expected [{classes}], one for each of {', '.join(data_set.targets[:MOST_NAMES])}"
        raise cfg.error_at(last_layer, f"found the output {found(outputs)}, {expected}")
    if outputs[:-1] != positions or not outputs:
        expected = f"expected {found((*positions, classes))}, one per class{' at each position' if positions else ''}"
        raise cfg.error_at(last_layer, f"found the output {found(outputs)}, {expected}")
    labels = f"{cfg.data.path or data_set.name} has {counted(classes, 'classes')}"
    if outputs[-1] < classes:
        raise cfg.error_at(
            last_layer, f"found {counted(outputs[-1], 'outputs')}, expected at least {classes}: {labels}"
        )
    for embedding, _ in embeddings_of(net.model, range(net.input_shape[0])) if positions else ():
        if embedding.num_embeddings < classes:
            reason = f"found num_embeddings {embedding.num_embeddings}, expected at least {classes}: {labels}"
            raise cfg.error_at(("model", "layers"), reason)
    if not any(row.parameters for row in nn.describe(net.model, net.input_shape)):
        raise cfg.error_at(("model", "layers"), "found no parameters, expected at least one layer with parameters")


def check_equations(cfg: Config, net: Network, examples: int) -> None:
    """Check that layers fit a loss of equations, and that an optimizer with a line search has what it needs."""
    options = cfg.data.point_options
    if (optimizer := config.build.optimizer(cfg)).needs_loss:
        _check_line_search(cfg, optimizer, examples)
    if cfg.data.points is None:
        return
    if options.adaptive and (cfg.data.shards or 1) > 1:
        raise cfg.error_at(("data", "adaptive"), f"found true, expected false with data.shards {cfg.data.shards}")
    params, state = net.model.new_arrays(net.input_shape, np.random.default_rng(0), net.dtype)
    if not state:
        return
    points = array(np.zeros((2, *net.input_shape), net.dtype))
    _, after = net.model.forward(params, state, points, nn.Mode(training=True, rng=ops.rng_state(0)))
    if any(x is not y for x, y in zip(tree.leaves(state), tree.leaves(after), strict=True)):
        reason = "found a layer with running statistics, expected none: the outputs at a point depend on it alone"
        raise cfg.error_at(("model", "layers"), reason)


def _check_line_search(cfg: Config, optimizer: optim.Optimizer, examples: int) -> None:
    """Check that the loss is one function of the parameters, whose value is known in each step."""
    needs = f"the optimizer {optimizer.kind()} has a line search, which needs"
    if (cfg.data.shards or 1) > 1:
        raise cfg.error_at(("data", "shards"), f"found {cfg.data.shards}, expected none: {needs} the loss of a batch")
    for key in ("average", "clip_norm", "clip_value"):
        if getattr(cfg.training, key) is not None:
            raise cfg.error_at(("training", key), f"expected none: {needs} the gradient of the loss as it is")
    if cfg.data.augment:
        raise cfg.error_at(("data", "augment"), f"expected none: {needs} the same loss in each step")
    if (field := cfg.data.field) is not None:
        expected = "expected points, or a path whose examples are one batch"
        raise cfg.error_at(("data", field[0]), f"{expected}: {needs} the same batch in each step")
    if cfg.data.points is None:
        if cfg.data.batch_size < examples:
            found = f"found {cfg.data.batch_size} of {examples:,} examples, expected all"
            raise cfg.error_at(("data", "batch_size"), f"{found}: {needs} the same batch in each step")
        return
    first = optimizer.steps if isinstance(optimizer, optim.Sequence) else 0
    if not cfg.data.point_options.stay_after(first):
        until = f", or data.resample_until of at most {first}" if first else ""
        expected = f"expected never{until}: {needs} the same points in each step"
        raise cfg.error_at(("data", "resample"), f"found {cfg.data.point_options.resample}, {expected}")
    if examples > cfg.data.batch_size:
        found = f"found {cfg.data.batch_size} for {examples:,} points, expected all"
        raise cfg.error_at(("data", "batch_size"), f"{found}: {needs} the same measurements in each step")


def check_targets(cfg: Config, data_set: DataSet, parts: Sequence[Split]) -> None:
    """Check that the loss fits the labels: classes, numbers, or columns of 0 and 1."""
    kind, names = cfg.loss.kind, ", ".join(data_set.targets[:MOST_NAMES])
    if cfg.data.is_text and not takes_labels(cfg.loss):
        raise cfg.error_at(("loss",), f"found {kind} for a text, expected cross_entropy or nll")
    if data_set.targets and takes_labels(cfg.loss):
        expected = "expected mse, l1 or huber, or binary_cross_entropy_with_logits for columns of 0 and 1"
        if cfg.data.field is None:
            expected += "; for classes, set data.label instead of data.target, or store integer labels"
        raise cfg.error_at(("loss",), f"found {kind} for the numbers of {names}, {expected}")
    if (scaling := cfg.data.normalize_targets) and not (data_set.targets and kind in REGRESSION):
        expected = "expected false, as there are no numbers to predict with mse, l1 or huber"
        raise cfg.error_at(("data", "normalize_targets"), f"found {config.inline(scaling)}, {expected}")
    if data_set.targets and kind not in REGRESSION:
        for part in parts:
            if (wrong := np.argwhere((part.labels != 0) & (part.labels != 1))).size:
                row, column = wrong[0]
                number = f"found {part.labels[row, column]:g} in {data_set.targets[column]}"
                raise cfg.error_at(("loss",), f"{number}, expected 0 and 1 only for {kind}; mse takes any number")


def warn_of_lost_digits(cfg: Config, net: Network, data_set: DataSet) -> None:
    """Warn about numbers to predict that the loss gets in float32, which loses their last digits."""
    if (
        not isinstance(net.task, Regression)
        or isinstance(net.task, Solution)
        or net.task.normalized
        or net.dtype != np.float32
    ):
        return
    labels = data_set.train.labels[:, :, np.newaxis, np.newaxis]
    if lossy := lossy_channels(labels, data_set.target_std):
        names = first_names([printable(data_set.targets[i]) for i in lossy], MOST_NAMES)
        reason = "float32 loses the last digits of these numbers; data.normalize_targets: true subtracts the mean first"
        warn(cfg.data.path or data_set.name, f"target {names}: {reason}")


def warn_of_warm_up(cfg: Config, schedule: optim.Schedule, total_steps: int) -> None:
    """Warn about a warm-up that is not over when the training ends."""
    if isinstance(schedule, optim.schedules.WarmUp) and schedule.steps >= total_steps:
        expected = f"expected fewer than the {total_steps:,} of the training, which ends before the full learning rate"
        warn(cfg.where(("schedule",)), f"schedule: found a warm-up of {schedule.steps:,} steps, {expected}")


def check_metrics(cfg: Config, task: Task) -> None:
    """Check that `best_by` and `metrics` are metrics of the task."""
    fields, best_by = task.score_kind._fields, cfg.training.best_by
    if best_by is not None:
        part, _, metric = best_by.partition("_")
        others = other_metrics(cfg, task)
        if metric not in fields and not (part == "validation" and metric in others):
            expected = f"expected train_ or validation_ with one of {', '.join(fields)}"
            expected += f", or validation_ with one of {', '.join(others)}" if others else ""
            raise cfg.error_at(("training", "best_by"), f"found {best_by}, {expected}")
    kinds = [x.kind for x in cfg.training.metrics or ()]
    if isinstance(task, Solution) and (refused := [kind for kind in kinds if kind in curvature.METRICS]):
        reason = "which are for losses that are a mean over examples"
        raise cfg.error_at(("training", "metrics"), f"found {', '.join(refused)}, {reason}")
    if not isinstance(task, Classification) and (refused := [kind for kind in kinds if kind not in curvature.METRICS]):
        reason = f"which are for classes; this task always has {', '.join(fields)}"
        raise cfg.error_at(("training", "metrics"), f"found {', '.join(refused)}, {reason}")


def other_metrics(cfg: Config, task: Task) -> list[str]:
    """The metrics that can be measured beside those of the score, without the confusion matrix."""
    names = [x.kind for x in cfg.training.metrics or ()]
    if isinstance(task, Classification):
        names = [*METRICS, *names]
    return [name for name in dict.fromkeys(names) if name not in ("confusion", *task.score_kind._fields)]


def check_memory(cfg: Config, net: Network) -> None:
    """Refuse parameters that the machine's memory cannot hold while they are drawn, in float64."""
    rows = nn.describe(net.model, net.input_shape)
    count, memory = sum(row.parameters for row in rows), machine_memory()
    if 8 * count > memory:
        most = max(rows, key=lambda row: row.parameters)
        largest = f"{most.parameters:,} of them in layer {most.name} ({most.kind})"
        expected = f"expected at most {memory // 8:,}, which fit into this machine's {memory / 2**30:,.1f} GiB"
        raise cfg.error_at(("model", "layers"), f"found {count:,} parameters, {largest}, {expected}")


def check_augmentations(experiment: Experiment) -> None:
    """Check that the augmentations fit the shape of a batch and the kind of data."""
    encoder = experiment.data.encoder
    if experiment.augmentations and experiment.config.data.is_text:
        raise experiment.config.error_at(("data", "augment"), "expected none for a text")
    if experiment.augmentations and encoder is not None and any(encoder.indexed):
        reason = "expected none with data.category_encoding: index, because they would change the numbers of categories"
        raise experiment.config.error_at(("data", "augment"), reason)
    for i, change in enumerate(experiment.augmentations):
        try:
            change.check((experiment.full_batch, *experiment.image_shape))
        except ShapeError as error:
            raise experiment.config.error_at(("data", "augment", i), str(error)) from None


def check_views(cfg: Config, net: Network, shape: Shape) -> None:
    """Raise ConfigError unless `data.views` fits the shape of the images (C, H, W), and the loss takes class labels."""
    views = cfg.data.views or []
    for i, view in enumerate(views):
        if view in views[:i]:
            raise cfg.error_at(("data", "views", i), f"found {view} twice, expected each view once")
    if not views:
        return
    if not (type(net.task) is Classification and not net.task.one_hot):
        reason = f"found [{', '.join(views)}], expected none: views need a loss of class labels, such as cross_entropy"
        raise cfg.error_at(("data", "views"), reason)
    if min(shape[1:]) < 2:
        raise cfg.error_at(
            ("data", "views"), f"found examples of shape {found(shape)}, expected images of at least 2x2 pixels"
        )


def warn_of_init_from(experiment: Experiment) -> None:
    """Warn where outputs or inputs with weights of `training.init_from` have other names there than in the data."""
    training, data_set = experiment.config.training, experiment.data
    if training.init_from is None or training.names is not None:  # files of other programs have no such names
        return
    path = Path(training.init_from)
    before, now = tensor_file.names_of(path), tensor_file.Names(data_set.classes, data_set.targets, data_set.encoder)
    drawn = tree.leaves(experiment.initial_state("cpu", random=True).params)
    taken = tree.leaves(experiment.initial_state("cpu").params)
    kinds = "classes" if now.classes else "targets"
    pairs = [(kinds, "last", -1, before.outputs, now.outputs), ("features", "first", 0, before.inputs, now.inputs)]
    for what, layer, position, others, own in pairs:
        is_taken = not np.array_equal(drawn[position].numpy(), taken[position].numpy())
        if others and own and tuple(others) != tuple(own) and is_taken:
            first = next(i for i, (x, y) in enumerate(zip_longest(others, own)) if x != y)
            there, here = (first_names(list(map(printable, names[first:]))) for names in (others, own))
            place = f", from number {first} on" if first else ""
            found = f"found the {what} {there}, expected {here} as in the data{place}"
            effect = f"the {layer} layer begins with the weights of other {what}"
            advice = "; for the same tokens set data.tokenizer" if what == "classes" and data_set.tokenizer else ""
            warn(f"training.init_from {path}", f"{found}: {effect}{advice}")


def check_embeddings(experiment: Experiment) -> None:
    """Raise ConfigError where an embedding gets numbers of the data that are not indices of its rows.

    A text and columns of categories have other checks.
    """
    cfg, data_set, model = experiment.config, experiment.data, experiment.network.model
    indexed = data_set.encoder is not None and any(data_set.encoder.indexed)
    shape = experiment.network.input_shape
    embeddings = list(embeddings_of(model, range(shape[0])))
    if cfg.data.is_text or indexed or not embeddings:
        return
    if cfg.data.normalize:
        raise cfg.error_at(("data", "normalize"), "found true, expected false: an embedding takes integers as they are")
    if data_set.train.images.dtype == np.uint8:
        reason = "found integers from 0 to 255, which are read as pixels and divided by 255, before an embedding"
        source = "dataset" if cfg.data.path is None else "path"
        raise cfg.error_at(("data", source), f"{reason}; expected float32: store them by array.astype('float32')")
    parts = [part for part in (experiment.train, experiment.validation, experiment.test) if part is not None]
    for chunk in (chunk for part in parts for chunk in chunks(part.images)):
        numbers = chunk.reshape(-1, *shape)
        for embedding, columns in embeddings:
            chosen = numbers if len(columns) == shape[0] else numbers[:, list(columns)]
            least, greatest, size = chosen.min(), chosen.max(), embedding.num_embeddings
            if not (least >= 0 and greatest < size):
                reason = f"found numbers from {least:g} to {greatest:g} before an embedding"
                raise cfg.error_at(("model", "layers"), f"{reason}, expected 0 to num_embeddings - 1 = {size - 1}")


def check_last_batch(cfg: Config, net: Network, count: int) -> None:
    """Refuse a last batch of one image where batch normalisation would see a single value per channel."""
    batch_size = cfg.data.batch_size
    for name, layer, shape in nn.layers(net.model, net.input_shape):
        if not isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)) or prod(shape[1:]) > 1:
            continue
        shards = 1 if layer.sync else cfg.data.shards or 1
        sizes = [size for size in (min(batch_size, count), count % batch_size) if size]
        if all(size // shards > 1 for size in sizes):
            continue
        if shards > 1:
            reason = f"layer {name} ({layer.kind()}) needs 2 images per shard of a batch"
            raise cfg.error_at(("data", "shards"), f"found {shards}, which leaves a shard of 1 image; {reason}")
        raise cfg.error_at(
            ("data", "batch_size"),
            f"found {batch_size}, which leaves 1 of {count} images for the last batch, "
            f"expected another size: layer {name} ({layer.kind()}) needs 2 images per batch",
        )


def check_documents(cfg: Config, net: Network) -> None:
    """Raise ConfigError where documents have to be separate, but no token ends them, or a layer mixes positions in
    another way than attention with `causal`."""
    if cfg.data.options.documents == "joined":
        return
    place = "data", "documents"
    if not isinstance(net.task, NextToken):
        raise cfg.error_at(place, "found separate, expected joined unless data.unit is token")
    if net.task.separator is None:
        raise cfg.error_at(place, "found separate, but the tokenizer has no token for the end of a text")
    for name, layer, shape in nn.layers(net.model, net.input_shape):
        if layer.new_cache(shape, 0, net.dtype) is None:
            reason = f"but layer {name}, {layer.kind()}, reads whole sequences"
            expected = "expected layers that compute each position by itself, and attention with causal"
            raise cfg.error_at(place, f"found separate, {reason}; {expected}")


def sees_later(experiment: Experiment) -> tuple[int, int] | None:
    """A position and a later one that the initial network's output at it depends on; None if there is none.

    Layers that can keep what later tokens need (`Module.new_cache`) depend on earlier positions only. For others two
    sequences are compared that differ in the last position only; a dependence through weights of 0 is not found.
    """
    if experiment.network.model.new_cache(experiment.network.input_shape, 0, experiment.network.dtype) is not None:
        return None
    length = experiment.image_shape[-1]
    inputs = np.zeros((2, 1, 1, length), np.float32)
    inputs[1, ..., -1] = len(experiment.data.classes) - 1
    state = experiment.initial_state("cpu", random=True)
    outputs, _ = experiment.network.outputs(state.params, state.statistics, array(inputs), nn.Mode(training=False))
    first, second = outputs.numpy()
    changed = np.abs(first - second).max(axis=-1) > NEGLIGIBLE * np.abs(first).max()
    return (int(changed.argmax()), length - 1) if changed[:-1].any() else None
