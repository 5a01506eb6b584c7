"""What the nodes of a Program's picture say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from adtrain.core.fused import members
from adtrain.core.program import Equation, Program, Variable
from adtrain.graph.dot import Html

# The variables beside an equation: their colours are of Okabe and Ito's palette, and each line says its kind in words.
COLOURS = {"input": "#F0E442", "constant": "gray85", "kept": "white", "elsewhere": "white", "output": "#CC79A7"}
# A cell names so many variables, and a fused equation so many kinds of its members.
NAMED = 4


def layer_of(equation: Equation) -> str:
    """The scope of the layer that an equation belongs to: of a fused one, that of its member with the most work."""
    body = equation.params.get("body")
    if not isinstance(body, Program):
        return equation.scope
    return layer_of(max(body.equations, key=lambda e: e.primitive.cost([v.type for v in e.inputs], e.params).flops))


def equation_label(program: Program, equations: Sequence[Equation]) -> str:
    """Results and primitive; of a fused equation, and of many, what is in them; and with which other layers."""
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
    """Name, type, and the value of a constant that is one number."""
    constant = program.constants.get(v)
    value = f" = {constant.item():.6g}" if constant is not None and constant.size == 1 else ""
    return f"{program.names[v]}: {v.type}{value}"


def side_label(texts: Mapping[str, Sequence[str]]) -> Html:
    """A table with a cell for each kind, and a line for each variable in it."""
    rows = []
    for kind, colour in COLOURS.items():
        if lines := [escape(line) for line in _first(texts.get(kind, ()))]:
            text = '<BR ALIGN="LEFT"/>'.join([*lines, ""])
            bold = f"<B>{text}</B>" if kind == "kept" else text
            rows.append(f'<TR><TD ALIGN="LEFT" BALIGN="LEFT" BGCOLOR="{colour}">{bold}</TD></TR>')
    return Html(f'<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="0" CELLPADDING="2">{"".join(rows)}</TABLE>')


def _first(texts: Sequence[str]) -> list[str]:
    """The first NAMED texts, and how many are left out."""
    return [*texts[:NAMED], *([f"and {len(texts) - NAMED} more"] if len(texts) > NAMED else [])]
