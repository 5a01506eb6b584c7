"""`adtrain train --seeds` and `adtrain sweep`: each option has an effect, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import Result
from command_line import command
from report_runs import one_line, summary
from training_runs import write_config

from adtrain.cli.main import accept_debug
from adtrain.cli.sweep import command as sweep_command
from adtrain.cli.train import command as train_command

pytestmark = pytest.mark.unfused

SWEEP = "\nsweep: {training.seed: {range: 2}, optimizer.adam.lr: [0.01, 0.03]}\n"
COMMANDS: dict[str, click.Command] = {"train": train_command, "sweep": sweep_command}


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugin.py").write_text("raise ValueError('run')\n")
    (tmp_path / "sweep.yaml").write_text(write_config(tmp_path).read_text() + SWEEP)
    return tmp_path / "tiny.yaml"


def members(path: str = "runs/tiny-sweep") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(path, "results.json").read_text())["members"]
    return found


def best_config() -> str:
    return Path(f"runs/tiny-sweep/members/{members()[0]['member']}/config.yaml").read_text()


Effect = tuple[list[str], int, Callable[[Result], bool]]
"""Arguments, the exit code, and whether the effect of the option is there."""

BOTH: dict[str, Effect] = {
    "config_path": ([], 0, lambda result: len(members()) > 1),
    "device": (["--device", "gpu"], 2, lambda result: "gpu" in result.stderr),
    "autotune": (["--autotune", "full"], 2, lambda result: "only a GPU has kernels to choose from" in result.stderr),
    "output_dir": (["--output-dir", "here"], 0, lambda result: len(members("here")) > 1),
    "overrides": (["--set", "optimizer.adam.eps=0.001"], 0, lambda result: "eps: 0.001" in best_config()),
    "plugins": (["--plugin", "plugin.py"], 2, lambda result: "plugin.py" in result.stderr),
    "dry_run": (["--dry-run"], 0, lambda result: "sweep   " in result.stdout and not Path("runs").exists()),
    "quiet": (["-q"], 0, lambda result: (result.stdout, result.stderr) == ("runs/tiny-sweep\n", "")),
    "as_json": (["--json"], 0, lambda result: json.loads(result.stdout)["sweep"] == "runs/tiny-sweep"),
    "debug": (["--set", "data.path=no", "--debug"], 2, lambda result: "Traceback" in result.stderr),
}
SEEDS: dict[str, Effect] = {
    **BOTH,
    "seeds": ([], 0, lambda result: sorted(x["values"]["training.seed"] for x in members()) == [0, 1]),
    "seed": (["--seed", "4"], 0, lambda result: sorted(x["values"]["training.seed"] for x in members()) == [4, 5]),
    "epochs": (["--epochs", "2", "--steps", "9"], 0, lambda result: [x["epochs"] for x in members()] == [2, 2]),
    "steps": (["--steps", "2"], 0, lambda result: "steps: 2" in best_config()),
}
NEW: dict[str, Effect] = {
    **BOTH,
    "halving": (["--halving", "--set", "training.steps=9"], 0, lambda result: members()[-1]["status"] == "dropped"),
    "rank_by": (["--by", "test_accuracy"], 0, lambda result: members()[0]["value"] == members()[0]["test"]["accuracy"]),
    "at_once": (["--at-once", "3"], 0, lambda result: "4 members in 2 waves of 2" in result.stderr),
}
USES: dict[str, tuple[list[str], dict[str, Effect]]] = {
    "train": (["tiny.yaml", "--seeds", "2"], SEEDS),
    "sweep": (["sweep.yaml"], NEW),
}


ONE_OF_BOTH = {option: list(USES)[i % len(USES)] for i, option in enumerate(BOTH)}
"""Of options with the same effect for both commands, the command that is run."""


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name, use in USES.items() for option in use[1] if ONE_OF_BOTH.get(option, name) == name],
)
def test_an_option_that_is_taken_has_its_effect(cfg: Path, name: str, option: str) -> None:
    given, effects = USES[name]
    options, code, has_effect = effects[option]
    device = [] if option == "device" else ["--device", "cpu"]
    result = command(name, *given, *device, "--set", "training.steps=1", *options, expect=code)
    assert has_effect(result), result.output


TRAINING = {"device", "ranks", "autotune", "epochs", "steps", "max_time", "seed", "overrides", "plugins"} | {
    "profile", "events", "eager", "no_fuse", "plot", "quiet", "verbose", "as_json", "debug"
}  # fmt: skip
CHANGES = {"plugins", "copies", "override"}


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        *((name, given, set(effects)) for name, (given, effects) in USES.items()),
        ("train", ["tiny.yaml"], {*TRAINING, "config_path", "seeds", "run", "output_dir", "dry_run"}),
        ("train", ["--resume", "r"], {*TRAINING, *CHANGES, "run"}),
        (
            "sweep",
            ["--resume", "s"],
            {*BOTH, *CHANGES, "at_once", "sweep"} - {"config_path", "overrides", "output_dir"},
        ),
    ],
)
def test_an_option_without_an_effect_is_refused(cfg: Path, name: str, given: list[str], taken: set[str]) -> None:
    accept_debug(COMMANDS[name])
    parameters = {x for x in COMMANDS[name].params if x.name not in taken}
    assert {x.name for x in COMMANDS[name].params} >= taken
    assert parameters
    for parameter in parameters:
        option = [parameter.opts[-1]] if isinstance(parameter, click.Option) else []
        is_flag = getattr(parameter, "is_flag", False)
        value = [] if is_flag else ["training.epochs=1" if parameter.multiple else "2"]
        error = one_line(command(name, *given, *option, *value, expect=2))
        shown = option[0] if option else "CONFIG"
        if parameter.name in ("run", "sweep") and not given[0].startswith("--"):
            shown = "CONFIG"  # --resume takes none
        texts = f"takes no {shown} ", f"{shown} is for --resume", f"{shown} is for several processes"
        assert any(text in error for text in texts), error
    assert not Path("runs").exists()


def test_the_mean_and_the_deviation_over_the_seeds_are_those_of_the_members(cfg: Path) -> None:
    found = json.loads(command("train", cfg, "--seeds", "3", "--epochs", "1", "--device", "cpu", "--json").stdout)
    for field in ("accuracy", "loss"):
        values = [member["test"][field] for member in found["members"]]
        assert found["mean"][field] == pytest.approx(np.mean(values))
        assert found["deviation"][field] == pytest.approx(np.std(values, ddof=1))


def test_a_member_of_several_seeds_agrees_with_a_training_from_its_seed(cfg: Path) -> None:
    command("train", cfg, "--device", "cpu", "--seeds", "2", "--seed", "4", "-q")
    command("train", cfg, "--device", "cpu", "--seed", "5", "--output-dir", "alone", "-q")
    together = next(x["test"] for x in members() if x["values"]["training.seed"] == 5)
    np.testing.assert_allclose(list(together.values()), list(summary(Path("alone"))["test"].values()), rtol=1e-4)


def test_a_seed_that_is_too_large_is_refused_before_anything_is_trained(cfg: Path) -> None:
    error = one_line(command("train", cfg, "--seeds", "2", "--seed", str(2**64 - 1), expect=2))
    assert "training.seed: found 18446744073709551616" in error
    assert not Path("runs").exists()
