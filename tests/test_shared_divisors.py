"""Shared divisors on a GPU: which quotients become products with reciprocals, and how exact these are."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from cuda_samples import Shaped
from hypothesis import given
from hypothesis import strategies as st
from program_samples import ON_GPU, everywhere

import adtrain as ad
from adtrain import ops
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda import shared_divisors
from adtrain.backends.cuda.shared_divisors import MIN_ELEMENTS, multiply_by_reciprocals
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.core.types import Shape

ROWS, DIVISORS = 6, 2
NUMBERS = {
    "float32": st.floats(width=32) | st.floats(-(2.0**-126), 2.0**-126, width=32),
    "float64": st.floats() | st.floats(-(2.0**-1022), 2.0**-1022),
}
"""All numbers, with many below the smallest normal one."""


def quotients(x: Any, d: Any) -> Any:
    """Each number over each divisor."""
    return ops.broadcast_to(x[:, None], (x.shape[0], d.shape[0])) / d


@pytest.fixture(scope="module", params=NUMBERS)
def by_reciprocals(request: pytest.FixtureRequest) -> Program:
    """The Program of `quotients`, with a reciprocal for each divisor."""
    arguments = [Shaped(n, dtype=request.param) for n in (ROWS, DIVISORS)]
    with pytest.MonkeyPatch.context() as few:
        few.setattr(shared_divisors, "MIN_ELEMENTS", 1)
        few.setattr(shared_divisors, "MIN_REUSE", 1)
        program = stage(quotients, (multiply_by_reciprocals,)).program(*arguments)
    assert [e.outputs[0].type.shape for e in program.equations if e.name == "div"] == [(DIVISORS,)]
    return program


@given(st.data())
def test_a_quotient_has_an_error_of_one_and_a_half_units_in_the_last_place(
    by_reciprocals: Program, data: st.DataObject
) -> None:
    """Also near the smallest and the largest numbers. For 0, infinity and NaN it is the result of a division."""
    dtype = by_reciprocals.inputs[0].type.dtype
    x, d = (np.array(data.draw(st.lists(NUMBERS[dtype.name], min_size=n, max_size=n)), dtype) for n in (ROWS, DIVISORS))
    largest = float(np.finfo(dtype).max)
    with np.errstate(all="ignore"):
        (found,), _ = NumpyProgram(by_reciprocals).run([x, d])
        divided = x[:, None] / d
    for (i, k), y in np.ndenumerate(found):
        expected = divided[i, k]
        if np.isfinite([x[i], d[k]]).all() and d[k] != 0:
            unit = Fraction(float(np.spacing(min(abs(expected), np.nextafter(largest, 0, dtype=dtype)))))
            exact = Fraction(float(x[i])) / Fraction(float(d[k]))
            values = [max(min(value, Fraction(largest)), -Fraction(largest)) for value in (exact, of_float(y))]
            assert abs(values[0] - values[1]) <= Fraction(3, 2) * unit
        else:
            np.testing.assert_array_equal(y, expected)
        assert np.isnan(y) or np.signbit(y) == np.signbit(expected)


def of_float(y: np.floating[Any]) -> Fraction:
    """The exact value of a number. That of an infinity is beyond the largest number."""
    return Fraction(float(y)) if np.isfinite(y) else Fraction(2) ** 2000 * int(np.sign(y))


def on_gpu(f: Callable[..., Any], *shapes: Shape) -> Program:
    return stage(f, ON_GPU).program(*(Shaped(*shape) for shape in shapes))


def divides(program: Program, shape: Shape) -> bool:
    """Whether it has a division for each element of this shape."""
    return any(e.name == "div" and e.outputs[0].type.shape == shape for e in everywhere(program))


POINTS, CENTRES, FEATURES = MIN_ELEMENTS // 64, 16, 4
PAIRS = POINTS, CENTRES, FEATURES


def distances(x: Any, centres: Any, scales: Any) -> Any:
    """The mean square of the distances from the nearest centre, in units of the scales of this centre."""
    return ops.mean(ops.min(ops.sum(ops.square((x[:, None] - centres) / scales), 2), 1))


def test_quotients_that_are_computed_from_small_arrays_are_products() -> None:
    """Those of gradients too."""
    shapes = (POINTS, FEATURES), (CENTRES, FEATURES), (CENTRES, FEATURES)
    program = on_gpu(ad.value_and_grad(distances, (1, 2)), *shapes)
    assert not divides(program, PAIRS)
    inverted = [e for e in everywhere(program) if e.name == "div" and e.outputs[0].type.shape == shapes[2]]
    assert len(inverted) == 1


@pytest.mark.parametrize(
    ("shapes", "result"),
    [
        ([(POINTS // 2, FEATURES), (CENTRES, FEATURES)], (POINTS // 2, CENTRES, FEATURES)),  # there are few quotients
        ([PAIRS, (CENTRES, FEATURES)], PAIRS),  # the kernel loads as many numbers
        ([(POINTS, FEATURES), (POINTS, 1, FEATURES)], PAIRS),  # each point has divisors of its own
        ([(POINTS, FEATURES), PAIRS[1:], PAIRS], PAIRS),  # the kernel loads as many numbers for another argument
    ],
)
def test_other_quotients_are_divisions(shapes: list[Shape], result: Shape) -> None:
    def f(x: Any, d: Any, y: Any = 0.0) -> Any:
        x = x if x.ndim == 3 else x[:, None]
        return ops.sum(ops.tanh((ops.broadcast_to(x, result) - y) / d), 2)

    assert divides(on_gpu(f, *shapes), result)
