"""softmax, its logarithm, and logsumexp: `softmax.c`."""

from __future__ import annotations

from adtrain.core.registry import register
from adtrain.lowering.cpu.reduce import lengths
from adtrain.lowering.cpu.shapes import item_and_team
from adtrain.lowering.shapes import split_at

register(
    "softmax",
    "cpu",
    item_and_team("softmax.c", "softmax", lambda x, axis: (*split_at(x.shape, axis), 0)),
)
register(
    "log_softmax",
    "cpu",
    item_and_team("softmax.c", "softmax", lambda x, axis: (*split_at(x.shape, axis), 1)),
)
register("logsumexp", "cpu", item_and_team("softmax.c", "logsumexp", lengths))
