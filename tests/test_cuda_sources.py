"""Rules for every CUDA source, checked in its text: no compiler and no GPU are needed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from adtrain.backends.cuda import compiler
from adtrain.files import asset_path

PARAMETERS = r"\((?:[^{;()]|\bIF\([^()]*\))*\)"
KERNEL = re.compile(rf"^KERNEL\b[^{{;]*\b(?P<name>\w+){PARAMETERS}\s*\{{\s*(?P<first>[^;{{]*;)", re.MULTILINE)
LATER_LAUNCHES = {"pack_matrices", "packed_gemm"}
"""Kernels that read memory before they wait, and are later launches of a candidate. What they read was written two
launches earlier, or is an input that the first launch has waited for."""
READING_LATE = {
    *("bfloat16_gemm", "bfloat16_products", "bfloat16_conv", "bfloat16_gather", "bfloat16_shift"),
    *("attention_wgmma", "attention_wgmma_grad"),
}
"""Kernels that do other work before they wait, but read no memory."""


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


ON_MEMORY = re.compile(
    r"\b(?:ld|st|cp|red|atom|ldmatrix|stmatrix|prefetch|tensormap|mbarrier|barrier|bar|fence)\.[a-z]"
    r"|griddepcontrol\.wait|wgmma\.(?:fence|commit_group|wait_group)"
)
"""PTX instructions that access memory or order accesses."""
TEXTS = re.compile(r'"[^"]*"')


def inline_assembly() -> Iterator[tuple[str, str]]:
    """The file and the text of each asm statement."""
    root = asset_path("kernels") / "cuda"
    for path in sorted(root.rglob("*.cu*")):
        text = re.sub(r"//.*", "", path.read_text())
        for found in re.finditer(r"\basm\b[^;]*?\(", text):
            depth, at = 1, found.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[at], 0)
                at += 1
            yield path.relative_to(root).as_posix(), text[found.start() : at]


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
    assert {name for _, name in late - EXCHANGES} == LATER_LAUNCHES | READING_LATE


def test_the_compiler_moves_no_access_to_memory_across_instructions_on_memory() -> None:
    found = [(file, text) for file, text in inline_assembly() if ON_MEMORY.search(" ".join(TEXTS.findall(text)))]
    assert len(found) > 40
    assert [x for x in found if not re.match(r"asm volatile\b", x[1]) or '"memory"' not in x[1]] == []


def test_relaxed_arrivals_at_a_barrier_of_a_cluster_are_ordered_by_another_one() -> None:
    """Else another block could overwrite what this one is still reading. The threads that arrive relaxed meet others
    at a barrier of the block; these arrive with release."""
    root = asset_path("kernels") / "cuda"
    calls = 0
    for path in (path for path in root.rglob("*.cu*") if path.name != "cluster.cuh"):
        text = re.sub(r"//.*", "", path.read_text())
        relaxed = text.count("cluster_arrive_relaxed();")
        met = re.findall(r"named_barrier_arrive\((.*)\);\s*cluster_arrive_relaxed\(\);", text)
        ordered = re.findall(r"named_barrier_sync\((.*)\);\s*cluster_arrive\(\);", text)
        assert len(met) == relaxed, path
        assert set(met) <= set(ordered), path
        calls += relaxed
    assert calls


def test_the_source_for_a_kernel_has_no_other_kernel() -> None:
    for file, name in kernel_functions():
        source = compiler.of_kernel(compiler.file_source(file, (), ()), name)
        assert compiler.KERNEL.findall(source.text) == [name]
        assert len(re.findall(r"^KERNEL\b", source.text, re.MULTILINE)) == 1
