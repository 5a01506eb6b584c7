"""Accumulators of reductions as C text: their start, and how a term or another accumulator is joined to them."""

from __future__ import annotations

from collections.abc import Sequence

STARTS = {"sum": ("0",), "max": ("-INFINITY",), "min": ("INFINITY",), "logsumexp": ("-INFINITY", "0")}
"""The states of each kind of empty accumulator. Those of logsumexp are the maximum m and the sum of exp(x - m)."""


def fold(kind: str, c: str, states: Sequence[str], term: str) -> list[str]:
    """Statements that join a term to the states, which are numbers of type ``c``. NaN stays NaN."""
    return join(kind, c, states, (term, "1"))


def join(kind: str, c: str, states: Sequence[str], others: Sequence[str]) -> list[str]:
    """Statements that join the states of another accumulator to the states."""
    m, other = states[0], others[0]
    if kind == "sum":
        return [f"{m} += {other};"]
    if kind != "logsumexp":
        return [f"{m} = {other} {'>' if kind == 'max' else '<'} {m} || {other} != {other} ? {other} : {m};"]
    return [
        "{",
        f"    const {c} top = {other} > {m} ? {other} : {m};",
        # Equal maxima may be infinite; then their difference is NaN.
        f"    const {c} scale = {m} == top ? 1 : exp({m} - top), added = {other} == top ? 1 : exp({other} - top);",
        f"    {states[1]} = fma({states[1]}, scale, {others[1]} * added);",
        f"    {m} = top;",
        "}",
    ]


def value(kind: str, states: Sequence[str]) -> str:
    """The result of an accumulator."""
    return f"{states[0]} + log({states[1]})" if kind == "logsumexp" else states[0]
