from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import training_runs
from click.testing import Result
from command_line import invoke

from adtrain import ops
from adtrain.cases import CASES
from adtrain.core.primitive import PRIMITIVES

FIELDS = ["op", "case", "order", "mode", "dtype", "device", "error", "tolerance", "passed"]


def gradcheck(*arguments: str, columns: int = 120) -> Result:
    return invoke("gradcheck", *arguments, "--device", "cpu", columns=columns)


@contextmanager
def rule(op: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """The primitive with another derivative rule."""
    primitive = PRIMITIVES[op]
    right = primitive.vjp
    object.__setattr__(primitive, "vjp", [wrong])
    try:
        yield
    finally:
        object.__setattr__(primitive, "vjp", right)


def a_wrong_factor(out: Any, x: Any) -> Any:
    return lambda ct: ct * out * 1.001


def one_that_raises(out: Any, x: Any) -> Any:
    return lambda ct: ops.reshape(ct, (7,))


def test_table_has_a_row_for_each_check_and_a_verdict() -> None:
    result = gradcheck("--op", "relu", "--op", "softmax")
    assert result.exit_code == 0
    heading, *rows = result.stdout.split("\n\n")[0].splitlines()
    assert heading.split() == ["operation", "case", "order", "mode", "error", "tolerance", "result"]
    cases = [case for case in CASES if case.op in ("relu", "softmax")]
    assert [(row.split()[0], row.split()[-1]) for row in rows] == [
        (case.op, "ok") for case in cases for _ in range(2 * case.order)
    ]
    assert f"all {len(rows)} checks passed (float64, cpu; largest error " in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("order", [1, 2, 4])
def test_order_option_checks_one_order(order: int) -> None:
    rows = json.loads(gradcheck("--op", "add", "--order", str(order), "--json").stdout)["rows"]
    assert {row["order"] for row in rows} == {order}
    assert len(rows) == 2 * len([case for case in CASES if case.op == "add" and case.order >= order])


def test_json_has_a_verdict_and_a_row_for_each_check() -> None:
    found = json.loads(gradcheck("--op", "tanh", "--json").stdout)
    assert list(found) == ["passed", "rows"]
    assert found["passed"] is True
    assert all(list(row) == FIELDS for row in found["rows"])
    assert {(row["dtype"], row["device"], row["passed"]) for row in found["rows"]} == {("float64", "cpu", True)}


def test_wrong_rule_fails_and_is_named() -> None:
    with rule("exp", a_wrong_factor):
        result = gradcheck("--op", "exp", "--op", "sin")
    assert result.exit_code == 1
    assert "FAILED exp odd 1 reverse: error " in result.stdout
    assert "FAILED sin" not in result.stdout
    assert "4 of 16 checks failed (float64" in result.stdout
    assert gradcheck("--op", "exp").exit_code == 0


def test_rule_that_raises_has_a_null_error_in_json() -> None:
    with rule("exp", one_that_raises):
        result = gradcheck("--op", "exp", "--json")
        assert "error inf" in gradcheck("--op", "exp").stdout
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["passed"] is False
    assert [row["error"] for row in found["rows"]] == [None] * 8


def test_config_has_a_row_for_each_parameter(tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    rows = json.loads(gradcheck(path, "--json").stdout)["rows"]
    assert [row["op"] for row in rows] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {row["case"] for row in rows} == {"tiny"}
    assert gradcheck(path).stdout.split()[:2] == ["parameter", "error"]


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "binary_cross_entropy_with_logits"])
def test_config_is_checked_with_its_own_loss(tmp_path: Path, loss: str) -> None:
    path = training_runs.write_config(tmp_path, training_runs.TEXT.replace("loss: cross_entropy", f"loss: {loss}"))
    assert gradcheck(str(path)).exit_code == 0


def test_wrong_rule_fails_in_a_network_that_uses_it(tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path, training_runs.TEXT.replace("- relu", "- gelu")))
    assert gradcheck(path).exit_code == 0
    with rule("gelu", a_wrong_factor):
        assert gradcheck(path).exit_code == 1


@pytest.mark.parametrize("seed", range(4))
def test_relu_layer_without_active_units_before_another_passes(tmp_path: Path, seed: int) -> None:
    layers = [{"linear": 1}, "relu", {"linear": 1}, "relu", {"linear": 3}]
    config = {"name": "narrow", "data": {"dataset": "mnist"}, "model": {"input": [4], "layers": layers}}
    config |= {"loss": "cross_entropy", "optimizer": {"sgd": {"lr": 0.1}}, "training": {"epochs": 1, "seed": seed}}
    path = tmp_path / "narrow.yaml"
    path.write_text(json.dumps(config))
    assert gradcheck(str(path)).exit_code == 0


@pytest.mark.parametrize("columns", [60, 120])
def test_table_fits_the_terminal(columns: int) -> None:
    lines = gradcheck("--op", "max_pool2d", "--op", "adaptive_avg_pool2d", columns=columns).stdout.split("\n\n")[0]
    assert max(map(len, lines.splitlines())) <= columns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "sofmax"), "--op sofmax: no such operation; did you mean softmax? (see"),
        (("--op", "argmax"), "--op argmax: has no derivative to check"),
        (("mlp", "--op", "relu"), "--op is for operations"),
        (("mlp", "--order", "2"), "--order 2 is for operations"),
        (("--order", "5"), "Invalid value for '--order'"),
        (("nosuch",), "nosuch: neither a file nor a packaged config"),
    ],
)
def test_usage_error_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = gradcheck(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"adtrain: error: {message}")
    assert result.stderr.count("\n") == 1
