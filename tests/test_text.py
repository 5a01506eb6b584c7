from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain.table import TEXT, Column, render
from adtrain.text import counted, visible

any_text = st.text(st.characters(), max_size=30)  # includes halves of surrogate pairs
letters = st.text(st.characters(categories=["L", "M", "N", "P", "S", "Zs", "Co"]), max_size=30)


@given(any_text)
def test_no_control_format_surrogate_or_line_separator_stays(text: str) -> None:
    shown = visible(text)
    assert not {unicodedata.category(x) for x in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert visible(shown) == shown
    assert len(shown.splitlines()) <= 1


def test_one_thing_is_in_the_singular() -> None:
    found = [counted(n, things) for things in ("classes", "images") for n in (0, 1, 2000)]
    assert found == ["0 classes", "1 class", "2,000 classes", "0 images", "1 image", "2,000 images"]


@given(letters)
def test_letters_of_all_scripts_stay(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\u202egnp.exe\u2028", r"\u202egnp.exe\u2028"),
        ("\x00\x7f\x9b", r"\x00\x7f\x9b"),
        ("\udcff", r"\udcff"),
        ("naïve 猫 µ", "naïve 猫 µ"),
    ],
)
def test_escapes_are_those_of_python(text: str, expected: str) -> None:
    assert visible(text) == expected


@given(st.lists(any_text, min_size=1, max_size=4))
def test_each_row_of_a_table_is_one_aligned_line(cells: list[str]) -> None:
    lines = render([Column("name", str, TEXT), Column("n", lambda _: 1)], cells, 40)
    assert len(lines) == len(cells) + 1
    assert all(visible(line) == line and len(line) == len(lines[0]) for line in lines)
