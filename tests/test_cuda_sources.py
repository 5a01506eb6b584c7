"""Rules for every CUDA source, checked in its text: no compiler and no GPU are needed."""

from __future__ import annotations

import re

from adtrain.assets import asset_path
from adtrain.backends.cuda import compiler

KERNEL = re.compile(r"^KERNEL\b[^{;]*\b(?P<name>\w+)\([^{;()]*\)\s*\{\s*(?P<first>[^;{]*;)", re.MULTILINE)
LATE = {"pack_matrices", "packed_gemm", "bfloat16_gemm"}
"""Kernels that do other work before they wait. The first two are later launches of one candidate: what they read before
was written two launches earlier, or is an input that the first launch has waited for. The last one reads no memory
before."""


def first_statements() -> dict[tuple[str, str], str]:
    """The first statement of each kernel, by file ("gemm/gemm.cu") and function."""
    root = asset_path("kernels") / "cuda"
    statements: dict[tuple[str, str], str] = {}
    for path in sorted(root.rglob("*.cu")):
        text, file = re.sub(r"//.*", "", path.read_text()), path.relative_to(root).as_posix()
        found = {(file, match["name"]): match["first"] for match in KERNEL.finditer(text)}
        assert len(found) == len(re.findall(r"^KERNEL\b", text, re.MULTILINE)), file
        statements |= found
    return statements


EXCHANGES = {("index/peer_exchange.cu", "peer_exchange")}
"""Kernels that exchange between ranks. No equation launches them, and they start when earlier launches have ended."""


def kernel_functions() -> set[tuple[str, str]]:
    """File and name of every kernel that runs for an equation."""
    return first_statements().keys() - EXCHANGES


def test_every_kernel_waits_for_its_inputs_first() -> None:
    """With programmatic dependent launch a kernel starts before the previous one has written its results."""
    first = first_statements()
    assert len(first) > 20
    late = {kernel for kernel, statement in first.items() if statement != "wait_for_inputs();"}
    assert {name for _, name in late - EXCHANGES} == LATE


def test_the_source_for_a_kernel_has_no_other_kernel() -> None:
    for file, name in kernel_functions():
        source = compiler.of_kernel(compiler.file_source(file, (), ()), name)
        assert compiler.KERNEL.findall(source.text) == [name]
        assert len(re.findall(r"^KERNEL\b", source.text, re.MULTILINE)) == 1
