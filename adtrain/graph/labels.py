"""The labels of the nodes in a Program's picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from adtrain.core.fused import members
from adtrain.core.program import Equation, Program, Variable
from adtrain.graph.dot import Html

# Background colours (Okabe and Ito's palette) of the variables listed in a table next to an equation, by kind.
COLOURS = {"input": "#F0E442", "constant": "gray85", "saved": "white", "distant": "white", "output": "#CC79A7"}
# The most variables in a cell, and the most kinds of members in the label of a fused equation.
MOST_NAMES = 4


def layer_of(equation: Equation) -> str:
    """The scope of the layer that an equation belongs to. For a fused equation: the scope of its costliest member."""
    body = equation.params.get("body")
    if not isinstance(body, Program):
        return equation.scope
    return layer_of(max(body.equations, key=lambda e: e.primitive.cost([v.type for v in e.inputs], e.params).flops))


def equation_label(program: Program, equations: Sequence[Equation]) -> str:
    """The label of a node: results and primitive, the members of fused or grouped equations, and further layers."""
    names = [name for e in equations for name in members(e)]
    if len(equations) == 1:
        (equation,) = equations
        results = ", ".join(_first([program.names[v] for v in equation.outputs]))
        lines = [f"{results} = {equation.primitive.name}"]
    else:
        lines = [f"{len(equations)} equations"]
    if names != [equations[0].primitive.name]:
        lines += _first([name if count == 1 else f"{count} {name}" for name, count in Counter(names).items()])
    if others := [layer for layer in equations[0].scope.split("+") if layer != layer_of(equations[0])]:
        lines.append(f"with {others[0]}" if len(others) == 1 else f"with {len(others)} more layers")
    return "\n".join(lines)


def variable_text(program: Program, v: Variable) -> str:
    """Name and type of a variable, and the value if it is a constant with one element."""
    constant = program.constants.get(v)
    value = f" = {constant.item():.6g}" if constant is not None and constant.size == 1 else ""
    return f"{program.names[v]}: {v.type}{value}"


def variable_table(texts: Mapping[str, Sequence[str]]) -> Html:
    """A table with a cell for each kind of variable (a key of COLOURS) and a line for each variable."""
    rows = []
    for kind, colour in COLOURS.items():
        if lines := [escape(line) for line in _first(texts.get(kind, ()))]:
            text = '<BR ALIGN="LEFT"/>'.join([*lines, ""])
            content = f"<B>{text}</B>" if kind == "saved" else text
            rows.append(f'<TR><TD ALIGN="LEFT" BALIGN="LEFT" BGCOLOR="{colour}">{content}</TD></TR>')
    return Html(f'<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="0" CELLPADDING="2">{"".join(rows)}</TABLE>')


def _first(texts: Sequence[str]) -> list[str]:
    """The first MOST_NAMES texts, and a line with the number of the others."""
    more = len(texts) - MOST_NAMES
    return [*texts[:MOST_NAMES], *([f"and {more} more"] if more > 0 else [])]
