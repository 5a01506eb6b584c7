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
from adtrain.backends.cpu.codegen import items, loops
from adtrain.cases import CASES
from adtrain.core.array import Value
from adtrain.core.autodiff import vjp
from adtrain.core.precision import FULL

pytestmark = pytest.mark.compiled

IN_FULL = {f"{case.op}, {case.name}": case for case in CASES if case.precision == FULL}  # others have no C
FIRST = tuple({case.op: name for name, case in reversed(IN_FULL.items())}.values())
"""The first case of each operation."""
WITH_C = tuple(name for name in FIRST if IN_FULL[name].op != "gather_shards")
"""Those that have C without passes. Without them, exchanges between shards run on NumPy."""
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
def results(names: tuple[str, ...], passes: str, dtype: str, code: str) -> dict[str, Both | Exception]:
    """What each of these cases computes, by code of a kind that a fixture has chosen."""
    functions = {
        name: (lambda *xs, case=IN_FULL[name]: values_and_gradients(case, xs), IN_FULL[name].sample(dtype))
        for name in names
    }
    with pytest.MonkeyPatch.context() as patch:
        # Their arrays are small: let threads divide them all the same, and compute several items at once.
        patch.setattr(loops, "FEW_ELEMENTS", 0)
        patch.setattr(items, "MIN_STEPS", 1)
        patch.setattr(sys.modules["adtrain.backends.cpu.fusions"], "MIN_ITEMS", 1)
        return both(functions, PASSES[passes])


@pytest.mark.parametrize("name", FIRST)
def test_the_first_case_of_each_operation_equals_eager_code(name: str) -> None:
    check(results(FIRST, "all passes", "float32", "quick")[name], "float32")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WITH_C)
def test_the_first_case_of_each_operation_without_passes_equals_eager_code(name: str) -> None:
    check(results(WITH_C, "no passes", "float64", "quick")[name], "float64")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("name", FIRST[::4])
def test_the_first_case_of_every_fourth_operation_in_optimised_code_equals_eager_code(name: str) -> None:
    """Loops of all kinds and sizes are compiled with optimization in `test_cpu_shapes.py`."""
    check(results(FIRST[::4], "all passes", "float32", "optimised")[name], "float32")


def check(found: Both | Exception, dtype: str) -> None:
    if isinstance(found, Exception):
        raise found
    found.check(TOLERANCE[dtype])
