"""The places of arrays in a kernel's memory are the same in Python and in the text of the kernel."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain.backends.cpu import compiler
from adtrain.backends.cpu.build import Source as CSource
from adtrain.backends.cpu.toolchain import CompilerError
from adtrain.backends.cuda.compiler import CudaCompilerError, Source, compile_source
from adtrain.core.memory_layout import Array, Length, Union, memory_layout, rounded_up
from adtrain.lowering.cpu import attention, conv, gemm, recurrent

ARRAYS = st.tuples(st.sampled_from([1, 2, 4, 8, 24]), st.sampled_from([1, 2, 16]))
LENGTHS = st.integers(0, 1000)


def places(macros: str, n: int = 0, m: int = 0) -> dict[str, int]:
    """The byte at which each array begins."""
    known = {"end": lambda size: lambda at, count: at + size * count, "memory": 0, "n": n, "m": m}
    found = {}
    for line in macros.splitlines():
        match = re.fullmatch(r"#define M_(\w+)\(.*?\) array_at<E, \d+>\((.*)\)", line)
        assert match is not None
        found[match[1]] = eval(re.sub(r"array_end<(\d+)>", r"end(\1)", match[2].replace("/", "//")), known)
    return found


@given(st.lists(ARRAYS, min_size=1, max_size=6), LENGTHS, LENGTHS)
def test_the_places_in_the_text_are_those_that_python_computes(
    arrays: Sequence[tuple[int, int]], n: int, m: int
) -> None:
    def layout(n: Length, m: Length) -> list[Array]:
        counts = [rounded_up(n, multiple) + m * i + n // 4 for i, (_, multiple) in enumerate(arrays)]
        return [Array(f"A{i}", size, count) for i, ((size, _), count) in enumerate(zip(arrays, counts, strict=True))]

    found = memory_layout("M", layout, n=n, m=m)
    end, expected = 0, {}
    for array in layout(n, m):
        expected[array.name] = end
        assert isinstance(array.count, int)
        end += array.itemsize * array.count
    assert places(found.macros, n, m) == expected
    assert found.size == end


def test_arrays_of_a_union_have_the_same_memory() -> None:
    pair = Union(([Array("A", 4, 10)], [Array("B", 8, 2), Array("C", 4, 1)]))
    found = memory_layout("M", lambda: [Array("FIRST", 4, 4), pair])
    assert found.size == 16 + 40
    assert places(found.macros) == {"FIRST": 0, "A": 16, "B": 16, "C": 32}


def test_a_layout_aligned_beyond_its_memory_has_room_for_that() -> None:
    assert memory_layout("M", lambda: [Array("TILE", 1, 100)], alignment=1024).size == 100 + 1024


@pytest.mark.needs_nvrtc
def test_an_array_of_elements_of_another_size_does_not_compile() -> None:
    macros = memory_layout("M", lambda: [Array("SUMS", 8, 10)]).macros
    text = '#include "common/common.cuh"\n' + macros + "KERNEL f(char *memory) { *M_SUMS(%s, memory) = 0; }\n"
    compile_source(Source("f.cu", text % "double"), "90a")
    with pytest.raises(CudaCompilerError, match="MemoryLayout"):
        compile_source(Source("f.cu", text % "float"), "90a")


C_FILES = {
    "conv.c": (conv.STRUCTS, ("CORRELATION_BYTES", "TAP_BYTES", "SPAN_BYTES")),
    "attention.c": (attention.DEFINITIONS, ("STRUCT_BYTES", "KEYS")),
    "gemm.c": (gemm.MEMORY, ("SCRATCH_BYTES", "TOTAL_BYTES")),
    "recurrent.c": (recurrent.DEFINITIONS, ("PANEL_BYTES",)),
}
"""Of files of `kernels/cpu` the macros from Python, and those that a size of memory is computed from."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("file", "macro"), [(file, macro) for file, (_, found) in C_FILES.items() for macro in found])
def test_a_smaller_size_than_c_needs_does_not_compile(file: str, macro: str) -> None:
    numbers = C_FILES[file][0]
    float64 = (np.dtype("float64"),)
    smaller = CSource(file, float64, macros=tuple((numbers | {macro: numbers[macro] // 64}).items()))
    with pytest.raises(CompilerError, match="static assertion"):
        compiler.load("int entry(void) { return 0; }\n", [smaller], ["entry"])
