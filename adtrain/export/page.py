"""A page that runs a network in a browser: on drawings and images, on the columns of a table, or on a text."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from math import floor, log10, prod
from typing import Any

import numpy as np
from markupsafe import Markup

from adtrain.core.errors import AdtrainError
from adtrain.data import Split
from adtrain.data.digit_image import DARK
from adtrain.data.part import Columns
from adtrain.data.table_encoder import TableEncoder
from adtrain.export.c import network
from adtrain.export.c.build import ready_layers
from adtrain.export.c.javascript import PageProgram
from adtrain.nn.module import size_text
from adtrain.templates import environment
from adtrain.text import short
from adtrain.training import TrainedModel
from adtrain.training.inputs import is_of_mnist
from adtrain.training.tasks import Regression

LARGEST = 400_000_000
"""Bytes of constants of the largest page: as base 64, browsers hold about 512 MB of text."""
MOST_FIELDS = 100
"""Fields of a page for rows of numbers without names."""
DEVIATIONS = 3
"""Standard deviations on each side of the mean that a slider covers where the examples cannot be read."""
POSITIONS = 200
"""Minimum positions of a slider for numbers that are not whole."""


def encode(trained: TrainedModel, program: PageProgram, examples: Split | None) -> bytes:
    """The page with a network's `program`: one file, which loads nothing else.

    `examples` give the ranges of the sliders of a table. Raises AdtrainError for a network whose input is no image of
    bytes in grey or colour, no row of a table, and no text, or which is too large.
    """
    about = network.interface(trained)
    if len(program.constants) > LARGEST:
        size, most = short(len(program.constants), "B"), short(LARGEST, "B")
        raise AdtrainError(f"found {size} of weights, expected at most {most} for a page; export FILE.c")
    kind, own = _input(trained, about, examples)
    shown = {
        "kind": kind, "shape": about.image, "labels": about.labels, "first": program.first_shape,
        "areNumbers": isinstance(trained.network.task, Regression), **own,
    }  # fmt: skip
    sizes = f"{short(len(program.constants), 'B')} of weights, {short(program.memory, 'B')} of memory"
    return environment().get_template("demo.html.j2").render(
        title=trained.config.name,
        note=f"The network runs in this page: {sizes}. It sends nothing.",
        about=shown,
        script=script(about, program),
    ).encode()  # fmt: skip


def script(about: network.Interface, program: PageProgram) -> Markup:
    """The JavaScript that runs a network: `load`, then `predict`."""
    known = {
        "calls": program.calls, "size": program.size, "image": program.image, "outputs": program.outputs,
        "first": program.first, "types": [about.c_type, about.output_type], "count": program.output_count,
        "firstCount": prod(program.first_shape), "labels": len(about.labels),
    }  # fmt: skip
    template = environment().get_template("demo_network.js.j2")
    return Markup(
        template.render(
            program=known,
            generated=Markup(program.functions),
            module=base64.b64encode(ready_layers()).decode(),
            constants=base64.b64encode(program.constants).decode(),
        )
    )


def _input(trained: TrainedModel, about: network.Interface, examples: Split | None) -> tuple[str, Mapping[str, Any]]:
    """The kind of a page, and what it needs to know of its input."""
    channels, height, width = about.image
    if about.is_text:
        return "text", _text(trained)
    if about.c_type == "uint8_t" and channels in (1, 3) and min(height, width) > 1:
        return "image", {"centred": is_of_mnist(trained), "dark": trained.network.mean[0] < DARK}
    if height == width == 1 and (trained.encoder is not None or channels <= MOST_FIELDS):
        encoder = trained.encoder or TableEncoder(Columns.named(f"feature {i}" for i in range(channels)), ())
        indexed = encoder.encoding == "index"
        return "table", {"columns": _columns(trained, encoder, examples), "indexed": indexed}
    found = f"{size_text(about.image)} {'bytes' if about.c_type == 'uint8_t' else 'numbers'}"
    kinds = f"images of bytes in grey or colour, tables, rows of up to {MOST_FIELDS} numbers, and texts"
    raise AdtrainError(f"pages are for {kinds}; this run takes {found}; write a .wasm file")


def _columns(trained: TrainedModel, encoder: TableEncoder, examples: Split | None) -> list[dict[str, Any]]:
    """The fields of a table: names, kinds, ranges, and the features of empty cells, where these are allowed."""
    found, begin = [], 0
    for column in encoder.columns.features:
        width = encoder.width(column)
        filled = encoder.fill[begin : begin + width] or None
        known: dict[str, Any] = {"name": column.title, "width": width, "fill": filled}
        if column.categories is not None:
            known |= {"kind": "category", "categories": column.categories}
        else:
            low, high, step = _range(trained, examples, begin)
            known |= {"kind": "date" if column.is_date else "number", "low": low, "high": high, "step": step}
            known["start"] = _rounded(min(max(trained.network.mean[begin], low), high), step)
        found.append(known)
        begin += width
    return found


def _range(trained: TrainedModel, examples: Split | None, feature: int) -> tuple[float, float, float]:
    """The least, the largest and the step of a feature's slider; a step of 1 where all examples have whole numbers."""
    mean, std = float(trained.network.mean[feature]), float(trained.network.std[feature])
    low, high, is_whole = mean - DEVIATIONS * std, mean + DEVIATIONS * std, False
    if examples is not None and len(examples):
        values = trained.network.original(np.asarray(examples.images))[:, feature]
        low, high, is_whole = float(values.min()), float(values.max()), bool((values == np.rint(values)).all())
    step = 1.0 if is_whole else 10.0 ** floor(log10(max(high - low, 1e-30) / POSITIONS))
    return _rounded(low, step, down=True), _rounded(high, step), step


def _rounded(x: float, step: float, down: bool = False) -> float:
    """The multiple of a step near a number, without digits beyond the step's."""
    count = floor(x / step) if down else round(x / step)
    return round(count * step, max(0, -floor(log10(step))))


def _text(trained: TrainedModel) -> dict[str, Any]:
    """What the page needs to make classes of a text, and text of classes.

    Raises AdtrainError for a tokenizer that normalises a text, or divides it otherwise than that of GPT-2.
    """
    known: dict[str, Any] = {"unit": trained.config.data.options.unit, "classes": len(trained.classes)}
    if (tokenizer := trained.tokenizer) is None:
        return known
    about = json.loads(tokenizer.content)
    divided = about.get("pre_tokenizer") or {}
    if about.get("normalizer") or divided.get("type") != "ByteLevel" or divided.get("add_prefix_space"):
        raise AdtrainError("found a tokenizer that pages do not have, expected GPT-2's or one of adtrain data tokenize")
    numbers = {name: number for number, name in enumerate(tokenizer.classes)}
    pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in about["model"]["merges"])
    merges = [(numbers[a], numbers[b], numbers[a + b]) for a, b in pairs]
    tokens = [x.decode("latin-1") for x in tokenizer.tokens]
    return known | {"tokens": tokens, "merges": merges, "end": tokenizer.end_of_text}
