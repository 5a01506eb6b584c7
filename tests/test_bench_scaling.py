"""The arithmetic of scaling: efficiency, and the part of the exchanges that other work hides."""

from __future__ import annotations

import pytest

from adtrain.bench.scaling import measure
from adtrain.bench.scaling.request import Measured, Request
from adtrain.core.errors import AdtrainError


def test_efficiency_and_hidden_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 1 us an image; two ranks take 30 us more, in which 100 us of exchanges are partly hidden."""

    def run(request: Request, ranks: int, threads: int) -> Measured:
        step = request.batch_size / ranks + (30 if ranks > 1 else 0)
        return Measured(ranks, request.batch_size, (100.0 if request.exchange_bytes else step,), 4000, "cpu")

    monkeypatch.setattr(measure, "run", run)
    found = measure.scaling("mlp", [], "cpu", 120, [1, 2])
    weak, strong = [p for p in found.points if p.weak], [p for p in found.points if not p.weak]
    assert [(p.ranks, p.batch_size, p.step_us, p.efficiency, p.hidden) for p in weak] == [
        (1, 120, 120.0, 1.0, None),
        (2, 240, 150.0, 0.8, 0.7),
    ]
    assert [(p.batch_size, p.step_us, p.efficiency, p.hidden) for p in strong] == [
        (120, 120.0, 1.0, None),
        (120, 90.0, pytest.approx(2 / 3), None),
    ]
    assert measure.lines(found)[-1].split() == ["strong", "2", "120", "90.0", "100.0", "66.7%"]


def test_a_worker_that_fails_is_one_line() -> None:
    with pytest.raises(AdtrainError, match=r"^1 ranks: exit code 1: nosuch  neither a file nor a packaged config"):
        measure.run(Request("nosuch", (), "cpu", 8), 1, 1)
