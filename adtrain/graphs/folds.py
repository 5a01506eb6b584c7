"""Repeated blocks of a network, such as the layers of a transformer, which a picture draws once."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import groupby
from typing import NamedTuple

from adtrain import nn
from adtrain.core.program import Program
from adtrain.graphs.roles import flat

LEAST = 3
"""Minimum neighbouring equal blocks that are drawn as one."""


class Folds(NamedTuple):
    """The scope that stands for each scope of a repeated block, and the labels of those that stand for several."""

    scopes: dict[str, str]
    labels: dict[str, str]


NONE = Folds({}, {})


def folds(program: Program) -> Folds:
    """The runs of at least LEAST blocks whose layers have the same names, kinds and equations, in a traced Program.

    A block is what has one number in the path of a layer: "2.norm1" and "2.linear1" are of block 2. It has at least two
    layers.
    """
    equations: dict[str, list[Hashable]] = {}
    for e in flat(program.equations):
        if e.phase == "forward":
            shapes = tuple(v.type.shape for v in e.outputs)
            equations.setdefault(e.scope.partition("+")[0], []).append((e.name, shapes))
    blocks: dict[tuple[str, int], dict[tuple[str, str], str]] = {}
    for scope in equations:
        name, kind = nn.layer_of(scope)
        path = name.split(".")
        number = next((i for i, part in enumerate(path) if part.isdecimal()), None)
        if number is not None:
            at, inside = (".".join(path[:number]), int(path[number])), ".".join(path[number + 1 :])
            blocks.setdefault(at, {})[inside, kind] = scope

    def signature(at: tuple[str, int]) -> Hashable:
        layers = blocks[at]
        return at[0], frozenset((key, tuple(equations[scope])) for key, scope in layers.items())

    found = Folds({}, {})
    for _, group in groupby(blocks, signature):
        run = list(group)
        first, last = blocks[run[0]], run[-1][1]
        if len(run) < LEAST or len(first) < 2:
            continue
        for at in run:
            found.scopes.update((scope, first[key]) for key, scope in blocks[at].items())
        prefix, number = run[0]
        for (inside, kind), scope in first.items():
            name = ".".join(filter(None, (prefix, f"{number}…{last}", inside)))
            found.labels[scope] = f"{name} {kind}"
    return found
