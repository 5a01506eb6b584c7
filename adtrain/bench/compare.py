"""What moved between two results of `adtrain bench`, beyond what the measurements themselves say is noise."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from adtrain.core.errors import AdtrainError

LEAST = 0.02
"""A change, as a part of the time before, that is worth a line."""

TIMES = {"median_ms", "low_ms", "high_ms"}
KINDS = ("ops", "config", "against", "analysis")


class Move(NamedTuple):
    """A time that changed; milliseconds."""

    name: str
    before_ms: float
    after_ms: float

    @property
    def change(self) -> float:
        """Above 0 it is slower by so large a part."""
        return self.after_ms / self.before_ms - 1


class Comparison(NamedTuple):
    """Two results held against each other.

    Attributes:
        slower, faster: what moved, the largest factor first.
        same: how many times did not.
        only_before, only_after: names of times that the other result lacks.
        protocol: what the two were measured with, where that differs: before and after.
    """

    slower: list[Move]
    faster: list[Move]
    same: int
    only_before: list[str]
    only_after: list[str]
    protocol: dict[str, tuple[Any, Any]]


def read(path: str | Path) -> dict[str, Any]:
    """The result in a file of `adtrain bench --json`.

    Raises:
        AdtrainError: it cannot be read, or is none.
    """
    try:
        found = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else f"it is no JSON ({error})"
        raise AdtrainError(f"{path}: cannot be read: {cause}") from None
    if not isinstance(found, dict) or found.get("kind") not in KINDS or not isinstance(found.get("protocol"), dict):
        raise AdtrainError(
            f"{path}: found no result of `adtrain bench --json`, expected one with a kind and a protocol"
        )
    return found


def compare(before: Mapping[str, Any], after: Mapping[str, Any], names: tuple[str, str]) -> Comparison:
    """What moved: confidence intervals that do not meet, and medians more than LEAST apart.

    Two intervals of 95% miss each other by chance about once in two hundred times that did not change; and they speak
    of the seconds in which the samples were taken: a machine that does other work now and then moves what it likes.

    Args:
        names: of the two, for messages.

    Raises:
        AdtrainError: they are of different kinds or devices.
    """
    for what, of in (("kind", lambda x: x["kind"]), ("device", lambda x: x["protocol"].get("device_name"))):
        if of(before) != of(after):
            raise AdtrainError(
                f"--compare: {names[0]} is of {what} {of(before)}, {names[1]} of {of(after)}; "
                f"expected two results of one {what}"
            )
    old, new = dict(times(before)), dict(times(after))
    moves = [Move(name, old[name]["median_ms"], new[name]["median_ms"]) for name in old if name in new]
    moved = [move for move in moves if _moved(move, old[move.name], new[move.name])]
    slower, faster = (
        sorted((move for move in moved if (move.change > 0) == up), key=lambda move: -abs(_log(move)))
        for up in (True, False)
    )
    about = before["protocol"], after["protocol"]
    differing = {key: (about[0].get(key), about[1].get(key)) for key in sorted(about[0].keys() | about[1].keys())}
    return Comparison(
        slower,
        faster,
        len(moves) - len(moved),
        [name for name in old if name not in new],
        [name for name in new if name not in old],
        {
            key: pair
            for key, pair in differing.items()
            if pair[0] != pair[1] and key not in ("date", "load", "overhead_ms")
        },
    )


def times(result: Any) -> Iterator[tuple[str, Mapping[str, float]]]:
    """All times of a result with their names: the keys that lead to them, and of an element of a list the texts that it
    holds. Times of one name are numbered."""
    seen: Counter[str] = Counter()
    for name, record in _walk(result, ()):
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name} #{seen[name]}"), record


def _walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, float]]]:
    if isinstance(node, Mapping):
        if node.keys() >= TIMES:
            yield " ".join(path), node
            return
        for key, value in node.items():
            yield from _walk(value, path if key in ("time", "protocol") else (*path, key))
    elif isinstance(node, list):
        for each in node:
            if isinstance(each, Mapping):
                texts = [value for value in each.values() if isinstance(value, str) and value]
                yield from _walk(each, (*path, *texts))


def _moved(move: Move, old: Mapping[str, float], new: Mapping[str, float]) -> bool:
    apart = old["high_ms"] < new["low_ms"] or new["high_ms"] < old["low_ms"]
    return apart and move.before_ms > 0 and abs(move.change) > LEAST


def _log(move: Move) -> float:
    return math.log(move.after_ms / move.before_ms) if move.after_ms > 0 else math.inf
