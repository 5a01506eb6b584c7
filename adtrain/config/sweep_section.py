"""The section `sweep` of a config: which values its members have, and how they are ranked.

    sweep:
      optimizer.adam.lr: {log_uniform: [1e-4, 1e-2], samples: 20}
      training.seed: {range: 5}
      model.layers.0.linear: [64, 128]
      rank_by: validation_accuracy

Keys with a dot, and the names of sections, are paths into the config. Lists and ranges form a grid. Random values are
drawn together: a sample has a value for each random key. There is a member for each pair of a grid point and a sample.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, NoReturn

import numpy as np
from pydantic import AfterValidator, Field

from adtrain.config.overrides import parts_of
from adtrain.config.problems import ConfigError, Problem, found, known, similar
from adtrain.config.records import LIMIT, leaves
from adtrain.config.source import Node
from adtrain.core.options import Expected, is_integer

MAX_MEMBERS = 100_000
METRIC = re.compile(r"(train|validation|test)_\w+")
ORDERS = ("own", "shared")
OPTIONS = ("rank_by", "order", "draw_seed")
RANDOM = ("log_uniform", "uniform", "choice")

Metric = Annotated[str, Field(pattern=f"^({METRIC.pattern})$"), Expected("a metric such as validation_accuracy")]
"""A metric that ranks members, in a record."""


def _small(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a member, if they have no number beyond LIMIT."""
    if any(isinstance(x, (int, float)) and not -LIMIT <= x <= LIMIT for _, x in leaves(values)):
        raise ValueError
    return values


Values = Annotated[
    dict[str, Any], AfterValidator(_small), Expected(f"values by key, with numbers of magnitude at most {LIMIT:g}")
]
"""The values of a member by key, in a record."""

_NUMBERS: dict[str, Any] = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1}
_VALUES: dict[str, Any] = {"type": "array", "minItems": 1}
_INTEGERS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}


def _form(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "values of the members of a sweep by dotted paths into the config",
    "properties": {
        "rank_by": {"type": "string", "pattern": METRIC.pattern},
        "order": {"enum": list(ORDERS)},
        "draw_seed": {"type": "integer", "minimum": 0},
    },
    "additionalProperties": {
        "anyOf": [
            _VALUES,
            _form(range={"anyOf": [_COUNT, _INTEGERS]}),
            _form(log_uniform=_NUMBERS, samples=_COUNT),
            _form(uniform=_NUMBERS, samples=_COUNT),
            _form(choice=_VALUES, samples=_COUNT),
        ]
    },
}
"""The JSON Schema of the section."""


@dataclass(frozen=True)
class Axis:
    """A key of the config, and its values: points of the grid, or samples."""

    key: str
    values: tuple[Node, ...]
    where: str
    random: bool


@dataclass(frozen=True)
class Sweep:
    """A parsed section.

    Attributes:
        rank_by: the metric that ranks members, such as "validation_accuracy"; None: as `training.best_by`.
        shared_order: whether all members train on the batches, and the validation split, of the config's own seed.
    """

    axes: tuple[Axis, ...]
    rank_by: str | None = None
    shared_order: bool = False

    def members(self) -> list[dict[str, Node]]:
        """The values of each member by key; the last grid axis varies fastest, then the samples."""
        grid = [axis for axis in self.axes if not axis.random]
        samples = [axis for axis in self.axes if axis.random]
        draws = list(zip(*(axis.values for axis in samples), strict=True)) if samples else [()]
        points = product(*(axis.values for axis in grid))
        keys = [axis.key for axis in (*grid, *samples)]
        return [dict(zip(keys, (*point, *draw), strict=True)) for point in points for draw in draws]


def parse(section: Node) -> Sweep:
    """The section of a config as a Sweep. Raises ConfigError that names the place of each problem."""
    if not isinstance(section.value, dict) or not section.value:
        message = f"found {found(section.plain())}, expected a mapping of keys to lists of values"
        raise ConfigError([Problem(section.where, "sweep", message)])
    problems: list[Problem] = []
    axes: list[Axis] = []
    options: dict[str, Any] = {"draw_seed": 0}
    for key, node in sorted(section.value.items(), key=lambda item: item[0] not in OPTIONS):  # options first
        where = section.key_where.get(key, node.where)
        try:
            if key in OPTIONS:
                options[key] = _option(key, node)
            else:
                axes.append(_axis(key, node, where, options["draw_seed"]))
        except ConfigError as error:
            problems += error.problems
    if not problems:
        problems += _inconsistent(section, axes)
    if problems:
        raise ConfigError(problems)
    return Sweep(tuple(axes), options.get("rank_by"), options.get("order") == "shared")


def _option(key: str, node: Node) -> Any:
    if key == "draw_seed":
        return _integer(node, key, 0)
    return _metric(node) if key == "rank_by" else _one_of(node, key, ORDERS)


def _inconsistent(section: Node, axes: Sequence[Axis]) -> list[Problem]:
    if not axes:
        return [Problem(section.where, "sweep", "found no key with values, expected one such as training.seed")]
    samples = [axis for axis in axes if axis.random]
    for axis in samples[1:]:
        if len(axis.values) != len(samples[0].values):
            message = f"found samples {len(axis.values)}, expected {len(samples[0].values)} as of {samples[0].key}"
            return [Problem(axis.where, f"sweep.{axis.key}", f"{message}: random values are drawn together")]
    seen: dict[str, Axis] = {}
    for axis in axes:
        path = ".".join(parts_of(axis.key) or ())
        if path in seen:
            return [Problem(axis.where, f"sweep.{axis.key}", f"found twice, first at {seen[path].where}")]
        seen[path] = axis
    count = math.prod(len(axis.values) for axis in axes if not axis.random) * (len(samples[0].values) if samples else 1)
    if count > MAX_MEMBERS:
        return [Problem(section.where, "sweep", f"found {count:,} members, expected at most {MAX_MEMBERS:,}")]
    return []


def _axis(key: str, node: Node, where: str, draw_seed: int) -> Axis:
    parts = parts_of(key)
    if parts is None or parts[0] in ("sweep", "name", "plugins"):
        _refuse(where, key, "found no key that a member can set, expected a path such as optimizer.adam.lr")
    if isinstance(node.value, list):
        if not node.value:
            _refuse(node.where, key, "found [], expected a list that is not empty")
        return Axis(key, tuple(node.value), where, random=False)
    if not isinstance(node.value, dict):
        hint = f"; {known(key, OPTIONS, 'options')}" if "." not in key else ""
        _refuse(node.where, key, f"found {found(node.plain())}, expected a list of values, a range or samples{hint}")
    given = dict(node.value)
    if "range" in given:
        _no_others(given, ("range",), key)
        return Axis(key, tuple(Node(where, i) for i in _range(given["range"], key)), where, random=False)
    kinds = [kind for kind in RANDOM if kind in given]
    if len(kinds) != 1:
        names = ("range", *RANDOM)
        hint = similar(next(iter(given), ""), names) or "a key is a whole path, such as optimizer.adam.lr"
        _refuse(node.where, key, f"found {found(node.plain())}, expected one of {', '.join(names)}; {hint}")
    _no_others(given, (kinds[0], "samples"), key)
    if "samples" not in given:
        _refuse(node.where, key, f"samples is missing, expected the number of values of {kinds[0]}")
    count = _integer(given["samples"], f"{key}.samples", 1)
    if count > MAX_MEMBERS:
        _refuse(given["samples"].where, f"{key}.samples", f"found {count}, expected at most {MAX_MEMBERS:,}")
    # A stream of its own for each key, so that another key does not change its values.
    rng = np.random.default_rng(np.random.SeedSequence(draw_seed, spawn_key=(zlib.crc32(key.encode()),)))
    return Axis(key, _draws(kinds[0], given[kinds[0]], key, count, rng, where), where, random=True)


def _draws(kind: str, node: Node, key: str, count: int, rng: np.random.Generator, where: str) -> tuple[Node, ...]:
    place = f"{key}.{kind}"
    if not isinstance(node.value, list) or not node.value:
        _refuse(node.where, place, f"found {found(node.plain())}, expected a list that is not empty")
    if kind == "choice":
        return tuple(node.value[i] for i in rng.integers(0, len(node.value), count))
    numbers = [item.value for item in node.value]
    if len(numbers) != 2 or not all(_is_number(x) for x in numbers) or not numbers[0] < numbers[1]:  # type: ignore[operator]
        _refuse(node.where, place, f"found {found(node.plain())}, expected [low, high] with low below high")
    low, high = map(float, numbers)  # type: ignore[arg-type]
    if kind == "uniform":
        return tuple(Node(where, low + (high - low) * float(x)) for x in rng.random(count))
    if low <= 0:
        _refuse(node.where, place, f"found {found(node.plain())}, expected numbers above 0")
    spread = math.log(high / low)
    return tuple(Node(where, low * math.exp(spread * float(x))) for x in rng.random(count))


def _range(node: Node, key: str) -> range:
    numbers = [item.value for item in node.value] if isinstance(node.value, list) else [node.value]
    are_integers = all(is_integer(x, None) for x in numbers)
    if not (1 <= len(numbers) <= 3 and are_integers) or numbers[2:] == [0]:
        expected = "expected a count, [start, stop] or [start, stop, step] of integers"
        _refuse(node.where, f"{key}.range", f"found {found(node.plain())}, {expected}")
    values = range(*numbers)
    if not 1 <= len(values) <= MAX_MEMBERS:
        _refuse(node.where, f"{key}.range", f"found {found(node.plain())}, expected 1 to {MAX_MEMBERS:,} values")
    return values


def _metric(node: Node) -> str:
    if isinstance(node.value, str) and METRIC.fullmatch(node.value):
        return node.value
    expected = "expected train_, validation_ or test_ with a metric, such as validation_accuracy"
    _refuse(node.where, "rank_by", f"found {found(node.plain())}, {expected}")


def _one_of(node: Node, name: str, names: Sequence[str]) -> str:
    if isinstance(node.value, str) and node.value in names:
        return node.value
    _refuse(node.where, name, f"found {found(node.plain())}, expected one of {', '.join(names)}")


def _integer(node: Node, name: str, least: int) -> int:
    if is_integer(node.value, least):
        return int(node.value)  # type: ignore[arg-type]
    _refuse(node.where, name, f"found {found(node.plain())}, expected an integer, at least {least}")


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _no_others(given: dict[str, Node], names: Sequence[str], key: str) -> None:
    for name in given:
        if name not in names:
            _refuse(given[name].where, key, f"unknown key {found(name)}; {known(name, names)}")


def _refuse(where: str, key: str, message: str) -> NoReturn:
    raise ConfigError([Problem(where, f"sweep.{key}", message)])
