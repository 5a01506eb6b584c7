"""The axes of a Program's inputs and outputs, as they follow from those of its equations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from adtrain.core.axes import Axes, letters
from adtrain.core.program import Equation, Program, Variable

Axis: TypeAlias = tuple[Variable, int]
"""A value and the number of one of its axes."""


def axes_of_body(body: Program) -> Axes:
    """Axes of inputs and outputs move together if all equations between them relate them. An axis of inputs is added if
    the outputs are sums over it of what is computed at each index."""
    outputs = {(v, i) for v in body.outputs for i in range(len(v.type.shape))}
    found = joined(related_axes(body.equations))
    together = [axes for axes in found if not outputs.isdisjoint(axes) and _move_together(body, axes)]
    added = [axes for axes in found if outputs.isdisjoint(axes) and _are_added(body, axes)]
    names = letters(len(together) + len(added))
    labels = {axis: label for label, axes in zip(names, (*together, *added), strict=True) for axis in axes}
    given, results = (
        tuple(tuple(labels.get((v, i), "") for i in range(len(v.type.shape))) for v in variables)
        for variables in (body.inputs, body.outputs)
    )
    return Axes(given, results, frozenset(names[len(together) :]))


def related_axes(equations: Iterable[Equation]) -> Iterator[tuple[Axis, Axis]]:
    """Pairs of axes that have the same label in an equation. Joined axes are left out."""
    for e in equations:
        first: dict[str, Axis] = {}
        axes = e.axes.undivided()
        for v, labels in zip((*e.inputs, *e.outputs), (*axes.arguments, *axes.results), strict=True):
            yield from ((first.setdefault(label, (v, i)), (v, i)) for i, label in enumerate(labels) if label)


def _move_together(body: Program, own: set[Axis]) -> bool:
    """Whether a body computes, at each index of these axes, the same function of its inputs at that index."""
    at = dict(own)
    if len(at) < len(own):  # two axes of one value, as of x + transpose(x)
        return False
    mixed: set[Variable] = set()  # computed from several indices
    for e in body.equations:
        axes = e.axes.undivided()
        read = {labels[at[v]] for v, labels in zip(e.inputs, axes.arguments, strict=True) if v in at}
        for y, labels in zip(e.outputs, axes.results, strict=True):
            if y not in at:
                mixed |= {y} if read or not mixed.isdisjoint(e.inputs) else set()
            elif not labels[at[y]] or read - {labels[at[y]]} or not mixed.isdisjoint(e.inputs):
                return False
    return True


def _are_added(body: Program, own: set[Axis]) -> bool:
    """Whether each output of a body is a sum over these axes of a function of the inputs at each index."""
    at = dict(own)
    if len(at) < len(own):
        return False
    for e in body.equations:
        axes = e.axes.undivided()
        read = {labels[at[v]] for v, labels in zip(e.inputs, axes.arguments, strict=True) if v in at}
        for y, labels in zip(e.outputs, axes.results, strict=True):
            if y in at:
                follows = bool(labels[at[y]]) and read <= {labels[at[y]]}
            elif read:
                follows = len(read) == 1 and read <= axes.added and y in body.outputs and y not in body.readers
            else:
                follows = y not in body.outputs
            if not follows:
                return False
    return bool(body.outputs)


def joined(pairs: Iterable[tuple[Axis, Axis]]) -> list[set[Axis]]:
    """Sets of axes that move together, from pairs that do."""
    links: dict[Axis, list[Axis]] = {}
    for a, b in pairs:
        links.setdefault(a, []).append(b)
        links.setdefault(b, []).append(a)
    found: list[set[Axis]] = []
    done: set[Axis] = set()
    for first in links:
        own, waiting = set(), [first] if first not in done else []
        while waiting:
            axis = waiting.pop()
            if axis not in own:
                own.add(axis)
                waiting += links[axis]
        done |= own
        found += [own] if own else []
    return found
