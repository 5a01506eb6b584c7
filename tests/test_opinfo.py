"""Values, gradients and gradients of gradients equal PyTorch's on the samples of PyTorch's own tests (OpInfo).

`opinfo_table.py` says which operation is compared with which OpInfo entry, and which samples may be refused. Plain
pytest takes some samples of each entry. `python tests/opinfo_report.py` counts all of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from opinfo_table import CALLS, MISSING

pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's OpInfo needs expecttest")

import opinfo_compare
from compiled_parity import TOLERANCE, check_all

pytestmark = pytest.mark.needs_torch
SOME, MANY = 24, 400
"""The number of samples of an entry and type, and of reference samples."""


@cache
def entries() -> dict[str, Any]:
    return opinfo_compare.entries()


@pytest.mark.parametrize("name", CALLS)
def test_samples_are_equal_or_refused_for_a_listed_cause(name: str) -> None:
    found = opinfo_compare.count(name, entries()[name], SOME)
    assert found.wrong == []
    assert found.equal > 0
    assert found.by_cause(CALLS[name].refused).keys() <= {*CALLS[name].refused}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CALLS)
def test_all_samples_are_equal_or_refused_and_every_listed_cause_occurs(name: str) -> None:
    found = [opinfo_compare.count(name, entries()[name])]
    found.append(opinfo_compare.count(name, entries()[name], MANY, reference=True))
    assert [difference for part in found for difference in part.wrong] == []
    causes = {cause for part in found for cause in part.by_cause(CALLS[name].refused)}
    assert causes == {*CALLS[name].refused}


@pytest.mark.compiled
def test_the_first_sample_of_every_entry_is_equal_in_compiled_code() -> None:
    functions = {name: opinfo_compare.compilable(call, entries()[name]) for name, call in CALLS.items()}
    check_all({name: f for name, f in functions.items() if f is not None}, TOLERANCE["float64"])


def test_importing_opinfo_leaves_flags_of_pytorch_settable() -> None:
    """OpInfo forbids it, and other tests run in the same process."""
    import torch

    entries()
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark


def test_every_name_in_the_table_is_an_opinfo_entry() -> None:
    assert {*CALLS, *(name for names in MISSING.values() for name in names)} <= entries().keys()
