from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import command
from hypothesis import given
from hypothesis import strategies as st
from report_runs import one_line, summary, train
from training_runs import write_config

from adtrain.config.records import differences

leaves = st.none() | st.booleans() | st.integers(0, 3)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists, and mappings without None: configs are dumped without it, and `differences` uses it for a missing key."""
    return st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner.filter(lambda x: x is not None))


values = st.recursive(leaves, containers, max_leaves=8)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three runs: `first`, `second` with another optimizer, and the unfinished `third`."""
    folder = tmp_path_factory.mktemp("runs")
    cfg = write_config(folder)
    train(cfg, folder / "first")
    train(cfg, folder / "second", "--set", "optimizer={sgd: {lr: 0.5}}", "--steps", "5")
    train(cfg, folder / "third", "--seed", "7")
    (folder / "third" / "summary.json").unlink()
    return folder


@pytest.fixture
def here(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(runs)
    return runs


def test_runs_are_listed_in_the_given_order(here: Path) -> None:
    lines = command("compare", "second", "first").stdout.splitlines()
    assert lines[0].split() == ["run", "accuracy", "loss", "training", "steps", "parameters", "device"]
    for line, name in zip(lines[1:3], ("second", "first"), strict=True):
        found = summary(Path(name))
        assert line.split()[:3] == [name, f"{found['test']['accuracy']:.2%}", f"{found['test']['loss']:.4f}"]
        assert f" {found['steps']} " in line


def test_differences_of_configs_are_listed_by_dotted_key(here: Path) -> None:
    found = json.loads(command("compare", "first", "second", "third", "--json").stdout)["differences"]
    assert list(found) == ["optimizer", "training.seed", "training.steps"]
    assert found["training.seed"] == [0, 0, 7]
    assert found["training.steps"] == [None, 5, None]
    assert [list(value) for value in found["optimizer"]] == [["adam"], ["sgd"], ["adam"]]
    table = command("compare", "first", "second").stdout.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table] == ["differs", "optimizer", "training.steps"]
    assert table[0].split()[1:] == ["first", "second"]
    assert re.search(r"  adam lr 0.01, .*  sgd lr 0.5, ", table[1])


def test_many_runs_have_a_row_each_in_the_matrix_of_differences(here: Path) -> None:
    table = command("compare", "first", "second", "third", "first").stdout.split("\n\n")[1].splitlines()
    assert table[0].split() == ["run", "optimizer", "seed", "steps"]
    assert [line.split()[0] for line in table[1:]] == ["first", "second", "third", "first"]
    assert table[2].split()[-2:] == ["0", "5"]
    assert table[3].split()[-1] == "7"


@pytest.mark.parametrize("metric", ["accuracy", "loss", "training"])
def test_runs_are_sorted_by_a_metric_with_the_best_first(here: Path, metric: str) -> None:
    shown = command("compare", "third", "second", "first", "--sort", metric, "--json").stdout
    found = [run for run in json.loads(shown)["runs"] if run["finished"]]
    values = [run["train_seconds"] if metric == "training" else run["test"][metric] for run in found]
    assert values == sorted(values, reverse=metric == "accuracy")
    assert json.loads(shown)["runs"][-1]["run"] == "third"
    assert "--sort accurcy: no run has it; did you mean accuracy?" in one_line(
        command("compare", "first", "--sort", "accurcy", expect=2)
    )


def test_an_unfinished_run_is_marked(here: Path) -> None:
    third = json.loads(command("compare", "third", "--json").stdout)["runs"][0]
    assert (third["finished"], third["test"], third["steps"]) == (False, None, 18)
    assert command("compare", "third").stdout.splitlines()[1].split() == ["third", "unfinished", "18"]


def test_equal_configs_have_no_differences(here: Path) -> None:
    assert command("compare", "first", "first").stdout.endswith("\n\nthe configs are equal\n")


def test_the_table_fits_a_narrow_terminal(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = command("compare", "first", "second", "third").stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].split()[:4] == ["run", "accuracy", "loss", "training"]
    hidden = lines[4]
    assert re.fullmatch(r"\d columns? hidden; COLUMNS=\d+ shows all", hidden)
    monkeypatch.setenv("COLUMNS", hidden.split("=")[1].split()[0])
    assert "hidden" not in command("compare", "first", "second", "third").stdout.split("\n\n")[0]


def test_a_path_without_a_run_is_a_one_line_error(here: Path) -> None:
    assert one_line(command("compare", "first", "data", expect=2)) == (
        "data: found no config.yaml, expected the folder of a run of adtrain train"
    )
    assert "Missing argument 'RUN...'" in one_line(command("compare", expect=2))


@given(values, values)
def test_differences_are_found_exactly_where_values_differ(a: Any, b: Any) -> None:
    found = differences([a, b])
    assert bool(found) == (a != b)
    assert all(len(pair) == 2 and pair[0] != pair[1] for pair in found.values())
