"""The C text that reads operands reads the element that broadcasting takes."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from adtrain.codegen.elementwise import access, offset


def value(text: str, **names: int) -> int:
    """The value of C text of integers that are not negative."""
    return int(eval(text.replace("/", "//"), dict(names)))


@st.composite
def broadcasts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """A shape, one that broadcasts to it, and how many of its axes are rows."""
    within = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    own = tuple(n if draw(st.booleans()) else 1 for n in within[draw(st.integers(0, len(within))) :])
    return own, within, draw(st.integers(0, len(within)))


@given(broadcasts())
def test_an_element_is_read_where_broadcasting_takes_it(
    case: tuple[tuple[int, ...], tuple[int, ...], int],
) -> None:
    own, within, rows = case
    expected = np.broadcast_to(np.arange(prod(own)).reshape(own), within).reshape(prod(within[:rows]), -1)
    found = access(own, within, ("row", rows), ("column", len(within) - rows))
    columns = expected.shape[1]
    for row, column in np.ndindex(expected.shape):
        assert value(found.place, row=row, column=column) == expected[row, column]
    assert (found.place == "0") == (not expected.any())
    assert columns % found.run == 0
    neighbours = np.diff(expected.reshape(-1, found.run), axis=1)
    assert (neighbours == found.step).all()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_an_offset_is_that_of_the_strides(lengths: list[int], data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(0, 20), min_size=len(lengths), max_size=len(lengths)))
    text = offset("i", lengths, steps)
    for i, index in enumerate(np.ndindex(*lengths)):
        assert value(text, i=i) == sum(n * step for n, step in zip(index, steps, strict=True))
