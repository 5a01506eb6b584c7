"""What holds of every CUDA source, read as text: no compiler and no GPU are needed."""

from __future__ import annotations

import re

from adtrain.assets import asset_path

KERNEL = re.compile(r"^KERNEL\b.*?\)\s*\{\s*(?P<first>[^;{]*;)", re.MULTILINE | re.DOTALL)


def test_the_first_statement_of_every_kernel_waits_for_what_it_reads() -> None:
    """A launch overlaps the end of the one before it, so whatever is read earlier may not have been written yet."""
    first: dict[str, str] = {}
    for path in sorted((asset_path("kernels") / "cuda").glob("*.cu")):
        text = re.sub(r"//.*", "", path.read_text())
        found = [match["first"] for match in KERNEL.finditer(text)]
        assert len(found) == len(re.findall(r"^KERNEL\b", text, re.MULTILINE)), path.name
        first.update((f"{path.name} {i}", statement) for i, statement in enumerate(found))
    assert len(first) > 20
    assert set(first.values()) == {"wait_for_inputs();"}, {k: v for k, v in first.items() if v != "wait_for_inputs();"}
