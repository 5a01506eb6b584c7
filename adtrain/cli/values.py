"""Types of options. Their errors say what was found and what was expected."""

from __future__ import annotations

from typing import Any

import click


class _Checked(click.ParamType):
    """A type of click whose error is "found VALUE, expected ..."."""

    def expected(self) -> str:
        """What the type accepts, in words."""
        raise NotImplementedError

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            from adtrain.config.problems import shortened

            self.fail(f"found {shortened(str(value))!r}, expected {self.expected()}", param, ctx)


class Whole(_Checked, click.IntRange):
    """A whole number with bounds."""

    def expected(self) -> str:
        return f"a whole number{_bounds(self)}"


class Number(_Checked, click.FloatRange):
    """A number with bounds."""

    def expected(self) -> str:
        return f"a number{_bounds(self)}"


class OneOf(_Checked, click.Choice[str]):
    """One of some words."""

    def expected(self) -> str:
        *others, last = self.choices
        return f"{', '.join(others)} or {last}"


def _bounds(kind: click.IntRange | click.FloatRange) -> str:
    if kind.max is not None:
        return f" from {kind.min} to {kind.max}"
    return f" above {kind.min}" if kind.min_open else f" of at least {kind.min}"
