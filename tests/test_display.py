"""The progress of a training: lines, bars on a terminal, and bars of a notebook."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tqdm
import tqdm.notebook

from adtrain import api, display
from adtrain.config.files import load_data
from adtrain.core.timeline import report_status, status_handler
from adtrain.display import IntervalLines, ProgressBars, ProgressLines, progress_display
from adtrain.training import ClassScore, Epoch, Interval
from adtrain.training.scores import TextScore

DONE: Any = Epoch(1, 6, ClassScore(0.5, 0.75), None, 2.0, 45.0)


class Bar:
    """Records what a bar is told."""

    def __init__(self, **options: Any) -> None:
        self.total, self.n, self.closed, self.text, self.resets = options["total"], 0, False, "", 0

    def update(self, count: int) -> None:
        self.n += count

    def reset(self) -> None:
        self.n, self.resets = 0, self.resets + 1

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text

    def close(self) -> None:
        self.closed = True


def jupyter(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    """Simulates a session of IPython with this config; a kernel's has the key IPKernelApp."""
    shell = SimpleNamespace(config=config)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def test_a_bar_of_an_epoch_is_replaced_by_a_line() -> None:
    bars, lines = list[Bar](), list[str]()

    def make(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    shown = ProgressBars(lines.append, make)
    shown.training_started(experiment(18, path="a.csv"))
    shown.epoch_started(1, 3, 90)
    shown.step_done(16)
    shown.step_done(16)
    shown.interval_done(Interval(1, 2, ClassScore(0.5, 0.75), 0.01, 100.0))
    (bar,) = bars
    assert (bar.total, bar.n, bar.closed, bar.text) == (90, 32, False, "loss 0.500, acc 75.0%")
    shown.epoch_done(DONE, None)  # type: ignore[arg-type]
    assert bar.closed
    shown.epoch_done(replace(DONE, step=18), None)  # type: ignore[arg-type]
    line = "epoch 1/3: loss 0.5000, accuracy 75.00%, 45 rows/s, 2.0 s"
    assert lines == [f"{line}, about 4 s left", line]


def experiment(steps: int, **data: str) -> Any:
    """What a display reads of an experiment."""
    return SimpleNamespace(config=SimpleNamespace(data=load_data(data)), total_steps=steps, full_batch=15)


@pytest.mark.parametrize("unit", ["character", "token"])
def test_the_speed_of_a_text_is_that_of_its_units_with_the_share_of_the_peak(unit: str) -> None:
    lines = list[str]()
    shown = IntervalLines(lines.append, "sequences")
    shown.training_started(experiment(10_000, path="a.txt", unit=unit))
    shown.step_flops, shown.peak = 3_000, 100_000.0
    shown.interval_done(Interval(1, 100, TextScore(0.5, 2.0, 0.75), 0.01, 150.0))
    (line,) = lines
    assert f"19,200 {unit}s/s, 30% of peak, about 990 s left, until " in line
    assert re.search(r"until \d\d:\d\d$", line)


def test_the_progress_bar_says_what_happens_besides_steps() -> None:
    bars = list[Bar]()

    def make(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    shown = ProgressBars(print, make)
    with status_handler(shown.show_status):
        report_status("reading the data")
        assert [(bar.text, bar.closed) for bar in bars] == [("reading the data", False)]
        shown.epoch_started(1, 3, 90)
        report_status("compiling 7 of 12 kernels")
        assert [(bar.text, bar.closed) for bar in bars] == [
            ("reading the data", True),
            ("compiling 7 of 12 kernels", False),
        ]
        report_status("")
        assert (bars[-1].text, bars[-1].resets) == ("", 1), "the steps begin"
        shown.step_done(30)
        report_status("")
        assert bars[-1].resets == 1
        shown.close()
        report_status("evaluating the test images")
        assert (bars[-1].text, bars[-1].closed) == ("evaluating the test images", False)
        shown.close()
    assert [bar.closed for bar in bars] == [True, True, True]


def test_a_notebook_gets_the_bars_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    jupyter(monkeypatch, {"IPKernelApp": {}})
    monkeypatch.setattr(display, "find_spec", lambda name: name)
    monkeypatch.setattr(tqdm.notebook, "tqdm", Bar)
    found = progress_display(print)
    assert isinstance(found, ProgressBars)
    assert found.tqdm is Bar


def test_a_notebook_without_widgets_gets_its_bars_and_lines_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jupyter(monkeypatch, {"IPKernelApp": {}})
    monkeypatch.setattr(display, "find_spec", lambda name: None)
    api.training._write_line("epoch 1/1")
    bars = progress_display(print)
    bars.epoch_started(1, 1, 10)
    bars.close()
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out.startswith("epoch 1/1\n")
    assert len(output.out) > len("epoch 1/1\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_ipython_on_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    jupyter(monkeypatch, {"TerminalIPythonApp": {}})
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: terminal))
    found = progress_display(print)
    assert type(found) is (ProgressBars if terminal else ProgressLines)
    assert getattr(found, "tqdm", None) is (tqdm.tqdm if terminal else None)
