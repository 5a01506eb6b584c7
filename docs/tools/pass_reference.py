"""Writes docs/reference/passes.md from the passes of the compiler: python docs/tools/pass_reference.py"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from adtrain import passes
from adtrain.backends.cpu.fusions import cpu_fusions
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.core.staging import Results, results_of
from adtrain.passes.fusion import FusionPass

PAGE = Path(__file__).parents[1] / "reference" / "passes.md"
INTRODUCTION = """\
# Passes of the compiler

This page is made by `python docs/tools/pass_reference.py`. [Design](../design.md#passes) says how passes work.

The passes run in this order. Each declares how the results of a Program after it compare with those before it, if NumPy
computes both (`keeps` in `adtrain/core/staging.py`); `tests/test_passes_random.py` holds it to that on random Programs.
On a device, the kernel of a fused equation may add in another order than the kernels that it replaces.

"""
MEANINGS = {
    Results.EXACT: "the results have the same bits",
    Results.ROUNDING: "they may differ by rounding",
    Results.FINITE: "they may differ by rounding, and where a value is infinite or NaN",
}


def page() -> str:
    """The content of docs/reference/passes.md."""
    meanings = "".join(f"- {results.value}: {meaning}.\n" for results, meaning in MEANINGS.items())
    of_members = passes.by_member, *passes.SIMPLIFY
    devices = {
        "On the CPU": (*passes.SIMPLIFY, *cpu_fusions()),
        "On a GPU": (*passes.SIMPLIFY, *gpu_fusions(H200)),
        "On the CPU, for the members of a sweep": (*of_members, *cpu_fusions(by_member=True)),
        "On a GPU, for the members of a sweep": (*of_members, *gpu_fusions(H200._replace(by_member=True))),
    }
    return INTRODUCTION + meanings + "".join(f"\n## {title}\n\n{_table(applied)}" for title, applied in devices.items())


def _table(applied: Any) -> str:
    lines = ["| pass | results | what it does |", "|---|---|---|"]
    for improve in applied:
        function = getattr(improve, "func", improve)
        if summary := _summary(function):
            lines.append(f"| `{function.__name__.strip('_')}` | {results_of(improve).value} | {summary} |")
    return "\n".join(lines) + "\n"


def _summary(function: Any) -> str:
    """The first sentence of the docstring of the pass, or of its module, which is about this pass alone.

    Of a pass for several forms, their names. Empty if the target has none of the forms.
    """
    described = [function]
    if isinstance(function, FusionPass):
        target = function.target
        described = [fusion for fusion in function.fusions if target is None or fusion.runs_on(target)]
    if len(described) > 1:
        return "The forms " + ", ".join(f"`{fusion.form}`" for fusion in described) + ", which compete"
    texts = (inspect.getdoc(each) or sys.modules[each.__module__].__doc__ or "" for each in described)
    text = next(texts, "")
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].removesuffix(".").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
