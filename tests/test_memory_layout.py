"""The places of arrays in a kernel's memory are the same in Python and in the text of the kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain.backends.cuda.compiler import CudaCompilerError, Source, compile_source
from adtrain.core.memory_layout import Array, Length, Union, memory_layout, rounded_up

POWERS = st.sampled_from([1, 2, 4, 8, 16])
ARRAYS = st.tuples(POWERS, POWERS, st.sampled_from([1, 4, 16]))
LENGTHS = st.integers(0, 1000)


def value(text: str, n: int, m: int) -> int:
    """The value of C text of integers that are not negative."""
    return int(eval(text.replace("/", "//"), {"n": n, "m": m}))


@given(st.lists(ARRAYS, min_size=1, max_size=6), LENGTHS, LENGTHS)
def test_the_places_in_the_text_are_those_that_python_computes(
    arrays: Sequence[tuple[int, int, int]], n: int, m: int
) -> None:
    def layout(n: Length, m: Length) -> list[Array]:
        return [
            Array(f"A{i}", size, rounded_up(n, multiple) + m * i, max(size, alignment))
            for i, (size, multiple, alignment) in enumerate(arrays)
        ]

    end = 0
    found = memory_layout("M", layout, n=n, m=m)
    lines = found.macros.splitlines()
    for array, line in zip(layout(n, m), lines, strict=True):
        name, pointer = line.removeprefix("#define M_").split("(E, memory, n, m) ")
        assert name == array.name
        elements = re.fullmatch(r"\(array_at<E, (\d+)>\(memory\) \+ (.*)\)", pointer)
        of_bytes = re.fullmatch(r"array_at<E, \d+>\(\(memory\) \+ (.*)\)", pointer)
        end += -end % array.alignment
        at = value(elements[2], n, m) * int(elements[1]) if elements else value(of_bytes[1], n, m) if of_bytes else -1
        assert at == end
        end += array.itemsize * int(array.count)  # type: ignore[arg-type]
    assert found.size == end


def test_arrays_of_a_union_have_the_same_memory() -> None:
    pair = Union(([Array("A", 4, 10)], [Array("B", 8, 2), Array("C", 4, 1)]))
    found = memory_layout("M", lambda: [Array("FIRST", 4, 4), pair, Array("LAST", 4)])
    assert found.size == 16 + 40 + 4
    assert [line.partition(" (")[2] for line in found.macros.splitlines()] == [
        "array_at<E, 4>(memory) + 0)",
        "array_at<E, 4>(memory) + 4)",
        "array_at<E, 8>(memory) + 2)",
        "array_at<E, 4>(memory) + 8)",
        "array_at<E, 4>(memory) + 14)",
    ]


def test_a_layout_aligned_beyond_its_memory_has_room_for_that() -> None:
    assert memory_layout("M", lambda: [Array("TILE", 1, 100)], alignment=1024).size == 100 + 1024


@pytest.mark.needs_nvrtc
def test_an_array_of_elements_of_another_size_does_not_compile() -> None:
    macros = memory_layout("M", lambda: [Array("SUMS", 8, 10)]).macros
    text = '#include "common/common.cuh"\n' + macros + "KERNEL f(char *memory) { *M_SUMS(%s, memory) = 0; }\n"
    compile_source(Source("f.cu", text % "double"), "90a")
    with pytest.raises(CudaCompilerError, match="MemoryLayout"):
        compile_source(Source("f.cu", text % "float"), "90a")
