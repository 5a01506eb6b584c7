"""Compiled Programs: each case computes what it computes eagerly, without passes and with all of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from compiled_parity import TOLERANCE, Both, both
from program_samples import ALL

from adtrain import ops
from adtrain.backends.cpu import toolchain
from adtrain.backends.cpu.codegen import loops
from adtrain.cases import CASES
from adtrain.core.array import Value
from adtrain.core.autodiff import vjp
from adtrain.core.precision import FULL

pytestmark = pytest.mark.compiled

IN_FULL = {f"{case.op}, {case.name}": case for case in CASES if case.precision == FULL}  # others have no C
FIRST = list({case.op: name for name, case in reversed(IN_FULL.items())}.values())
"""The first case of each operation."""
PASSES: dict[str, Sequence[Any]] = {"no passes": (), "all passes": ALL}


def values_and_gradients(case: Any, inputs: Sequence[Value]) -> list[Value]:
    """The outputs of a case, and the pullback of ones to each of its floating-point inputs."""
    smooth = [i for i, x in enumerate(inputs) if x.dtype.kind == "f"]

    def f(*xs: Value) -> Any:
        given = dict(zip(smooth, xs, strict=True))
        return case.f(*(given.get(i, x) for i, x in enumerate(inputs)))

    if not case.order or not smooth:
        out = case.f(*inputs)
        return list(out) if isinstance(out, tuple) else [out]
    out, pullback = vjp(f, *(inputs[i] for i in smooth))
    outputs = list(out) if isinstance(out, tuple) else [out]
    ones = [ops.ones_like(x) for x in outputs]
    return [*outputs, *pullback(tuple(ones) if isinstance(out, tuple) else ones[0])]


@cache
def results(which: str, dtype: str, first: bool) -> dict[str, Both | Exception]:
    """Of the first case of each operation, or of the others."""
    functions = {
        name: (lambda *xs, case=case: values_and_gradients(case, xs), case.sample(dtype))
        for name, case in IN_FULL.items()
        if (name in FIRST) == first
    }
    with pytest.MonkeyPatch.context() as patch:
        if (which, dtype) != ("all passes", "float32"):
            # What is compiled is large, and its speed does not matter.
            patch.setattr(toolchain, "FLAGS", ("-O1", *toolchain.FLAGS[1:]))
        # Their arrays are small: let threads divide them all the same.
        patch.setattr(loops, "FEW_ELEMENTS", 0)
        patch.setattr(sys.modules["adtrain.passes.fuse_batchwise"], "MIN_ITEMS", 1)
        return both(functions, PASSES[which])


@pytest.mark.parametrize(
    ("which", "dtype"),
    [
        ("all passes", "float32"),
        pytest.param("all passes", "float64", marks=pytest.mark.exhaustive),
        pytest.param("no passes", "float32", marks=pytest.mark.exhaustive),
        pytest.param("no passes", "float64", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.exhaustive) for name in IN_FULL]
)
def test_compiled_cases_equal_eager_ones(name: str, which: str, dtype: str) -> None:
    found = results(which, dtype, name in FIRST)[name]
    if isinstance(found, Exception):
        raise found
    found.check(TOLERANCE[dtype])
