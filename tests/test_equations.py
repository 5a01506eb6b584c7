"""The grammar of equations: round trips, values against Python's and SymPy's, and errors that point at a character."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from adtrain.equations import (
    DEEPEST,
    FUNCTIONS,
    HIGHEST_ORDER,
    LONGEST,
    Call,
    Derivative,
    EquationError,
    Expression,
    Name,
    Names,
    Negative,
    Number,
    Operation,
    derivatives,
    evaluate,
    parse,
    text_of,
)

NAMES = Names(("t", "x", "x1"), ("u", "vel"), ("k",))
ATOMS = st.one_of(
    st.floats(0, 1e6, allow_subnormal=False).map(Number),
    st.sampled_from([*NAMES.variables, *NAMES.outputs, *NAMES.coefficients, "pi"]).map(Name),
    st.builds(
        lambda output, by: Derivative(output, tuple(sorted(by, key=NAMES.variables.index))),
        st.sampled_from(NAMES.outputs),
        st.lists(st.sampled_from(NAMES.variables), min_size=1, max_size=HIGHEST_ORDER),
    ),
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds(Negative, inner),
        st.builds(Call, st.sampled_from(list(FUNCTIONS)), inner),
        st.builds(Operation, st.sampled_from(["+", "-", "*", "/", "**"]), inner, inner),
    ),
    max_leaves=12,
)
IN_NUMPY: dict[str, Any] = {name: getattr(np, name) for name in FUNCTIONS} | {"**": np.power}


def parsed_or_rejected(text: str) -> Expression:
    """The expression; an example whose constants have no finite value is left out."""
    try:
        return parse(text, NAMES)
    except EquationError as error:
        assume("division by 0" not in error.reason and "finite real value" not in error.reason)
        raise


@given(EXPRESSIONS)
def test_an_expression_is_read_back_from_its_text(expression: Expression) -> None:
    text = text_of(expression)
    assume(len(text) <= LONGEST)
    assert parsed_or_rejected(text) == expression


def values_of(expression: Expression) -> dict[str, Any]:
    """A number in float64 for each name and derivative."""
    rng = np.random.default_rng(3)
    names = (*NAMES.variables, *NAMES.outputs, *NAMES.coefficients)
    names += tuple(dict.fromkeys(part.name for part in derivatives(expression)))
    return {name: np.float64(x) for name, x in zip(names, rng.uniform(0.1, 2.0, len(names)), strict=True)}


@given(EXPRESSIONS)
def test_an_expression_has_the_value_that_python_gives_its_text(expression: Expression) -> None:
    text = text_of(expression)
    assume(len(text) <= LONGEST)
    found, values = parsed_or_rejected(text), values_of(expression)
    scope = {**values, **{name: getattr(np, name) for name in FUNCTIONS}, "pi": math.pi}
    with np.errstate(all="ignore"):
        # Python's own numbers would be complex or overflow where those of NumPy are NaN or infinite.
        numbers = {name: np.float64(x) for name, x in scope.items() if not callable(x)}
        try:
            expected = eval(text, {"__builtins__": {}}, {**scope, **numbers})
            ours = evaluate(found, values, IN_NUMPY)
        except (OverflowError, ZeroDivisionError, ValueError, TypeError):
            assume(False)
    assume(not isinstance(expected, complex))
    assert float(ours) == pytest.approx(float(expected), rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("-x^2", "-(x**2)"),
        ("2^-x", "2**(-x)"),
        ("x^2^t", "x**(x1*0+2)**t"),
        ("a", None),
        ("u_t+u*u_x-0.01/pi*u_xx", "(u_t + u * u_x) - (0.01 / pi) * u_xx"),
        ("1 - 2 - 3 + x", "((1 - 2) - 3) + x"),
        ("x / t / 2 * 3", "((x / t) / 2) * 3"),
        ("--+x", "-(-x)"),
        (".5e1*x", "5 * x"),
        ("sin (x)\n + 1", "sin(x) + 1"),
    ],
)
def test_precedence_is_that_of_python(text: str, same: str | None) -> None:
    if same is None:
        with pytest.raises(EquationError, match="unknown name a"):
            parse(text, NAMES)
        return
    first, second = parse(text, NAMES), parse(same, NAMES)
    assert evaluate(first, values_of(first), IN_NUMPY) == evaluate(second, values_of(first), IN_NUMPY)


def test_the_order_of_the_variables_of_a_derivative_does_not_count() -> None:
    assert parse("u_xt", NAMES) == parse("u_tx", NAMES) == Derivative("u", ("t", "x"))
    assert parse("vel_x1xx1", NAMES) == Derivative("vel", ("x", "x1", "x1"))


@pytest.mark.parametrize(
    ("text", "reason", "column"),
    [
        ("", "found nothing", 0),
        ("u_t + w", "unknown name w", 6),
        ("u_ty", "unknown variable y", 3),
        ("w_t", "unknown output w", 0),
        ("3 * u_xxxxx", "a derivative of order 5, expected an order of at most 4", 4),
        ("u_", "expected variables after it, such as u_t", 0),
        ("sin x", "found sin without an argument", 0),
        ("foo(x)", "unknown function foo", 0),
        ("u(0, x)", "found '(', expected an operator or the end", 1),
        ("2 * (pi(x))", "found '(', expected an operator or )", 7),
        ("(u + 1", "found ( without a matching )", 0),
        ("u + 1)", "found ')', expected an operator or the end", 5),
        ("(u x)", "found 'x', expected an operator or )", 3),
        ("u = 0", "write left - (right)", 2),
        ("u + $", "found '$'", 4),
        ("u +", "found the end", 3),
        ("1/0 + u", "division by 0", 1),
        ("u * sqrt(-1)", "without a finite real value", 4),
        ("1e999 * u", "expected a number below", 0),
        ("u.__class__", "found '.'", 1),
        ("__import__", "found '_'", 0),
        ("(" * (DEEPEST + 1) + "u", "nested parentheses", DEEPEST),
        ("u" + " + u" * LONGEST, "characters, expected at most", LONGEST),
    ],
)
def test_an_error_points_at_the_character(text: str, reason: str, column: int) -> None:
    with pytest.raises(EquationError) as raised:
        parse(text, NAMES)
    assert reason in raised.value.reason
    assert raised.value.excerpt[1] == " " * (column + 2) + "^"


@given(st.text("utx_1.e+-*/^() sinpik$\n", max_size=40))
def test_any_text_is_an_expression_or_an_error_of_one_line(text: str) -> None:
    with suppress(EquationError):
        assert parse(text_of(parse(text, NAMES)), NAMES) == parse(text, NAMES)


def test_the_longest_sum_is_evaluated() -> None:
    text = "u" + "+u" * ((LONGEST - 1) // 2)
    found = parse(text, NAMES)
    assert evaluate(found, {"u": np.float64(1)}, IN_NUMPY) == (LONGEST + 1) // 2
