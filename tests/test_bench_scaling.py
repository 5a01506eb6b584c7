"""The arithmetic of scaling: efficiency, and the part of the exchanges that other work hides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adtrain.bench import page, scaling
from adtrain.bench.scaling_worker import Measured, Request
from adtrain.core.errors import AdtrainError


def test_efficiency_and_hidden_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 1 us an image; two ranks take 30 us more, in which 100 us of exchanges are partly hidden."""

    def run(request: Request, ranks: int, threads: int) -> Measured:
        step = request.batch_size / ranks + (30 if ranks > 1 else 0)
        return Measured((100.0 if request.exchange_bytes else step,), 4000, "cpu")

    monkeypatch.setattr(scaling, "run", run)
    found = scaling.scaling("mlp", [], "cpu", 120, [1, 2])
    weak, strong = [p for p in found.points if p.weak], [p for p in found.points if not p.weak]
    assert [(p.ranks, p.batch_size, p.step_us, p.efficiency, p.hidden) for p in weak] == [
        (1, 120, 120.0, 1.0, None),
        (2, 240, 150.0, 0.8, 0.7),
    ]
    assert [(p.batch_size, p.step_us, p.efficiency, p.hidden) for p in strong] == [
        (120, 120.0, 1.0, None),
        (120, 90.0, pytest.approx(4 / 3), None),
    ]
    on_gpus = [p for p in scaling.scaling("mlp", [], "gpu", 120, [1, 2]).points if not p.weak]
    assert [p.efficiency for p in on_gpus] == [1.0, pytest.approx(2 / 3)]
    (one,) = scaling.scaling("mlp", [], "gpu", 120, [2], ["torch-graph"], ["weak"]).points
    assert (one.system, one.weak, one.step_us, one.exchange_us) == ("torch-graph", True, 150.0, 0.0)
    cells = [column.text(found.points[-1]) for column in scaling.COLUMNS]
    assert cells == [
        "adtrain",
        "strong",
        "2",
        "120",
        "90.0",
        "100.0",
        "",
        "133.3%",
    ]


def test_the_page_draws_the_points_and_marks_the_model_as_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {1: 100.0, 2: 110.0}

    def run(request: Request, ranks: int, threads: int) -> Measured:
        return Measured((20.0 if request.exchange_bytes else times[ranks],), 2_000_000, "H")

    monkeypatch.setattr(scaling, "run", run)
    monkeypatch.setattr(scaling, "find_spec", lambda package: object())  # as if PyTorch were installed
    result = scaling.result("mlp", [], "cpu", 120, [1, 2], ["torch-ddp"], lambda line: None)
    assert "Arithmetic" not in page.render(result)
    shown = page.render(replace(result, protocol=replace(result.protocol, device="gpu")))
    assert shown.count("<svg") == 3
    assert "Arithmetic, not measured" in shown


def test_the_model_gives_the_measured_exchange_and_grows_with_the_nodes() -> None:
    start = scaling.fitted_start_us(2_000_000, 2, 30.0)
    assert scaling.exchange_us(2_000_000, 2, start) == pytest.approx(30.0)
    assert start == pytest.approx(30.0 - 2_000_000 / 344e3)
    # 16 GPUs are two nodes: 2 n 7/8 / B1 inside, 2 n/8 1/2 / B2 between, and two hops.
    expected = 2 * 2e6 * 7 / 8 / 344e3 + 2e6 / 8 / 47e3 + 2 * 14.0
    assert scaling.exchange_us(2_000_000, 16) == pytest.approx(expected)
    assert scaling.weak_efficiency(100.0, 2_000_000, 2, start, 0.5) == pytest.approx(100 / 115)
    assert scaling.weak_efficiency(100.0, 2_000_000, 1, start, 0.0) == 1.0


@pytest.mark.exhaustive
def test_a_worker_that_fails_is_one_line() -> None:
    with pytest.raises(AdtrainError, match=r"^1 ranks: exit code 1: nosuch: neither a file nor a packaged config"):
        scaling.run(Request("nosuch", (), "cpu", 8), 1, 1)
