"""`adtrain new`: proposes a config for data: the input, the classes or targets, and a small network for them.

With `--from` the network is that of a config.json of another program, with its weights.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from adtrain import config, data
from adtrain.cli.data import section_of, warn_of_equal_columns, warn_of_rare_classes
from adtrain.cli.options import FilePath, Whole, set_data_option
from adtrain.cli.output import show
from adtrain.config.document import Data
from adtrain.core.errors import AdtrainError
from adtrain.data import DataError, DataOptionError, DataSet, csv_survey, csv_table, formats, token_folder, tokenizer
from adtrain.data.errors import warn
from adtrain.data.image_folder import BrokenImageError, ImageOptions, SizesError
from adtrain.data.statistics import extreme, target_statistics
from adtrain.data.tokenizer import FILE, LARGEST_VOCABULARY, SMALLEST_VOCABULARY
from adtrain.export import architectures
from adtrain.export.architectures import Architecture
from adtrain.text import counted
from adtrain.training.experiment import Experiment
from adtrain.training.preparation import prepare

SIDE, MOST_SIDE = 64, 128
"""Images with a longer side than MOST_SIDE are resized to SIDE x SIDE pixels."""

SMALLEST_CONVOLVED = 10
"""The least height and width of images for two convolutions with pooling."""

COMMENTS = {
    "header": "whether line 1 has the names of the columns",
    "label": "the column of the classes to predict",
    "target": "the column of the numbers to predict",
    "delimiter": "the character between two columns",
    "decimal": "the decimal mark of numbers; they can have separators of thousands",
    "drop": "columns that are not read",
    "dates": "columns of dates, each of which becomes five features",
    "missing": "fills empty cells",
    "missing_values": "the texts that stand for empty cells",
    "skip_broken": "leaves out images that cannot be read",
    "image_size": "all images are resized to it",
    "test": "the fraction held out to measure the result",
    "validation": "the fraction of the rest held out to choose the best epoch",
    "normalize_targets": "trains on targets of mean 0 and deviation 1",
}

MOST_TOKENS = 1024
"""The largest `data.length` that is proposed for the network of another program."""

SMALLEST_TEST = 2
"""Up to this number of examples half of them are held out: the usual fraction of them would be none."""

MOST_OF_ONE_CLASS = 0.8
"""Classes are unequal where one has a larger part of the examples."""
MOST_RAISED = 1.5
"""Targets have extremes where their standard deviation is more than this times that without the extreme ones."""

BATCHES = 20
"""The least number of batches in an epoch, unless they would have fewer than 16 examples."""

LEAST_STEPS, MOST_EPOCHS = 2000, 200
"""A table is trained for a multiple of 10 epochs: for LEAST_STEPS steps or more, but at most MOST_EPOCHS epochs."""


@dataclass(frozen=True)
class Gpt:
    """A causal transformer for a text, and how long it is trained.

    Attributes:
        tokens: it is proposed for texts of up to this number of tokens.
        optimizer: as in a config.
    """

    tokens: float
    length: int
    batch_size: int
    width: int
    heads: int
    depth: int
    optimizer: str
    epochs: int


MUON = 'muon: {lr: 0.02, weight_decay: 0.1, rest: {adamw: {lr: 0.003, weight_decay: 0.1}}, rest_paths: ["0.*", "1.*"]}'
"""Its `rest_paths` are those of the embedding and the positions."""
ADAMW = "adamw: {lr: 0.0006, weight_decay: 0.1}"

GPTS = (
    # tokens, length, batch_size, width, heads, depth, optimizer, epochs
    Gpt(1e6, 128, 64, 128, 4, 4, MUON, 10),
    Gpt(1e7, 256, 64, 256, 8, 6, MUON, 10),
    Gpt(1e8, 512, 32, 512, 8, 8, ADAMW, 3),
    Gpt(math.inf, 1024, 16, 768, 12, 12, ADAMW, 1),  # that of GPT-2 with 124 million parameters
)
CHECKPOINT_STEPS = 2000
"""The steps between two checkpoints: an epoch on a large text takes hours or days."""
LEAST_SEQUENCES, SHORTEST = 64, 16
"""The length of a sequence is halved until a text has LEAST_SEQUENCES of them, or down to SHORTEST."""


@click.command()
@click.argument("source", metavar="PATH|NAME")
@click.option(
    "--tokens",
    type=Whole(SMALLEST_VOCABULARY, LARGEST_VOCABULARY),
    help="Of a text: train a causal transformer on a vocabulary of N tokens, not on characters.",
)
@click.option(
    "--from",
    "folder",
    type=FilePath(),
    metavar="DIR",
    help="Take the network and its weights from this folder, with the config.json of transformers.",
)
@set_data_option
def command(source: str, tokens: int | None, folder: Path | None, data_overrides: tuple[str, ...]) -> None:
    """Print a config that trains on the data at PATH or data set NAME: adtrain new flowers.csv > flowers.yaml.

    In a table, the column to predict is the one named label, class, target or y, otherwise the last one. Texts and
    integers with few different values are classes. Other numbers are targets.

    With --from the training starts from the weights of a GPT-2, Llama, Mistral, Qwen 3 or ViT in a folder. A ViT gets a
    new last layer where the data have another number of classes.
    """
    if tokens is not None and folder is not None:
        raise click.UsageError("--tokens and --from: the vocabulary is that of the folder; give one of them")
    path = Path(source).expanduser()
    if tokens is not None and path.is_dir() and not token_folder.is_token_folder(path):
        commands = (
            f"adtrain data tokenize {shlex.quote(source)} -o tokens --vocabulary {tokens}, then adtrain new tokens"
        )
        raise AdtrainError(f"{source}: found a folder, expected a text file; for a folder of texts: {commands}")
    if folder is not None and config.is_run(str(folder)):
        copied = f"change data.path in a copy of {folder / 'config.yaml'}, and set training.init_from to {folder}"
        raise AdtrainError(f"{folder}: found a run of adtrain, expected a folder of transformers; {copied}")
    start = None if folder is None else Start(folder, architectures.read(folder))
    given = {} if tokens is None else {"unit": "token", "vocabulary": tokens}
    if start is not None and not start.architecture.input and (start.folder / FILE).is_file():
        given = _tokens_of(start.folder / FILE, path)
    section = section_of(source, data_overrides, given)
    try:
        lines = text(section, section.model_dump(mode="json", exclude_unset=True), start).splitlines()
    except DataOptionError as error:
        if start is not None and error.option == "unit":
            expected = f"expected one for images or a table, as {source} has; give a text, or another --from"
            raise AdtrainError(f"{start.folder}: found a network for texts, {expected}") from None
        if tokens is None or error.option not in given:
            raise
        raise DataError(f"--tokens: {error.reason}") from None
    show(*lines)


def _tokens_of(file: Path, source: Path) -> dict[str, Any]:
    """The keys that give the data at `source` the tokens of the tokenizer in a file.

    Raises DataError for a folder with other tokens.
    """
    if not token_folder.is_token_folder(source):
        return {"unit": "token", "tokenizer": str(file)}
    if tokenizer.read(source / FILE).digest != tokenizer.read(file).digest:
        raise DataError(f"{source}: found tokens of another tokenizer; make them by data tokenize --tokenizer {file}")
    return {"unit": "token"}


class Start(NamedTuple):
    """The network that a training starts from."""

    folder: Path
    architecture: Architecture

    def fitted(self, found_data: DataSet, outputs: int) -> tuple[Architecture, str]:
        """The network with `outputs` outputs for the data, and the value of `training`.

        Raises AdtrainError where the network takes other data.
        """
        found, others = self.architecture, {"epochs": 3, "seed": 0}
        is_text, shape = found_data.train.is_text, found_data.train.images.shape[1:]
        if is_text == bool(found.input):
            takes, are = ("images", "a text") if is_text else ("texts", "images or rows")
            raise AdtrainError(f"{self.folder}: found a network for {takes}, but the data are {are}")
        if found.input and shape != found.input:
            sizes = f"images of {_sizes(found.input, found_data)}, found {_sizes(shape, found_data)}"
            raise AdtrainError(f"{self.folder}: the network takes {sizes}; set image_size and channels of the data")
        options = {**others, "init_from": str(self.folder), "names": found.names}
        if found.input and found.layers[-1] != {"linear": outputs}:
            found, options = found.with_outputs(outputs), {**options, "init_partial": True}
        return found, config.inline(options)


def text(section: Data, given: Mapping[str, Any], start: Start | None = None) -> str:
    """A YAML config with comments, which trains on the data of a section; `given` are the keys that the user has set.

    Raises ConfigError and DataError where the data cannot be read.
    """
    keys, comments = _reading(section, given, start)
    with _unwarned():  # `prepare` reads the data again, with the options of the config
        found = _loaded(keys)
    examples = len(found.train)
    is_text = found.train.is_text
    trained = _hold_out(keys, found, section.path)
    tokens = examples * (found.train.images.shape[-1] + 1)
    gpt = None if found.tokenizer is None else next(each for each in GPTS if tokens <= each.tokens)
    longest = None if gpt is None else gpt.length
    if start is not None and is_text:
        longest = min(start.architecture.length or MOST_TOKENS, MOST_TOKENS)
    if longest is not None:
        keys["length"] = given.get("length") or _length(longest, tokens)
        examples = tokens // (keys["length"] + 1)
    sizes = [size for size in (128, 64, 32) if gpt is None or size <= gpt.batch_size]
    keys.setdefault("batch_size", next((size for size in sizes if examples >= BATCHES * size), 16))
    multilabel = _of_zeros_and_ones(found)
    predicts_numbers = bool(found.targets) and not multilabel
    has_extremes = predicts_numbers and _have_extremes(found.train.labels)
    if predicts_numbers:
        keys["normalize_targets"] = "robust" if has_extremes else True
    if has_extremes:
        count = counted(int(extreme(found.train.labels).any(axis=1).sum()), "examples")
        comments["normalize_targets"] = f"mean and deviation are those without the extreme targets, of {count}"
    kind = "sequences" if is_text else "rows" if found.train.images.shape[2:] == (1, 1) else "images"
    epochs = 20 if examples < 20_000 else 5
    if kind == "rows":
        steps = max(math.ceil(trained / keys["batch_size"]), 1)  # of an epoch
        epochs = max(epochs, min(math.ceil(LEAST_STEPS / steps / 10) * 10, MOST_EPOCHS))
    layers, training = _network(found, epochs, gpt, start)
    loss = "binary_cross_entropy_with_logits" if multilabel else "mse"
    best_metric = ""
    if found.classes:
        loss = "cross_entropy"
    if not is_text and found.classes and _are_unequal(found.train.labels):
        loss = "{cross_entropy: {weight: balanced}}  # each class has the same total weight"
        training[-1] = _extended(training[-1], "metrics: [f1, average_precision]")
        best_metric = "f1"
    if has_extremes:
        loss = "huber  # mse, rmse and r2 depend mostly on the extreme targets"
        best_metric = "mae"
    if best_metric and "validation" in keys:
        training[-1] = _extended(training[-1], f"best_by: validation_{best_metric}")
    lines = [
        "data:",
        *(
            f"  {key}: {config.inline(value)}" + (f"  # {comments[key]}" if key in comments else "")
            for key, value in keys.items()
        ),
        "model:",
        "  layers:",
        *layers,
        f"loss: {loss}",
        *training,
        "",
    ]
    experiment = _prepared(lines, start)
    warn_of_rare_classes(found, experiment.data.test)
    warn_of_equal_columns(found)
    if not is_text:
        # Of a table these are the features of the training part, which may lack categories of the others.
        lines.insert(lines.index("  layers:"), f"  input: {list(experiment.network.input_shape)}")
    about = f"{_sizes(experiment.image_shape, found)}; {_predicted(found, multilabel)}"
    return "\n".join([f"# {counted(examples, kind)} of {about}", *lines])


def _reading(section: Data, given: Mapping[str, Any], start: Start | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The keys of the data section that say how the files are read, those `given` among them, and comments by key."""
    keys, comments = dict(given), dict(COMMENTS)
    path = None if section.path is None else Path(section.path).expanduser()
    format_ = None if path is None else formats.format_of(path, section.options.format)
    if path is not None and format_ is csv_table.FORMAT:
        proposed = csv_survey.propose(path, section.options)
        keys |= proposed.keys
        comments |= proposed.comments
    if section.options.unit == "token" and format_ is not None and "length" in format_.takes:
        keys.setdefault("length", SHORTEST)
    of_images = format_ is not None and format_.options is ImageOptions
    if start is not None and of_images and (shape := start.architecture.input):
        keys = {"channels": shape[0], "image_size": list(shape[1:])} | keys
    return keys, comments


def _hold_out(keys: dict[str, Any], found: DataSet, path: str | None) -> float:
    """Set the keys `test` and `validation`, unless the data have these parts, and return how many examples remain.

    Raises DataError for too few examples.
    """
    examples = len(found.train)
    if not len(found.test):
        if examples < 2:
            place = None if path is None else Path(path).expanduser()
            raise DataError(
                f"{place}: found {counted(examples, 'examples')}, expected two or more: one of them for the test"
            )
        keys.setdefault("test", 0.1 if found.train.is_text else 0.2 if examples > SMALLEST_TEST else 0.5)
    held_out = 0 if len(found.test) else round(keys["test"] * examples)
    if not found.validation_rows and round(0.1 * (examples - held_out)):
        keys.setdefault("validation", 0.1)
    return (1 - keys.get("validation", 0)) * (examples - held_out)


def _network(found: DataSet, epochs: int, gpt: Gpt | None, start: Start | None) -> tuple[list[str], list[str]]:
    """The lines of the config for the layers, and its lines for optimizer, schedule and training.

    Raises AdtrainError where the network of `start` takes other data.
    """
    outputs = len(found.targets or found.classes)
    if start is not None:
        architecture, value = start.fitted(found, outputs)
        if found.train.is_text and found.tokenizer is None:
            others = f"those of the data are {outputs} characters or bytes"
            warn(start.folder, f"its classes are tokens, {others}; to train on tokens, copy its {FILE} into the folder")
        layers = [f"    - {config.inline(layer)}" for layer in architecture.layers]
        return layers, ["optimizer: {adamw: {lr: 0.00005}}", "schedule: cosine", f"training: {value}"]
    if gpt is not None:
        return _gpt_layers(gpt, outputs), _gpt_training(gpt)
    layers = _text_layers(outputs) if found.train.is_text else _layers(found.train.images.shape[1:], outputs)
    return layers, ["optimizer: {adam: {lr: 0.001}}", "schedule: cosine", f"training: {{epochs: {epochs}, seed: 0}}"]


def _prepared(lines: Sequence[str], start: Start | None) -> Experiment:
    """The experiment of the config. Raises ConfigError, or AdtrainError where the network of `start` does not fit."""
    try:
        return prepare(config.parse("\n".join(lines).encode(), Path("new.yaml")))
    except config.ConfigError as error:
        if start is None:
            raise
        problem = error.problems[0]
        raise AdtrainError(f"{start.folder}: its network does not fit: {problem.path}: {problem.message}") from None


@contextmanager
def _unwarned() -> Iterator[None]:
    """Let the readers of data log no warning."""
    log = logging.getLogger(data.__name__)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _loaded(keys: dict[str, Any]) -> DataSet:
    """The data; sets `skip_broken` where images cannot be read, and `image_size` as `_of_one_size` does."""
    try:
        return _of_one_size(keys)
    except BrokenImageError:
        keys["skip_broken"] = True
        return _of_one_size(keys)


def _of_one_size(keys: dict[str, Any]) -> DataSet:
    """The data; sets `image_size` where images differ in size, to the median of the sizes, or are large."""

    def load() -> DataSet:
        section = Data.model_validate(keys)
        return data.load(keys.get("dataset"), section.path, section.options, need_test=False)

    path = keys.get("path")
    try:
        found = load()
        format_ = formats.format_of(Path(path).expanduser(), keys.get("format")) if path else None
        of_images = format_ is not None and format_.options is ImageOptions
        if not of_images or "image_size" in keys or max(found.train.images.shape[2:]) <= MOST_SIDE:
            return found
        keys["image_size"] = [SIDE, SIDE]
    except SizesError as error:
        keys["image_size"] = list(error.median) if max(error.median) <= MOST_SIDE else [SIDE, SIDE]
    return load()


def _text_layers(classes: int) -> list[str]:
    """The lines of the layers, for a text."""
    return [
        f"    - embedding: {{num_embeddings: {classes}, embedding_dim: 64}}",
        "    - gru: {hidden_size: 128, output: all}",
        f"    - linear: {classes}",
    ]


def _length(longest: int, tokens: int) -> int:
    """The length of the sequences of a text with `tokens` tokens, at most `longest`."""
    length = longest
    while length > SHORTEST and tokens // (length + 1) < LEAST_SEQUENCES:
        length //= 2
    return length


def _gpt_layers(gpt: Gpt, classes: int) -> list[str]:
    """The lines of the layers, for a text of tokens: those of GPT-2, with the exact gelu."""
    embedding = f"num_embeddings: {classes}, embedding_dim: {gpt.width}, weight_init: normal, init_gain: 0.02"
    return [
        f"    - embedding: {{{embedding}}}",
        "    - positional_embedding",
        *[f"    - decoder_layer: {{num_heads: {gpt.heads}, depth: {gpt.depth}, dropout: 0.1}}"] * gpt.depth,
        "    - layer_norm",
        f"    - linear: {{out_features: {classes}, bias: false, tied: true}}",
    ]


def _gpt_training(gpt: Gpt) -> list[str]:
    """The lines of optimizer, schedule and training, for a text of tokens."""
    return [
        f"optimizer: {{{gpt.optimizer}}}",
        f"schedule: {{cosine: {{warmup_epochs: {0.05 * gpt.epochs:g}}}}}",
        f"training: {{epochs: {gpt.epochs}, seed: 0, clip_norm: 1.0, checkpoint_every: {CHECKPOINT_STEPS}}}",
    ]


def _layers(shape: tuple[int, ...], outputs: int) -> list[str]:
    """The lines of the layers."""
    if min(shape[1:]) < SMALLEST_CONVOLVED:
        return ["    - linear: 64", "    - relu", f"    - linear: {outputs}"]
    return [
        "    - conv2d: {out_channels: 32, kernel_size: 3}",
        "    - relu",
        "    - max_pool2d: 2",
        "    - conv2d: {out_channels: 64, kernel_size: 3}",
        "    - relu",
        "    - max_pool2d: 2",
        "    - flatten",
        "    - linear: 128",
        "    - relu",
        f"    - linear: {outputs}",
    ]


def _are_unequal(labels: Any) -> bool:
    """Whether most of these labels are one class, so that the accuracy says little."""
    counts = np.bincount(np.asarray(labels))
    return bool(counts.max() > MOST_OF_ONE_CLASS * counts.sum())


def _have_extremes(labels: np.ndarray) -> bool:
    """Whether the deviation of a column of targets is more than MOST_RAISED times that of its targets not extreme."""
    (_, std), (_, of_others) = target_statistics(labels), target_statistics(labels, robust=True)
    return any(x > MOST_RAISED * other for x, other in zip(std, of_others, strict=True))


def _extended(training: str, keys: str) -> str:
    """The line of `training` with more keys."""
    return f"{training.removesuffix('}')}, {keys}}}"


def _of_zeros_and_ones(found: DataSet) -> bool:
    """Whether several columns of targets are all 0 and 1."""
    return len(found.targets) > 1 and bool(((found.train.labels == 0) | (found.train.labels == 1)).all())


def _sizes(shape: tuple[int, ...], found: DataSet) -> str:
    if found.tokenizer is not None:
        return f"{shape[-1]} tokens"
    if found.train.is_text:
        return f"{shape[-1]} characters or bytes"
    return counted(shape[0], "features") if shape[1:] == (1, 1) else " x ".join(map(str, shape))


def _predicted(found: DataSet, multilabel: bool) -> str:
    if found.classes:
        return counted(len(found.classes), "classes")
    if multilabel:
        return f"{len(found.targets)} labels of 0 and 1"
    return f"{counted(len(found.targets), 'numbers')} to predict"
