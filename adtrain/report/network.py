"""The network as a strip of blocks: the size of each layer's output, and the time that a step spends in the layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log, prod
from typing import NamedTuple

from adtrain import config, nn
from adtrain.config import Config
from adtrain.nn.fields import size_text
from adtrain.training.costs import BEFORE
from adtrain.training.summary import OperationTime


class Block(NamedTuple):
    """A layer, the input or the loss.

    Attributes:
        numbers: numbers in the output for one example.
        height: `numbers` on a logarithmic scale, 0 to 1.
        ms: milliseconds of a step by phase. A kernel of several layers counts for the first of them.
        share: the part of the slowest block's time.
    """

    name: str
    kind: str
    shape: str
    numbers: int
    parameters: int
    height: float
    ms: dict[str, float]
    share: float


class Strip(NamedTuple):
    """The blocks from the input to the loss, and the milliseconds of work that belongs to none, such as updates."""

    blocks: Sequence[Block]
    rest_ms: float


def strip(cfg: Config, ops: Iterable[OperationTime]) -> Strip:
    """The strip of the config's network; without times where `ops` is empty."""
    layers = nn.describe(config.build.model(cfg), cfg.model.input)
    rows = [
        nn.LayerRow("input", "", cfg.model.input, 0),
        *layers,
        nn.LayerRow("loss", cfg.loss.kind, (), 0),
    ]
    names = [row.name for row in rows]
    times: dict[str, dict[str, float]] = {name: {} for name in names}
    rest = 0.0
    for op in ops:
        if (name := _block(op.scope, names)) is None:
            rest += op.ms
        else:
            times[name][op.phase] = times[name].get(op.phase, 0.0) + op.ms
    sizes = [prod(row.output_shape) for row in rows]
    slowest = max(sum(found.values()) for found in times.values()) or 1.0
    blocks = [
        Block(
            row.name,
            row.kind,
            size_text(row.output_shape),
            size,
            row.parameters,
            log(size + 1) / log(max(sizes) + 1),
            times[row.name],
            sum(times[row.name].values()) / slowest,
        )
        for row, size in zip(rows, sizes, strict=True)
    ]
    return Strip(blocks, rest)


def _block(scope: str, names: Sequence[str]) -> str | None:
    """The first layer in the scope of a kernel, or else its input or loss; None if there is neither."""
    parts = [nn.layer_of(part)[0] for part in scope.split("+")]
    for part in parts:
        inside = [name for name in names if name == part or name.startswith(f"{part}.")]
        if inside and part not in ("input", "loss"):
            return inside[-1]
    if any(part in BEFORE for part in parts):
        return "input"
    return "loss" if "loss" in parts or "accuracy" in parts else None
