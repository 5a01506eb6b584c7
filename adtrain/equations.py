"""Equations as text: a small grammar, its errors, and the evaluation of an expression by functions of any library.

    expression: term (("+" | "-") term)*
    term:       signed (("*" | "/") signed)*
    signed:     ("+" | "-") signed | power
    power:      atom (("**" | "^") signed)?
    atom:       number | name | function "(" expression ")" | "(" expression ")"

A name is a variable, an output of the network, a coefficient, `pi`, or a derivative: `u_xx` is the second derivative of
the output u by x. No text is given to Python's parser.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from adtrain.core.errors import AdtrainError

FUNCTIONS: dict[str, Callable[[float], float]] = {
    "sin": math.sin,
    "cos": math.cos,
    "exp": math.exp,
    "tanh": math.tanh,
    "sqrt": math.sqrt,
    "log": math.log,
    "abs": abs,
}
"""The functions by name, for numbers."""
PI = "pi"
HIGHEST_ORDER = 4
"""The highest order of a derivative."""
LONGEST = 1000
"""The maximum number of characters of an equation. It also bounds the depth of the expression."""
DEEPEST = 50
"""The maximum number of nested parentheses, signs and exponents."""
VARIABLE = r"[A-Za-z][0-9]*"
"""The names of variables: a letter, then digits. So the name of a derivative, such as `u_x1x2`, is unambiguous."""
NAME = r"[A-Za-z][A-Za-z0-9]*"
"""The names of outputs and coefficients."""
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)|(?P<name>[A-Za-z]\w*)|(?P<sign>\*\*|[-+*/^()]))",
    re.ASCII,
)
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


class EquationError(AdtrainError):
    """A mistake in an equation.

    Attributes:
        reason: what was found, and what was expected.
        excerpt: the equation, and a line with a caret under the character.
        known: the possible names, if the mistake is an unknown name.
    """

    def __init__(self, reason: str, text: str, position: int, known: tuple[str, ...] | None = None) -> None:
        shown = "".join(x if x.isprintable() else " " for x in text)
        self.reason, self.known = reason, known
        self.excerpt = (f"  {shown}", f"  {' ' * position}^")
        super().__init__(reason)

    @property
    def lines(self) -> tuple[str, ...]:
        return (self.reason, *self.excerpt)


@dataclass(frozen=True)
class Names:
    """The names that an equation may have, in addition to `pi` and FUNCTIONS."""

    variables: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    coefficients: tuple[str, ...] = ()

    @property
    def known(self) -> tuple[str, ...]:
        return (*self.variables, *self.outputs, *self.coefficients, PI, *FUNCTIONS)


@dataclass(frozen=True)
class Number:
    value: float
    at: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Name:
    """A variable, an output, a coefficient or pi."""

    name: str
    at: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Derivative:
    """A derivative of an output. `by` has the variables, in the order of `Names.variables`."""

    output: str
    by: tuple[str, ...]
    at: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        """Such as `u_tx`."""
        return f"{self.output}_{''.join(self.by)}"


@dataclass(frozen=True)
class Call:
    function: str
    argument: Expression
    at: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Negative:
    operand: Expression
    at: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Operation:
    """`sign` is one of + - * / and **."""

    sign: str
    left: Expression
    right: Expression
    at: int = field(default=0, compare=False)


Expression: TypeAlias = Number | Name | Derivative | Call | Negative | Operation


def parse(text: str, names: Names) -> Expression:
    """The expression of a text. Raises EquationError for the first mistake in it."""
    if len(text) > LONGEST:
        raise EquationError(f"found {len(text):,} characters, expected at most {LONGEST:,}", text, LONGEST)
    found = _Parser(text, names).whole()
    _check_constants(found, text)
    return found


def text_of(expression: Expression) -> str:
    """A text that `parse` reads as the same expression."""
    match expression:
        case Number(value):
            return repr(value)
        case Name(name):
            return name
        case Derivative():
            return expression.name
        case Call(function, argument):
            return f"{function}({text_of(argument)})"
        case Negative(operand):
            return f"(-{text_of(operand)})"
        case Operation(sign, left, right):
            return f"({text_of(left)} {sign} {text_of(right)})"


def parts(expression: Expression) -> Iterator[Expression]:
    """The expression and all expressions inside it."""
    yield expression
    match expression:
        case Call(_, inner) | Negative(inner):
            yield from parts(inner)
        case Operation(_, left, right):
            yield from parts(left)
            yield from parts(right)


def derivatives(expression: Expression) -> list[Derivative]:
    """The derivatives in an expression."""
    return [part for part in parts(expression) if isinstance(part, Derivative)]


def evaluate(expression: Expression, values: Mapping[str, Any], functions: Mapping[str, Callable[[Any], Any]]) -> Any:
    """The value of an expression.

    Args:
        values: by the names of variables, outputs, coefficients and derivatives such as `u_xx`.
        functions: for such values, by the names in FUNCTIONS, and "**" for the power. Python computes those of numbers.
    """

    def found(part: Expression) -> Any:
        match part:
            case Number(value):
                return value
            case Name(name):
                return math.pi if name == PI else values[name]
            case Derivative():
                return values[part.name]
            case Call(name, argument):
                x = found(argument)
                return FUNCTIONS[name](x) if isinstance(x, float) else functions[name](x)
            case Negative(operand):
                return -found(operand)
            case Operation("**", base, exponent):
                return _power(found(base), found(exponent), functions)
            case Operation(sign, left, right):
                return _OPERATORS[sign](found(left), found(right))

    return found(expression)


def _power(base: Any, exponent: Any, functions: Mapping[str, Callable[..., Any]]) -> Any:
    """The power. The exponents 2, 3 and 4 are products, so they work for negative numbers on every device."""
    if isinstance(base, float) and isinstance(exponent, float):
        return math.pow(base, exponent)
    if isinstance(exponent, float) and exponent in (2.0, 3.0, 4.0):
        square = base * base
        return square if exponent == 2 else square * (base if exponent == 3 else square)
    return functions["**"](base, exponent)


class _Parser:
    """Reads a text from left to right. `depth` counts nested `signed` rules."""

    MOST_SHOWN: ClassVar[int] = 20

    def __init__(self, text: str, names: Names) -> None:
        self.text, self.names, self.end, self.depth = text, names, 0, 0
        self.kind, self.token, self.at = "", "", 0
        self.advance()

    def whole(self) -> Expression:
        if self.kind == "end":
            raise self.error("found nothing, expected an equation such as u_t - u_xx")
        found = self.expression()
        if self.kind != "end":
            raise self.error(f"found {self.shown}, expected an operator or the end")
        return found

    def expression(self) -> Expression:
        return self.operations("+-", self.term)

    def term(self) -> Expression:
        return self.operations("*/", self.signed)

    def operations(self, signs: str, operand: Callable[[], Expression]) -> Expression:
        """Operands with these signs between them, from left to right."""
        left = operand()
        while self.token in tuple(signs):
            sign, at = self.take()
            left = Operation(sign, left, operand(), at)
        return left

    def signed(self) -> Expression:
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.error(
                f"found more than {DEEPEST} nested parentheses, signs and exponents, expected at most {DEEPEST}"
            )
        if self.token in ("+", "-"):
            sign, at = self.take()
            operand = self.signed()
            found = operand if sign == "+" else Negative(operand, at)
        else:
            found = self.power()
        self.depth -= 1
        return found

    def power(self) -> Expression:
        base = self.atom()
        if self.token not in ("**", "^"):
            return base
        _, at = self.take()
        return Operation("**", base, self.signed(), at)

    def atom(self) -> Expression:
        if self.kind == "number":
            token, at = self.take()
            if math.isinf(value := float(token)):
                raise EquationError(f"found {token}, expected a number below 1.8e308", self.text, at)
            return Number(value, at)
        if self.token == "(":
            return self.in_parentheses()
        if self.kind != "name":
            raise self.error(f"found {self.shown}, expected a number, a name or (")
        token, at = self.take()
        if self.token == "(":
            if token not in FUNCTIONS:
                raise self.unknown("function", token, at, tuple(FUNCTIONS))
            return Call(token, self.in_parentheses(), at)
        if token in FUNCTIONS:
            raise EquationError(f"found {token} without an argument, expected {token}(...)", self.text, at)
        if token == PI or token in self.names.variables + self.names.outputs + self.names.coefficients:
            return Name(token, at)
        if "_" in token:
            return self.derivative(token, at)
        raise self.unknown("name", token, at, self.names.known)

    def in_parentheses(self) -> Expression:
        opened = self.at
        self.take()
        found = self.expression()
        if self.token != ")":
            if self.kind == "end":
                raise EquationError("found ( without a matching ), expected )", self.text, opened)
            raise self.error(f"found {self.shown}, expected an operator or )")
        self.take()
        return found

    def derivative(self, token: str, at: int) -> Derivative:
        output, _, letters = token.partition("_")
        if output not in self.names.outputs:
            raise self.unknown("output", output, at, self.names.outputs)
        start = at + len(output) + 1
        by: list[str] = []
        while letters:
            match = re.match(VARIABLE, letters)
            name = match[0] if match else letters
            if name not in self.names.variables:
                raise self.unknown("variable", name, start, self.names.variables)
            by.append(name)
            start, letters = start + len(name), letters[len(name) :]
        if not by:
            expected = f"expected variables after it, such as {output}_{self.names.variables[0]}"
            raise EquationError(f"found {token}, {expected}", self.text, at)
        if len(by) > HIGHEST_ORDER:
            reason = f"found {token}, a derivative of order {len(by)}, expected an order of at most {HIGHEST_ORDER}"
            raise EquationError(reason, self.text, at)
        return Derivative(output, tuple(sorted(by, key=self.names.variables.index)), at)

    def unknown(self, what: str, name: str, at: int, known: tuple[str, ...]) -> EquationError:
        return EquationError(f"unknown {what} {name[: self.MOST_SHOWN]}", self.text, at, known)

    def error(self, reason: str) -> EquationError:
        return EquationError(reason, self.text, self.at)

    @property
    def shown(self) -> str:
        return "the end" if self.kind == "end" else repr(self.token[: self.MOST_SHOWN])

    def take(self) -> tuple[str, int]:
        found = self.token, self.at
        self.advance()
        return found

    def advance(self) -> None:
        match = _TOKEN.match(self.text, self.end)
        if match is not None:
            self.kind = str(match.lastgroup)
            self.token, self.at, self.end = match[self.kind], match.start(self.kind), match.end()
            return
        rest = self.text[self.end :].lstrip()
        self.at = len(self.text) - len(rest)
        if rest[:1] == "=":
            raise self.error(
                "found '=', expected an expression that is to be 0: write left - (right) in place of left = right"
            )
        if rest:
            raise self.error(f"found {rest[0]!r}, expected a number, a name, + - * / ** ^ ( or )")
        self.kind, self.token, self.at, self.end = "end", "", len(self.text), len(self.text)


def _check_constants(expression: Expression, text: str) -> float | None:
    """The value of an expression of numbers only, None for others. Raises EquationError if one has no value."""
    match expression:
        case Number(value):
            return value
        case Name(name):
            return math.pi if name == PI else None
        case Derivative():
            return None
        case Call(_, inner) | Negative(inner):
            values = [_check_constants(inner, text)]
        case Operation(_, left, right):
            values = [_check_constants(left, text), _check_constants(right, text)]
            if expression.sign == "/" and values[1] == 0:
                raise EquationError("found a division by 0, expected another divisor", text, expression.at)
    if None in values:
        return None
    try:
        found = float(evaluate(expression, {}, {}))
    except (ValueError, OverflowError, ZeroDivisionError):
        found = math.nan
    if not math.isfinite(found):
        raise EquationError(
            "found a constant without a finite real value, expected a finite number", text, expression.at
        )
    return found
