"""What holds of every CUDA source, read as text: no compiler and no GPU are needed."""

from __future__ import annotations

import re

from adtrain.assets import asset_path

KERNEL = re.compile(r"^KERNEL\b[^{;]*\b(?P<name>\w+)\([^{;()]*\)\s*\{\s*(?P<first>[^;{]*;)", re.MULTILINE)
LATER = {"pack_operands", "packed_gemm"}
"""Later launches of one candidate. What they read before they wait was written two launches earlier, or is an input that
the first launch has waited for."""


def test_the_first_statement_of_every_kernel_waits_for_what_it_reads() -> None:
    """A launch overlaps the end of the one before it, so whatever is read earlier may not have been written yet."""
    first: dict[str, str] = {}
    for path in sorted((asset_path("kernels") / "cuda").rglob("*.cu")):
        text = re.sub(r"//.*", "", path.read_text())
        found = {match["name"]: match["first"] for match in KERNEL.finditer(text)}
        assert len(found) == len(re.findall(r"^KERNEL\b", text, re.MULTILINE)), path.name
        first.update(found)
    assert len(first) > 20
    assert {name for name, statement in first.items() if statement != "wait_for_inputs();"} == LATER
