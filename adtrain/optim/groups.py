"""Parameter groups: parameters, chosen by their paths, with other options than the rest, or not trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.errors import OptionError
from adtrain.core.options import CheckedArguments
from adtrain.core.types import Shape
from adtrain.optim.optimizer import Optimizer, OptState, Part, Tree, named, updated_in_parts
from adtrain.option_types import NonNegative, Patterns, Positive

VECTORS = "vectors"
"""The pattern of all arrays of one axis, such as biases and weights of normalisation layers."""


@dataclass(frozen=True)
class Group(CheckedArguments):
    """Options of the parameters whose paths match a pattern. An option that is None is the optimizer's.

    A path is that of `model.safetensors`, such as "0.weight". In a pattern `*` stands for any text, `?` for a
    character. The pattern `vectors` stands for all arrays of one axis, such as biases and weights of normalisation
    layers.

    Attributes:
        paths: a pattern, or several.
        lr_factor: a factor on the learning rate.
        weight_decay: in place of the optimizer's.
        trainable: whether the parameters are trained.
    """

    paths: Patterns
    _: KW_ONLY
    lr_factor: Positive | None = None
    weight_decay: NonNegative | None = None
    trainable: bool | None = None

    def matches(self, path: str, axes: int) -> bool:
        """Whether a parameter with this path and number of axes is in the group."""
        return matches(self.paths, path, axes)

    def require_fit(self, optimizer: Optimizer, shapes: Mapping[str, Shape]) -> None:
        """Raise OptionError unless the group fits the optimizer and the parameters. See `grouped`."""
        if all(getattr(self, option) is None for option in Sources._fields):
            raise OptionError(f"found paths alone, expected also {', '.join(Sources._fields[:-1])} or trainable")
        if self.weight_decay is not None and not _decays(optimizer):
            raise OptionError(f"found weight_decay, which {optimizer.kind()} does not have")
        require_matches(self.paths, shapes)


def matches(paths: Patterns, path: str, axes: int) -> bool:
    """Whether a parameter with this path and number of axes matches a pattern, or one of several."""
    patterns = (paths,) if isinstance(paths, str) else paths
    return any(axes == 1 if pattern == VECTORS else fnmatchcase(path, pattern) for pattern in patterns)


def require_matches(paths: Patterns, shapes: Mapping[str, Shape]) -> None:
    """Raise OptionError for a pattern that matches none of the parameters with these shapes."""
    for pattern in (paths,) if isinstance(paths, str) else paths:
        if not any(matches(pattern, path, len(shape)) for path, shape in shapes.items()):
            known = ", ".join(list(shapes)[:8]) + (", ..." if len(shapes) > 8 else "")
            raise OptionError(f"found {pattern}, which matches no parameter (known: {known})")


def _decays(optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's weight decays."""
    return [name for name in optimizer.numbers() if name.rpartition(".")[2] == "weight_decay"]


NO_DECAY = Group(VECTORS, weight_decay=0.0)
"""No weight decay for arrays of one axis, such as biases and weights of normalisation layers."""


class Sources(NamedTuple):
    """The positions of the groups that set the options of a parameter; None where the optimizer does."""

    lr_factor: int | None
    weight_decay: int | None
    trainable: int | None


@dataclass(frozen=True)
class Grouped(Optimizer):
    """An optimizer whose options differ between groups of parameters; `grouped` makes it.

    State: that of `rule`, in which the trees of the parameters are dicts by path. Parameters that are not trained have
    no state.
    """

    rule: Optimizer
    groups: tuple[Group, ...]
    sources: Mapping[str, Sources]

    @classmethod
    def kind(cls) -> str:
        return "parameter_groups"

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        return self.rule.elementwise

    def numbers(self) -> dict[str, Any]:
        found = self.rule.numbers()
        for i, group in enumerate(self.groups):
            found |= {f"{i}.{name}": getattr(group, name) for name in ("lr_factor", "weight_decay")}
        return {name: value for name, value in found.items() if value is not None}

    def with_traced(self, numbers: Mapping[str, Any]) -> Grouped:
        groups = []
        for i, group in enumerate(self.groups):
            own = {name: x for name, x in numbers.items() if name.startswith(f"{i}.")}
            traced: dict[str, Any] = {**vars(group), **{name.partition(".")[2]: x for name, x in own.items()}}
            groups.append(tree.of_fields(Group, list(traced), list(traced.values())))
        of_rule = {name: x for name, x in numbers.items() if name in self.rule.numbers()}
        changed = {**vars(self), **of_rule, "rule": self.rule.with_traced(of_rule), "groups": tuple(groups)}
        made: Grouped = tree.of_fields(Grouped, list(changed), list(changed.values()))
        return made

    def rate_at(self, step: int, lr: float) -> float:
        return self.rule.rate_at(step, lr)

    def label(self, path: str) -> Sources:
        return self.sources[path]

    def trains(self, path: str) -> bool:
        position = self.sources[path].trainable
        return position is None or bool(self.groups[position].trainable)

    def trained(self, params: Tree) -> dict[str, Any]:
        return {path: x for path, x in named(params).items() if self.trains(path)}

    def merged(self, params: Tree, trained: Mapping[str, Any]) -> Tree:
        return tree.unflatten(tree.flatten(params)[1], list({**named(params), **trained}.values()))

    def init(self, params: Tree) -> OptState:
        return self.rule.init(self.trained(params))

    def updated(self, params: Tree, grads: Tree, state: OptState, lr: Value) -> tuple[Tree, OptState]:
        parts = [
            Part(paths, rule.init, rule.updated, lr if factor is None else lr * factor)
            for rule, factor, paths in self.rules(params)
        ]
        return updated_in_parts(params, grads, state, parts)

    def rules(self, params: Tree) -> Iterator[tuple[Optimizer, Any, list[str]]]:
        """Optimizers without groups: each with its factor on the rate, None for 1, and the paths that it trains."""
        labels: dict[Sources, list[str]] = {}
        for path in self.trained(params):
            labels.setdefault(self.label(path), []).append(path)
        for label, paths in labels.items():
            rule, factor = self.rule, None
            if label.weight_decay is not None:
                decay = self.groups[label.weight_decay].weight_decay
                rule = rule.with_traced(dict.fromkeys(_decays(rule), decay))
            if label.lr_factor is not None:
                factor = self.groups[label.lr_factor].lr_factor
            yield rule, factor, paths


def grouped(optimizer: Optimizer, groups: Sequence[Group], shapes: Mapping[str, Shape]) -> Optimizer:
    """The optimizer with other options for groups of the parameters.

    A parameter has the options of all groups that match it. Where two groups set the same option, the later one counts.

    Args:
        shapes: of all parameters by path, as `nn.Module.parameter_shapes` has them.

    Raises:
        OptionError: a group matches no parameter, sets nothing, or sets a weight decay that the optimizer does not
            have; or no parameter is trained.
    """
    if not groups:
        return optimizer
    if optimizer.needs_loss:
        raise OptionError(f"found parameter groups, expected none: {optimizer.kind()} updates all parameters together")
    for i, group in enumerate(groups):
        try:
            group.require_fit(optimizer, shapes)
        except OptionError as error:
            raise OptionError(f"group {i}: {error}") from None

    def source(path: str, option: str) -> int | None:
        axes = len(shapes[path])
        setting = [i for i, x in enumerate(groups) if getattr(x, option) is not None and x.matches(path, axes)]
        return setting[-1] if setting else None

    sources = {path: Sources(*(source(path, option) for option in Sources._fields)) for path in shapes}
    found = Grouped(optimizer.lr, optimizer, tuple(groups), sources)
    if not any(map(found.trains, shapes)):
        raise OptionError("found no parameter that is trained, expected at least one")
    return found
