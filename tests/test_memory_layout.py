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
from adtrain.backends.cpu.compiler import CompilerError
from adtrain.backends.cpu.compiler import Source as CSource
from adtrain.backends.cuda.compiler import CudaCompilerError, Source, compile_source
from adtrain.core.kernel import lengths, memory_layout
from adtrain.lowering.cpu import conv, products

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
def test_macros_point_to_the_offsets_that_python_computes(arrays: Sequence[tuple[int, int]], n: int, m: int) -> None:
    x, y = lengths(n=n, m=m)
    end, expected, given = 0, {}, {}
    for i, (size, multiple) in enumerate(arrays):
        given[f"A{i}"] = size, x.rounded_up(multiple) + y * i + x // 4 * y
        expected[f"A{i}"] = end
        end += size * (-(-n // multiple) * multiple + m * i + n // 4 * m)
    found = memory_layout("M", given, x, y)
    assert places(found.macros, n, m) == expected
    assert found == end


def test_an_aligned_layout_has_room_for_the_alignment() -> None:
    assert memory_layout("M", {"TILE": (1, 100)}, alignment=1024) == 100 + 1024


def test_another_length_of_the_last_array_needs_no_other_kernel() -> None:
    short, long = (memory_layout("M", {"MAXIMA": (4, 3), "SUMS": (8, n)}) for n in (10, 20))
    assert short.macros == long.macros
    assert (short, long) == (92, 172)


@pytest.mark.needs_nvrtc
def test_an_array_of_elements_of_another_size_does_not_compile() -> None:
    macros = memory_layout("M", {"SUMS": (8, 10)}).macros
    text = '#include "common/common.cuh"\n' + macros + "KERNEL f(char *memory) { *M_SUMS(%s, memory) = 0; }\n"
    compile_source(Source("f.cu", text % "double"), "90a")
    with pytest.raises(CudaCompilerError, match="MemoryLayout"):
        compile_source(Source("f.cu", text % "float"), "90a")


C_FILES = {
    "conv.c": (conv.STRUCTS, ("CORRELATION_BYTES", "TAP_BYTES", "SPAN_BYTES")),
    "attention.c": (products.ATTENTION_MACROS, ("STRUCT_BYTES", "KEYS")),
    "gemm.c": (products.GEMM_MACROS, ("SCRATCH_BYTES", "TOTAL_BYTES")),
    "recurrent.c": (products.RECURRENT_MACROS, ("PANEL_BYTES",)),
}
"""Of files of `kernels/cpu` the macros from Python, and those that a size of memory is computed from."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("file", "macro"), [(file, macro) for file, (_, found) in C_FILES.items() for macro in found])
def test_a_macro_from_python_that_is_smaller_than_c_needs_does_not_compile(file: str, macro: str) -> None:
    numbers = C_FILES[file][0]
    float64 = (np.dtype("float64"),)
    smaller = CSource(file, float64, macros=tuple((numbers | {macro: numbers[macro] // 64}).items()))
    with pytest.raises(CompilerError, match="static assertion"):
        compiler.load("int entry(void) { return 0; }\n", [smaller], ["entry"])
