"""The search for a learning rate: what it trains, what it proposes, and what the command prints and writes."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import command
from hypothesis import given
from hypothesis import strategies as st
from report_runs import one_line
from sweep_runs import after
from training_runs import TEXT, load, write_config

from adtrain import training
from adtrain.core.errors import AdtrainError
from adtrain.sweeps import rates, wave
from adtrain.sweeps.rates import RateSearch, Tried, rates_within
from adtrain.sweeps.session import Session, prepared

losses = st.lists(st.one_of(st.none(), st.floats(0, 1e6)), min_size=3, max_size=64).filter(
    lambda found: any(x is not None for x in found)
)


@given(losses)
def test_the_proposal_is_the_middle_of_the_rates_that_are_nearly_as_good(found: list[float | None]) -> None:
    tried = [Tried(rate, loss) for rate, loss in zip(rates_within(1e-5, 10, len(found)), found, strict=True)]
    search = RateSearch("optimizer.sgd.lr", 100, tried)
    first, last = search.near
    assert 0 <= first <= search.best <= last < len(tried)
    assert tried[first].rate * 0.9 <= search.proposal <= tried[last].rate * 1.1
    smooth = search.smooth
    assert smooth[search.best] == min(smooth)
    if smooth[search.best] < inf:
        before = max(x for x in smooth[: search.best + 1] if x < inf)
        assert max(smooth[first : last + 1]) <= smooth[search.best] + 0.1000001 * (before - smooth[search.best])


def test_one_rate_that_is_lucky_or_fails_is_not_the_best_one() -> None:
    valley = [2.0, 1.9, 1.5, 1.0, 0.9, 0.9, 1.0, 1.6, 3.0, None, None]

    def search(found: list[float | None]) -> RateSearch:
        grid = rates_within(1e-5, 1, len(found))
        return RateSearch("optimizer.sgd.lr", 9, [Tried(*pair) for pair in zip(grid, found, strict=True)])

    expected = search(valley)
    assert (expected.best, expected.near, expected.is_at_end) == (4, (3, 6), False)
    for place in (1, 8, 9):
        assert search([*valley[:place], 0.1, *valley[place + 1 :]]).best in (4, 5)
        assert search([*valley[:place], None, *valley[place + 1 :]]).near == (3, 6)
    assert search([3.0, 2.0, 1.0]).is_at_end


def session_of(folder: Path, tried: list[float], steps: int, *overrides: str) -> Session:
    settings = rates.settings(load(folder, *overrides), tried, steps)
    return prepared(load(folder, *overrides, *settings), "cpu")


@pytest.mark.parametrize("steps", [4, 8])
def test_the_loss_of_a_rate_is_the_mean_over_the_steps_of_its_own_training(tmp_path: Path, steps: int) -> None:
    """90 images in batches of 16 are epochs of 6 steps."""
    tried = [0.001, 0.1]
    session = session_of(tmp_path, tried, steps, "schedule=cosine", "data.validation=0.1")
    found = rates.search(session, "optimizer.adam.lr", lambda: False)
    assert found is not None
    assert [x.rate for x in found.tried] == tried
    assert found.steps == steps
    for x in found.tried:

        def trained(count: int, rate: float = x.rate) -> float:
            """The training loss of the last epoch of a training of so many steps."""
            settings = f"optimizer.adam.lr={rate}", "schedule=constant", f"training.steps={count}", "training.epochs=9"
            return training.run(training.prepare(load(tmp_path, *settings))).train.loss

        first = min(steps, 6)
        rest = trained(steps) * (steps - first) if steps > first else 0.0
        assert x.loss == pytest.approx((trained(first) * first + rest) / steps, rel=1e-4)


def test_rates_that_diverge_have_no_loss_and_all_of_them_are_an_error(tmp_path: Path) -> None:
    sgd = "optimizer={sgd: {lr: 0.1}}"
    found = rates.search(session_of(tmp_path, [0.01, 1e20], 20, sgd), "optimizer.sgd.lr", lambda: False)
    assert found is not None
    assert [x.loss is None for x in found.tried] == [False, True]
    with pytest.raises(
        AdtrainError, match=r"^optimizer.sgd.lr: found no rate from 1e\+20 on with a finite loss; lower"
    ):
        rates.search(session_of(tmp_path, [1e20, 1e21], 20, sgd), "optimizer.sgd.lr", lambda: False)


def test_the_command_proposes_a_rate_and_draws_the_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    arguments = "lr-find", "tiny.yaml", "--device", "cpu", "--rates", 5, "--steps", 12, "--from", 1e-4, "--to", 1
    lines = command(*arguments).stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "best rate", "nearly as good 0.01 to 0.1", "proposal", "plot", "time",
    ]  # fmt: skip
    assert lines[2] == "proposal       --set optimizer.adam.lr=0.032"
    plot = ElementTree.parse(tmp_path / "tiny-lr.svg").getroot()
    assert len(plot.findall("{http://www.w3.org/2000/svg}circle")) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "tiny-lr.svg", "tiny.yaml"]
    found = json.loads(command(*arguments, "--json", "-o", "other.svg").stdout)
    assert [x["rate"] for x in found["rates"]] == [1e-4, 1e-3, 1e-2, 0.1, 1.0]
    assert (found["proposal"], found["near"], found["steps"]) == (0.032, [0.01, 0.1], 12)
    assert Path(found["plot"]).read_bytes() == (tmp_path / "tiny-lr.svg").read_bytes()


def test_a_best_rate_at_the_end_of_the_range_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    command("lr-find", "tiny.yaml", "--device", "cpu", "--rates", 3, "--steps", 6, "--to", 1e-3)
    reason = "the best rate is 0.001, the end of the range; change --to"
    assert caplog.messages == [f"adtrain: warning: optimizer.adam.lr: {reason}"]


def test_wrong_arguments_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_config(tmp_path, TEXT + "sweep: {training.seed: {range: 2}}\n")
    line = one_line(command("lr-find", path, "--device", "cpu", expect=2))
    assert line == f"{path}:12:1: sweep: found a sweep, expected none: --set sweep=null leaves it out"
    line = one_line(command("lr-find", path, "--from", 1, "--to", 0.1, expect=2))
    assert line == "--from is 1, expected less than --to, 0.1 (see 'adtrain lr-find --help')"
    line = one_line(command("lr-find", path, "-o", "rates.png", expect=2))
    assert line.startswith("Invalid value for '-o' / '--output': rates.png: found the extension .png, expected .svg")
    for value, kind in ((0, "a number"), ("nan", "a finite number")):
        line = one_line(command("lr-find", path, "--from", value, expect=2))
        assert line.startswith(f"Invalid value for '--from': found '{value}', expected {kind} above 0, at most 1e+30")


def test_a_picture_that_cannot_be_written_is_an_error_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_config(tmp_path)
    monkeypatch.setattr(rates, "search", None)
    (tmp_path / "tiny-lr.svg").mkdir()
    line = one_line(command("lr-find", path, "--device", "cpu", expect=2))
    assert line == "tiny-lr.svg: cannot be written (Is a directory)"


def test_a_search_that_is_stopped_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    monkeypatch.setattr(wave, "REPORT_SECONDS", 0.0)
    session = session_of(tmp_path, [0.01, 0.1], 20)
    assert rates.search(session, "optimizer.adam.lr", after(5)) is None
