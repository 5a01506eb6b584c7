"""Every example runs as a script, is short, and prints the right results."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from adtrain.backends import LOADERS
from adtrain.core import devices
from adtrain.core.errors import DeviceError

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example. Returns what it prints."""

    def run(name: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *options])
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return run


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_is_under_60_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60


def test_xor_is_learnt(output: Callable[..., str]) -> None:
    answers = {(a, b): float(p) for a, b, p in re.findall(r"(\d) xor (\d) = (\S+)", output("xor.py"))}
    assert {x: p > 0.5 for x, p in answers.items()} == {
        ("0", "0"): False, ("0", "1"): True, ("1", "0"): True, ("1", "1"): False,
    }  # fmt: skip
    assert all(min(p, 1 - p) < 0.1 for p in answers.values())


@pytest.mark.compiled
def test_kernel_norm_has_both_closed_form_gradients(output: Callable[..., str]) -> None:
    errors = re.findall(r"gradient by \w: largest error (\S+)", output("kernel_norm.py", "--points", "300"))
    assert len(errors) == 2
    assert all(float(error) < 1e-5 for error in errors)


def test_kernel_norm_says_in_one_line_that_a_device_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> NoReturn:
        raise DeviceError("device gpu: PyCUDA is missing")

    monkeypatch.setitem(LOADERS, "gpu", fail)
    monkeypatch.setattr(devices, "_loaded", {})
    monkeypatch.setattr(sys, "argv", ["kernel_norm.py", "--device", "gpu"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(EXAMPLES / "kernel_norm.py"), run_name="__main__")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "kernel_norm: error: device gpu: PyCUDA is missing\n"


def test_third_derivative_equals_its_closed_form(output: Callable[..., str]) -> None:
    rows = output("third_derivative.py").splitlines()[1:]
    assert len(rows) == 4
    for row in rows:
        *_, third, exact = row.split()
        assert float(third) == pytest.approx(float(exact), abs=2e-5)


def test_a_custom_derivative_is_differentiable_twice_and_has_a_gradient_at_zero(output: Callable[..., str]) -> None:
    text = output("custom_derivative.py")
    assert "x = [0.0, 0.0]  length 0.0  gradient [0.0, 0.0]" in text
    assert "hessian at [3.0, 4.0]: [[0.128, -0.096], [-0.096, 0.072]]" in text
