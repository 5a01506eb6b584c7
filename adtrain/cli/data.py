"""`adtrain data`: inspects, lists, fetches and verifies data sets."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import numpy as np
from tqdm import tqdm

from adtrain import config, data
from adtrain.cli.options import FilePath, OutputFile, Whole, json_option, set_data_option
from adtrain.cli.output import STDOUT, print_json, progress, show, write_file
from adtrain.config.document import Data
from adtrain.core.errors import AdtrainError
from adtrain.data import DataSet, Rows, catalogue, token_folder, tokenizer
from adtrain.data.errors import printable, warn
from adtrain.data.file_array import FileArray, Sequences
from adtrain.data.images import contact_sheet
from adtrain.data.split import Labels, Split, chunks
from adtrain.data.statistics import digits
from adtrain.data.tokenizer import LARGEST_VOCABULARY, SMALLEST_VOCABULARY, shown
from adtrain.table import COUNT, PERCENT, TEXT, Column, render, terminal_width
from adtrain.text import counted, first_names

MOST_ROWS = 30
FEW = 10
"""A class with fewer examples is named in a warning."""
MOST_NAMES = 5
"""Names in a warning."""
DIGITS = 4
PARTS = ("train", "validation", "test")
STATISTICS = {"mean": "mean", "deviation": "std", "least": "min", "greatest": "max"}
"""Keys of a row of `document`, by the titles of their columns."""


@click.command("inspect", short_help="Show classes and statistics of data.")
@click.argument("source", metavar="PATH|NAME|CONFIG.yaml")
@set_data_option
@click.option(
    "--contact-sheet",
    "sheet",
    type=OutputFile(".png", binary=True),
    metavar="FILE.png",
    help="Draw some images of each class.",
)
@json_option
def inspect(source: str, data_overrides: tuple[str, ...], sheet: Path | None, as_json: bool) -> None:
    """Show the classes with their numbers of examples, and the statistics of targets and channels, of the data at PATH,
    of the data set NAME, or of the data of a config."""
    cfg = _config(source, data_overrides) if Path(source).suffix in (".yaml", ".yml") else None
    section = section_of(source, data_overrides) if cfg is None else cfg.data
    if section.path is not None and token_folder.is_token_folder(folder := Path(section.path).expanduser()):
        token_folder.verify(folder)
    if cfg is None:
        found = data.load(source if section.path is None else None, section.path, section.options, need_test=False)
    else:
        from adtrain.training.preparation import read_data

        found = read_data(cfg)
    warn_of_rare_classes(found, found.test)
    warn_of_equal_columns(found)
    if sheet is not None:
        write_file(sheet, contact_sheet(found.name, found.train, found.classes))
    if as_json:
        print_json(document(found))
    else:
        show(*report(found, terminal_width()))


def _config(path: str, overrides: Sequence[str]) -> config.Config:
    """The config with overrides of its section data. Raises AdtrainError if its data are neither a path nor a name."""
    cfg = config.load(path, config.of_data(overrides))
    if cfg.data.path is None and cfg.data.dataset is None:
        raise AdtrainError(f"{path}: data: found no files to inspect, expected path or dataset")
    return cfg


def section_of(source: str, overrides: Sequence[str], given: Mapping[str, Any] = MappingProxyType({})) -> Data:
    """The data section of a config for the data at a path, or of a data set by its name, with the keys `given`.

    A folder of tokens needs no key: the unit is a token.
    """
    named = source in data.CATALOGUE
    keys = {"dataset" if named else "path": source, **given}
    if not named and token_folder.is_token_folder(Path(source).expanduser()):
        keys["unit"] = "token"
    return config.load_data(keys, overrides)


def warn_of_rare_classes(found: DataSet, test: Split) -> None:
    """Warn in one line about classes of fewer than FEW examples, or without one in the part `test`, if there is one."""
    if not found.classes or found.train.is_text:
        return
    train, in_test = (counts_of(labels, len(found.classes)) for labels in (found.train.labels, test.labels))
    counts = train + counts_of(found.test.labels, len(found.classes))
    lacking = np.flatnonzero((counts >= FEW) & (in_test == 0)).tolist() if len(test) else []
    for what, reason, classes in (
        ("few examples", "the scores of so few say little", np.flatnonzero(counts < FEW).tolist()),
        ("no test examples", "it has no scores" if len(lacking) == 1 else "they have no scores", lacking),
    ):
        of_test = [f", {in_test[i]} in the test part" if len(test) and counts[i] < FEW else "" for i in classes]
        names = [f"{printable(found.classes[i])} ({counts[i]:,}{x})" for i, x in zip(classes, of_test, strict=True)]
        if names:
            of = f"of {'class' if len(names) == 1 else 'classes'} {first_names(names, MOST_NAMES)}"
            warn(found.name, f"found {what} {of}: {reason}")


def warn_of_equal_columns(found: DataSet) -> None:
    """Warn in one line about columns of a table that have equal values in all training rows."""
    if found.encoder is None or not found.features:
        return
    features, begin = np.asarray(found.train.images)[:, :, 0, 0], 0
    alike: dict[bytes, list[str]] = {}
    for column in found.encoder.columns.features:
        end = begin + found.encoder.width(column)
        values = features[:, begin:end].tobytes() + np.array(found.offset[begin:end]).tobytes()
        alike.setdefault(sha256(values).digest(), []).append(printable(column.title))
        begin = end
    several = [names if len(names) <= MOST_NAMES else [*names[:MOST_NAMES], "..."] for names in alike.values()]
    if equal := [" = ".join(names) for names in several if len(names) > 1]:
        warn(found.name, f"found equal columns: {first_names(equal, MOST_NAMES)}; data.drop leaves columns out")


def document(found: DataSet) -> dict[str, Any]:
    """The result as JSON values."""
    images, (least, greatest) = found.train.images, extremes(found)
    channels = () if found.train.is_text else found.features or tuple(map(str, range(len(found.mean))))
    return {
        "name": found.name,
        "train": len(found.train) - found.validation_rows,
        "validation": found.validation_rows,
        "test": len(found.test),
        "shape": list(found.train.images.shape[1:]),
        "dtype": str(found.train.images.dtype),
        "in_file": isinstance(images.base if isinstance(images, Rows) else images, (FileArray, Sequences)),
        "classes": _classes(found),
        "targets": _targets(found),
        "channels": [
            {"name": name, "mean": found.mean[i], "std": found.std[i], "min": least[i], "max": greatest[i]}
            for i, name in enumerate(channels)
        ],
        "scale": found.scale,
        "skipped": list(found.skipped),
    }


def report(found: DataSet, width: int) -> list[str]:
    """The result as lines of text."""
    about = document(found)
    shape = " x ".join(map(str, about["shape"]))
    place = ", read from the file as needed" if about["in_file"] else ""
    is_text = found.train.is_text
    kind = "sequences" if is_text else "examples"
    validation = f", {found.validation_rows:,} validation" if found.validation_rows else ""
    unit = "characters or bytes" if found.tokenizer is None else "tokens"
    each = f"a sequence of {about['shape'][-1]} {unit}" if is_text else f"{shape} {about['dtype']}"
    lines = [
        f"{found.name}: {about['train']:,} training{validation} and {len(found.test):,} test {kind}",
        f"each {each}{place}",
        "",
    ]
    if found.targets:
        lines += _statistics(about["targets"], "target", width)
    else:
        examples = max(sum(row["train"] for row in about["classes"]), 1)
        parts = [part for part in PARTS[1:] if part != "validation" or found.validation_rows]
        columns: list[Column[dict[str, Any]]] = [
            Column("class", lambda row: shown(row["name"], unit == "tokens") if is_text else row["name"], TEXT),
            Column("training", itemgetter("train"), COUNT),
            Column("share", lambda row: row["train"] / examples, PERCENT),
            *(Column[dict[str, Any]](part, itemgetter(part), COUNT) for part in parts),
        ]
        lines += _table(columns, about["classes"], "classes", width)
    if about["channels"]:
        lines += ["", *_statistics(about["channels"], "channel", width)]
    read = () if found.encoder is None else found.encoder.columns.features
    if signs := [f"{printable(column.title)} ({column.sign})" for column in read if column.sign]:
        lines.append(f"read without their signs: {first_names(signs)}")
    if found.scale != 1:
        lines.append(f"mean and deviation are those of pixels / {found.scale:.0f}")
    if found.skipped:
        lines += ["", f"skipped {len(found.skipped)}:", *found.skipped]
    return lines


def extremes(found: DataSet) -> tuple[list[float], list[float]]:
    """The minimum and the maximum of each channel in the training part."""
    least, greatest = [], []
    for chunk in chunks(found.train.images):
        least.append(chunk.min(axis=(0, 2, 3)))
        greatest.append(chunk.max(axis=(0, 2, 3)))
    offset = np.array(found.offset or 0.0)
    return (np.min(least, axis=0) + offset).tolist(), (np.max(greatest, axis=0) + offset).tolist()


def counts_of(labels: Labels, classes: int) -> np.ndarray:
    """The number of examples, or of positions of a text, with each label: int64 (classes,)."""
    each = (np.bincount(chunk.ravel(), minlength=classes) for chunk in chunks(labels))
    return sum(each, np.zeros(classes, np.int64))


def _classes(found: DataSet) -> list[dict[str, Any]]:
    """The numbers of examples of each class, or labels of a text, in each part; empty for numbers to predict."""
    if found.targets:
        return []

    first = len(found.train) - found.validation_rows
    labels = {"train": found.train.labels, "validation": found.train.labels[first:], "test": found.test.labels}
    counts = {part: counts_of(x, len(found.classes)).tolist() for part, x in labels.items()}
    counts["train"] = (np.array(counts["train"]) - counts["validation"]).tolist()
    return [{"name": name, **{part: counts[part][i] for part in PARTS}} for i, name in enumerate(found.classes)]


def _targets(found: DataSet) -> list[dict[str, Any]]:
    """The statistics of each target of the training part; empty for classes."""
    columns = found.train.labels.T if found.targets else ()
    return [
        {"name": name, "mean": float(x.mean()), "std": float(x.std()), "min": float(x.min()), "max": float(x.max())}
        for name, x in zip(found.targets, columns, strict=True)
    ]


def _statistics(rows: list[dict[str, Any]], of: str, width: int) -> list[str]:
    """The table of targets or channels."""

    def cell(key: str, row: dict[str, Any]) -> str:
        n = digits(row["mean"], row["std"], DIGITS) if row["std"] and key != "std" else DIGITS
        return f"{row[key]:.{n}g}"

    columns = [Column(of, itemgetter("name"), TEXT), *(Column(x, partial(cell, key)) for x, key in STATISTICS.items())]
    return _table(columns, rows, f"{of}s", width)


def _table(columns: Sequence[Column[dict[str, Any]]], rows: list[dict[str, Any]], what: str, width: int) -> list[str]:
    lines = render(columns, rows[:MOST_ROWS], width)
    return [*lines, f"and {len(rows) - MOST_ROWS} more {what}"] if len(rows) > MOST_ROWS else lines


@click.command("fetch", short_help="Download a data set, and verify it.")
@click.argument("name")
@click.option("--mirror", metavar="URL", help="Download from this folder: an http, https or file URL.")
def fetch(name: str, mirror: str | None) -> None:
    """Download the data set NAME into the user's cache and verify it; an interrupted download continues.

    Use it in a config by `data: {dataset: NAME}`. `adtrain data list` shows the names.
    """
    display = _DownloadProgress()
    try:
        folder = catalogue.fetch(catalogue.find(name), mirror, display.update)
    finally:
        display.close()
    show(folder)


class _DownloadProgress:
    """Shows each file as a progress bar on a terminal, otherwise as a line."""

    def __init__(self) -> None:
        self.name = ""
        self.bar: tqdm[Any] | None = None

    def update(self, name: str, done: int, total: int | None) -> None:
        """Show that `done` of the file's `total` bytes have been downloaded."""
        if name != self.name:
            self.close()
            self.name = name
            if sys.stderr.isatty():
                self.bar = tqdm(total=total, desc=name[:24], unit="B", unit_scale=True, leave=False, dynamic_ncols=True)
            else:
                progress(f"{name}: {'size unknown' if total is None else f'{total / 1e6:,.1f} MB'}")
        if self.bar is not None:
            self.bar.update(done - self.bar.n)

    def close(self) -> None:
        """Remove the bar, so that other output can follow."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


@click.command("tokenize", short_help="Write the tokens of text files to a folder.")
@click.argument("paths", metavar="FILE...", type=FilePath(), nargs=-1, required=True)
@click.option("-o", "--output-dir", "folder", type=FilePath(), metavar="DIR", required=True, help="The folder to make.")
@click.option(
    "--vocabulary",
    type=Whole(SMALLEST_VOCABULARY, LARGEST_VOCABULARY),
    help="Learn N tokens from the texts, by byte-pair encoding.",
)
@click.option("--tokenizer", "given", type=FilePath(), metavar="FILE", help="Use this tokenizer.json instead.")
@click.option(
    "--shard-tokens",
    type=Whole(min=1),
    default=token_folder.SHARD_TOKENS,
    help="The most tokens in a file of the folder.",
)
@json_option
def tokenize(
    paths: tuple[Path, ...], folder: Path, vocabulary: int | None, given: Path | None, shard_tokens: int, as_json: bool
) -> None:
    """Write the tokens of text files to FOLDER, each text followed by an end of a text: the data of a training that may
    be larger than the memory. A FILE can be a folder, whose .txt files are then taken, also those in folders below.

    Use the tokens in a config by `data: {path: FOLDER, unit: token}`. `adtrain new FOLDER` prints one.
    """
    if folder == STDOUT:
        raise click.UsageError("-o -: tokens are a folder of files, expected a folder")
    token_folder.expect_nothing(folder)
    documents = token_folder.documents_of(paths)
    if vocabulary is not None and given is None:
        progress(f"learning {vocabulary:,} tokens from {counted(len(documents), 'texts')}")
        used = tokenizer.train((piece for path in documents for piece in tokenizer.pieces_of(path)), vocabulary)
    elif given is not None and vocabulary is None:
        used = tokenizer.read(given)
    else:
        raise click.UsageError("expected one of --vocabulary and --tokenizer")
    progress("writing the tokens")
    header = token_folder.write(documents, folder, used, shard_tokens)
    if as_json:
        print_json({"folder": str(folder), **asdict(header)})
        return
    show(
        f"tokens  {header.tokens:,} of {counted(header.documents, 'texts')}, vocabulary {header.vocabulary:,}, "
        f"{header.bytes / header.tokens:.2f} bytes of text per token",
        f"files   {counted(len(header.shards), 'files')} of {header.dtype}",
        f"folder  {folder}",
    )


@click.group()
def command() -> None:
    """Inspect data sets, list those that a config can name, fetch and verify their files, and make tokens of texts."""


command.add_command(inspect)
command.add_command(fetch)
command.add_command(tokenize)


@command.command("list")
@json_option
def list_entries(as_json: bool) -> None:
    """List the data sets that `data: {dataset: NAME}` can name."""
    entries = list(catalogue.CATALOGUE.values())
    if as_json:
        names = "name", "title", "train_images", "test_images", "shape", "classes", "licence"
        rows = [{name: getattr(entry, name) for name in names} for entry in entries]
        places = ({"folder": str(entry.folder), "here": entry.is_here} for entry in entries)
        print_json([row | place for row, place in zip(rows, places, strict=True)])
        return
    for entry in entries:
        shape = " x ".join(str(size) for size in entry.shape)
        show(f"{entry.name}  {entry.title}")
        show(f"  {entry.train_images:,} training and {entry.test_images:,} test images of {shape}")
        show(f"  {len(entry.classes)} classes, licence {entry.licence}")
        show(f"  {entry.folder if entry.is_here else f'not here; fetch it: adtrain data fetch {entry.name}'}")


@command.command("verify", short_help="Verify the checksums of data sets.")
@click.argument("name", required=False)
@json_option
def verify(name: str | None, as_json: bool) -> None:
    """Verify the checksums of data set NAME, or of all local data sets; exit code 1 on a mismatch."""
    entries = [catalogue.find(name)] if name else [entry for entry in catalogue.CATALOGUE.values() if entry.is_here]
    checks = [(entry, check) for entry in entries for check in catalogue.verify(entry)]
    passed = all(check.passed for _, check in checks)
    if as_json:
        rows = [
            {"dataset": entry.name, "file": x.path.name, "expected": x.expected, "found": x.found, "passed": x.passed}
            for entry, x in checks
        ]
        print_json({"passed": passed, "rows": rows})
    else:
        for entry, check in checks:
            verdict = "ok" if check.passed else f"FAILED: {check.found}, expected SHA-256 {check.expected}"
            show(f"{entry.name}/{check.path.name}: {verdict}")
    if not passed:
        raise SystemExit(1)
