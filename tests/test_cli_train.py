from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from command_line import invoke
from forked_commands import Case, Commands
from hypothesis import given
from hypothesis import strategies as st
from training_runs import write_config
from waiting import PATIENCE, wait_until

from adtrain import config, training
from adtrain.cli.train_run import HEIGHT, MAX_ROWS, operation_lines, peak_of, plot_lines, result_lines
from adtrain.config.files import load_data
from adtrain.report import Record, pages
from adtrain.training import ClassScore, Summary, read_metrics
from adtrain.training.progress import Stopped
from adtrain.training.summary import BestEpoch, Memory, OperationTime, StepTimes, operations_text

pytestmark = pytest.mark.unfused

SCRIPT = "from adtrain.cli.main import main; main()"


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a config, in the current folder of the test."""
    monkeypatch.chdir(tmp_path)
    return write_config(tmp_path)


def train(*arguments: str | Path, expect: int = 0) -> Result:
    result = invoke("train", *map(str, arguments), "--device", "cpu")
    assert result.exit_code == expect, result.stderr
    return result


def summary_of(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def started(commands: Commands, before: str = "") -> int:
    """Start a process that trains and does not end, and wait until its first epoch is over. Returns its id."""
    pid = commands.start(Case("train tiny.yaml --device cpu --epochs 1000000", "out", "err", before))
    wait_until(Path("runs/tiny/best.safetensors").exists, commands)
    return pid


SCORE = {"loss": float, "accuracy": float}
TYPES: dict[str, Any] = {
    "config": dict,
    "device": str,
    "device_name": str,
    "precision": str,
    "seed": int,
    "parameters": int,
    "ended": str,
    "best": {"by": str, "value": float, "epoch": int},
    "model_epoch": int,
    "epochs": int,
    "steps": int,
    "batch_size": int,
    "train_seconds": float,
    "total_seconds": float,
    "spans": list,
    "images_per_second": float,
    "step_ms": {"median": float, "p20": float, "p80": float},
    "memory": {"planned_bytes": int, "held_bytes": type(None)},
    "train": SCORE,
    "validation": SCORE,
    "test": SCORE,
    "metrics": dict,
    "ops": list,
    "ops_sum_ms": float,
    "ops_to_step_ratio": float,
    "versions": {"adtrain": str, "python": str, "numpy": str},
    "profiled_step_ms": float,
    "majority_accuracy": float,
    "flops_per_second": float,
    "coefficients": type(None),
}
OP_TYPES = {
    "op": str,
    "scope": str,
    "phase": str,
    "calls": int,
    "ms": float,
    "share": float,
    "flops": int,
    "bytes": int,
}
RATES = {"gflops_per_s", "gbytes_per_s"}


def check(value: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(value) == list(expected)
        for key, inner in expected.items():
            check(value[key], inner)
    else:
        assert type(value) is expected


FILES = ["config.yaml", "metrics.jsonl", "model.safetensors", "last.safetensors", "best.safetensors", "summary.json"]


def test_a_run_writes_its_files_and_prints_a_report(cfg: Path) -> None:
    result = train(cfg)
    assert sorted(path.name for path in Path("runs/tiny").iterdir()) == sorted(FILES)
    *_, folder, score, following = lines = result.stdout.splitlines()
    assert (len(lines), folder, following) == (6, "run     runs/tiny", "next    adtrain report runs/tiny")
    assert score.startswith("test    loss ")
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]


def test_the_summary_has_the_promised_fields(cfg: Path) -> None:
    found = summary_of(train(cfg, "--json", "--profile", "--set", "data.validation=0.2"))
    assert found == json.loads(Path("runs/tiny/summary.json").read_text())
    assert found.pop("peak_flops_per_second") == peak_of(config.load(cfg), "cpu")
    check(found, TYPES)
    for row in found["ops"]:
        assert set(row) == set(OP_TYPES) | RATES
        check({key: row[key] for key in OP_TYPES}, OP_TYPES)
    assert sum(row["share"] for row in found["ops"]) == pytest.approx(1)
    assert sum(row["ms"] for row in found["ops"]) == pytest.approx(found["ops_sum_ms"])
    matmuls = [row for row in found["ops"] if row["op"].startswith("matmul")]
    assert sum(row["calls"] for row in matmuls if row["phase"] == "backward") == 3
    assert (found["parameters"], found["steps"], found["epochs"]) == (36 * 16 + 16 + 16 * 3 + 3, 15, 3)
    assert found["step_ms"]["p20"] <= found["step_ms"]["median"] <= found["step_ms"]["p80"]
    assert found["total_seconds"] >= found["train_seconds"] > 0
    assert found["images_per_second"] == pytest.approx(3 * 72 / found["train_seconds"])


def test_operations_are_timed_and_printed_on_request(cfg: Path) -> None:
    lines = train(cfg, "--profile", "--output-dir", "profiled").stdout.splitlines()
    assert lines[0] == "operations of one step, by time"
    assert lines[-2].startswith("test    loss ")
    found = summary_of(train(cfg, "--json"))
    assert [found[field] for field in ("ops", "ops_sum_ms", "ops_to_step_ratio")] == [[], None, None]
    assert found["validation"] is None
    assert "operations" not in train(cfg).stdout


def test_profiling_does_not_change_the_result(cfg: Path) -> None:
    train(cfg, "--output-dir", "with", "--profile")
    train(cfg, "--output-dir", "without")
    for name in ("config.yaml", "model.safetensors"):
        assert (Path("with") / name).read_bytes() == (Path("without") / name).read_bytes()


def test_options_override_the_config_and_set(cfg: Path) -> None:
    found = summary_of(
        train(cfg, "--json", "--epochs", "2", "--steps", "9", "--seed", "5", "--set", "training.epochs=7",
              "--set", "data.batch_size=9")
    )  # fmt: skip
    assert (found["epochs"], found["steps"], found["seed"], found["batch_size"]) == (1, 9, 5, 9)
    assert found["config"]["training"]["epochs"] == 2
    resolved = config.load("runs/tiny/config.yaml")
    assert (resolved.training.epochs, resolved.training.steps, resolved.training.seed) == (2, 9, 5)


def test_the_resolved_config_trains_again_to_the_same_model_from_any_folder(
    cfg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(cfg, "--set", "data.path=data", "--set", "schedule=cosine", "--output-dir", "first")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    train("../first/config.yaml", "--output-dir", "second")
    for name in ("config.yaml", "model.safetensors"):
        assert Path("../first", name).read_bytes() == Path("second", name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output-dir", "taken"], "taken: already holds a run (config.yaml); give another output folder, or remove"),
        (["--output-dir", "tiny.yaml"], "tiny.yaml: found a file, expected a folder or nothing"),
        (["--output-dir", "tiny.yaml/x"], "tiny.yaml/x: cannot be written (Not a directory)"),
        (
            ["--set", "model.layers=[linear: 2]"],
            "--set model.layers: model.layers[0]: found 2 outputs, expected at least 3",
        ),
        (
            ["--set", "data.path=nowhere"],
            "nowhere: found nothing, expected a .csv, .tsv, .npz, .txt, .zip, .tar, ",
        ),
        (["--set", "optimizer.adam.lr=.nan"], "--set optimizer.adam.lr: found"),
        (["--set", "nonsense"], "--set nonsense: found no key=value, expected one such as"),
        (["--epochs", "0"], "Invalid value for '--epochs': found '0', expected a whole number of at least 1 (see"),
        (["--seed", "x"], "Invalid value for '--seed': found 'x', expected a whole number from 0 to 184467440737"),
        (["--autotune", "on"], "Invalid value for '--autotune': found 'on', expected off, cached or full (see"),
        (
            ["--ranks", "2", "--profile"],
            "--profile times the operations of one process, and takes no --ranks,",
        ),
        (["--dry-run", "--profile"], "--dry-run trains nothing, and takes no --profile"),
        (["--dry-run", "--verbose"], "--dry-run trains nothing, and takes no --verbose"),
        (["--eager", "--no-fuse"], "--eager has no kernels to fuse, and takes no --no-fuse"),
        (["--timeout", "5"], "--timeout is for several processes: --ranks, torchrun, mpiexec or srun"),
        (["--seeds", "2", "--profile"], "--seeds trains a sweep, and takes no --profile"),
    ],
)
def test_bad_input_is_a_one_line_error_and_writes_nothing(cfg: Path, arguments: list[str], message: str) -> None:
    Path("taken").mkdir()
    Path("taken/config.yaml").write_text("mine")
    before = sorted(Path().rglob("*"))
    result = train(cfg, *arguments, expect=2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("adtrain: error: ")
    assert message in line
    assert sorted(Path().rglob("*")) == before
    assert Path("taken/config.yaml").read_text() == "mine"


@pytest.mark.parametrize("name", ["missing.yaml", "empty.yaml", "list.yaml", "broken.yaml", "tab.yaml"])
def test_an_invalid_config_file_is_refused(cfg: Path, name: str) -> None:
    contents = {"empty.yaml": "", "list.yaml": "- 1", "broken.yaml": "a: [", "tab.yaml": "a:\n\tb: 1"}
    if name in contents:
        Path(name).write_text(contents[name])
    result = train(name, expect=2)
    assert result.stderr.startswith(f"adtrain: error: {name}")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "data.path=nowhere.csv"], "nowhere.csv: found nothing, expected a CSV file; --set data.path=FILE"),
        (["--set", "training.epochs=0"], "--set training.epochs: found 0, expected an integer in [1, 2^31)"),
        (["--set", "model.layers.0.linear=0"], "model.layers[0].linear.out_features: found 0, expected an integer"),
    ],
)
def test_a_mistake_is_reported_before_what_trains_is_imported(
    cfg: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "adtrain.cli.train_run", None)
    monkeypatch.delattr("adtrain.cli.train_run", raising=False)
    result = invoke("train", str(cfg), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[0]


def test_a_loss_that_is_not_finite_ends_the_command(cfg: Path) -> None:
    result = train(cfg, "--set", "optimizer={sgd: {lr: 1.0e+30}}", expect=2)
    start = "adtrain: error: the loss is nan at step 2 (epoch 1), first the result of matmul in 2.linear, from "
    assert result.stderr.startswith(start)
    assert result.stderr.endswith(
        "training stopped: lower the optimizer's lr, or set training.clip_norm; "
        "the state before that step is in runs/tiny/last.safetensors\n"
    )
    names = sorted(path.name for path in Path("runs/tiny").iterdir())
    assert names == ["config.yaml", "last.safetensors", "metrics.jsonl", "model.safetensors"]


def test_a_signal_after_the_last_test_batch_is_not_lost(cfg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = training.run_in_folder

    def run(*arguments: Any) -> Any:
        result = original(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(training, "run_in_folder", run)
    result = train(cfg, expect=143)
    assert "stopped before the summary; continue with: adtrain train --resume runs/tiny" in result.stderr
    assert not Path("runs/tiny/summary.json").exists()
    monkeypatch.setattr(training, "run_in_folder", original)
    train("--resume", "runs/tiny")
    assert Path("runs/tiny/summary.json").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.exhaustive)]
)
def test_a_signal_ends_the_run_after_a_step_and_prints_how_to_resume(
    cfg: Path, commands: Commands, number: int, code: int
) -> None:
    os.kill(started(commands), number)
    assert (commands.wait(), Path("out").read_text()) == (code, "")
    *lines, last = Path("err").read_text().splitlines()
    note = "adtrain: stopping after the current steps; a second signal ends at once"
    assert lines.count(note) == 1  # the current steps may end an epoch
    expected = (note, "no C compiler")  # the second one where there is none
    assert {line.split()[0] for line in lines if not any(x in line for x in expected)} == {"epoch"}
    assert re.fullmatch(r"stopped at step \d+ \(epoch \d+\); continue with: adtrain train --resume runs/tiny", last)
    assert sorted(path.name for path in Path("runs/tiny").iterdir()) == sorted(FILES[:-1])
    step, epoch = map(int, re.findall(r"\d+", last)[:2])
    assert read_metrics(Path("runs/tiny"))[-1] == Stopped("interrupted", epoch, step)
    resumed = train("--resume", "runs/tiny", "--epochs", str(epoch))
    assert resumed.stdout.splitlines()[-2].startswith("test    loss ")


def test_a_run_that_is_stopped_by_its_time_has_a_model_and_continues_to_the_same_bytes(cfg: Path) -> None:
    train(cfg, "-o", "whole")
    stopped = train(cfg, "--max-time", "0.001", expect=124)  # in the first epoch
    advice = r"stopped at step \d \(epoch 1\); continue with: adtrain train --resume runs/tiny\n"
    assert re.fullmatch(advice, stopped.stderr)
    assert "accuracy" in invoke("eval", "runs/tiny", "--device", "cpu").stdout
    train("--resume", "runs/tiny", "--max-time", "1e9")
    assert Path("runs/tiny/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "found neither CONFIG nor --resume RUN"),
        (["tiny.yaml", "--override"], "--override is for --resume RUN only"),
        (["--resume", "x"], "x: found nothing, expected a run's folder or a checkpoint"),
    ],
)
def test_invalid_arguments_of_a_resumption_are_a_one_line_error(cfg: Path, arguments: list[str], message: str) -> None:
    (line,) = train(*arguments, expect=2).stderr.splitlines()
    assert line.startswith(f"adtrain: error: {message}")


def test_a_finished_run_resumes_only_for_more_epochs(cfg: Path) -> None:
    train(cfg)
    result = train("--resume", "runs/tiny", expect=2)
    assert result.stderr == "adtrain: error: runs/tiny is finished: 3 epochs; train longer with --epochs N\n"
    result = train("--resume", "runs/tiny", "--epochs", "2", expect=2)
    assert "last.safetensors: found 18 steps, expected at most the config's 12; give a larger" in result.stderr
    found = train("--resume", "runs/tiny", "--epochs", "4", "--json")
    assert found.stderr.splitlines()[0] == "training.epochs: 3 -> 4"
    assert (summary_of(found)["epochs"], summary_of(found)["steps"]) == (4, 24)
    assert config.load("runs/tiny/config.yaml").training.epochs == 4


def test_epochs_that_the_configs_steps_cut_short_are_reported(cfg: Path) -> None:
    result = train(cfg, "--set", "training.steps=7", "--epochs", "4")
    note = "training.steps 7 ends the training in epoch 2 of 4; --steps N overrides it"
    assert result.stderr.splitlines()[0] == note


def test_resuming_a_run_killed_before_its_summary_writes_the_summary(cfg: Path) -> None:
    train(cfg)
    summary = Path("runs/tiny/summary.json")
    before = json.loads(summary.read_text())
    summary.unlink()
    assert "step    median" not in train("--resume", "runs/tiny", "-v").stdout
    after = json.loads(summary.read_text())
    assert [after[x] for x in ("test", "train", "steps", "best")] == [
        before[x] for x in ("test", "train", "steps", "best")
    ]
    assert (after["step_ms"], after["images_per_second"]) == (None, None)


def test_a_second_signal_ends_the_process_at_once_with_an_intact_checkpoint(cfg: Path, commands: Commands) -> None:
    slow = "from time import sleep; from adtrain.training import Recorder; Recorder.stopped = lambda *_: sleep(1e6)"
    pid = started(commands, slow)
    os.kill(pid, signal.SIGINT)
    wait_until(lambda: "stopping after" in Path("err").read_text(), commands)
    os.kill(pid, signal.SIGINT)
    assert commands.wait() == 130
    assert training.resume(Path("runs/tiny")).start.checkpoint.progress.step > 0


def test_a_terminal_shows_progress_bars(cfg: Path) -> None:
    pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))
    leader, follower = pty.openpty()
    fcntl.ioctl(
        follower, termios.TIOCSWINSZ, struct.pack("4H", 24, 60, 0, 0)
    )  # rows, columns, and two unused sizes in pixels
    command = [sys.executable, "-c", SCRIPT, "train", str(cfg), "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower) as process:
        os.close(follower)
        shown = b""
        try:
            while chunk := os.read(leader, 4096):
                shown += chunk
        except OSError:  # Linux reports a closed other end as an error
            pass
        os.close(leader)
    assert process.returncode == 0
    text = shown.decode()
    assert "epoch 1/3|" in text
    assert "img/s" in text
    assert " left" not in re.sub(r"about [\d,]+ s left", "", text)
    assert "epoch 3/3: loss" in text


def test_a_dry_run_shows_the_plan_and_writes_nothing(cfg: Path) -> None:
    before = sorted(Path().rglob("*"))
    shown = train(cfg, "--dry-run").stdout.splitlines()
    assert set(shown) > {"model   643 parameters, float32", "steps   18 of 16 images; epochs: 3", "folder  runs/tiny"}
    plan = json.loads(train(cfg, "--dry-run", "--json", "--epochs", "1").stdout)
    assert (plan["steps"], plan["data"]) == (6, {"train": 90, "validation": 0, "test": 30})
    assert sorted(Path().rglob("*")) == before
    train(cfg)
    assert plan["planned_bytes"] == json.loads(Path("runs/tiny/summary.json").read_text())["memory"]["planned_bytes"]
    assert train(cfg, "--dry-run").stdout.splitlines()[-1] == "folder  runs/tiny-2"
    assert "already holds a run" in train(cfg, "--dry-run", "--output-dir", "runs/tiny", expect=2).stderr


def test_quiet_prints_the_folder_only_and_verbose_more_than_usual(cfg: Path) -> None:
    quiet = train(cfg, "-q", "--device", "auto")
    assert (quiet.stdout, quiet.stderr) == ("runs/tiny\n", "")
    assert train(cfg, "-q", "--dry-run").stdout == ""
    assert json.loads(train(cfg, "-q", "--json").stdout)["epochs"] == 3
    verbose, usual = train(cfg, "-v"), train(cfg)
    assert re.search(r"^step \d+: loss .*, learning rate 0.01, ", verbose.stderr, re.MULTILINE)
    assert set(verbose.stderr.splitlines()) > {"folder  runs/tiny-3", "steps   18 of 16 images; epochs: 3"}
    assert "learning rate" not in usual.stderr
    assert f"run     runs/tiny-3: {', '.join(FILES)}\n" in re.sub(r"\n {8}", " ", verbose.stdout)
    assert "step    median" in verbose.stdout
    assert "found both --quiet and --verbose" in train(cfg, "-q", "-v", expect=2).stderr


def test_quiet_keeps_warnings(cfg: Path, commands: Commands) -> None:
    train = 'train tiny.yaml -q --device cpu --set model.layers=[{"linear":3},softmax]'
    assert commands.run(Case(train, "out", "err")) == 0
    assert Path("out").read_text() == "runs/tiny\n"
    (warning,) = Path("err").read_text().splitlines()
    assert warning.endswith("applies softmax itself: remove this layer")


def _summary(rows: int) -> Summary:
    score = ClassScore(0.1, 0.98)
    return Summary(
        config={}, device="cpu", device_name="A CPU", precision="float32", seed=0, parameters=1000, ended="finished",
        best=BestEpoch("train_loss", 0.1, 2), model_epoch=2, epochs=2, steps=100, batch_size=128, train_seconds=11.0,
        total_seconds=12.0, spans=(), images_per_second=5000.0, step_ms=StepTimes(4.0, 3.9, 4.1),
        memory=Memory(2**20, 2**21),
        train=score, validation=None, test=score, metrics={}, ops_sum_ms=30.0, ops_to_step_ratio=0.95, versions={},
        ops=tuple(
            OperationTime(
                op=f"operation_{i}_of_a_long_name", scope=f"{i}.residual.body.0.conv2d", phase="backward", calls=2,
                ms=1.0 + i, share=0.1, flops=0, bytes=10, gflops_per_s=None, gbytes_per_s=3.25,
            )
            for i in range(rows)
        ),
    )  # fmt: skip


def test_the_report_sorts_operations_by_time_and_summarises_the_rest() -> None:
    title, *table = operation_lines(_summary(MAX_ROWS + 5), 120)
    assert title == "operations of one step, by time"
    assert table[1].startswith(f"operation_{MAX_ROWS + 4}_of_a_long_name")
    assert len(table) == 1 + MAX_ROWS + 2
    assert table[-2].startswith("5 more rows")
    assert table[-2].split()[-2:] == ["15.000", "50.0%"]
    assert table[-1] == "sum 30.000 ms, 95.0% of a step of 31.579 ms"


def test_the_speed_of_a_training_has_the_share_of_the_peak_if_that_was_measured() -> None:
    summary, data = _summary(1), load_data({"path": "a.txt", "unit": "byte"})
    lines = result_lines(summary, 10, data)
    assert "time    12.0 s in all, 11.0 s training (640,000 bytes/s)" in lines
    measured = replace(summary, flops_per_second=2e9, peak_flops_per_second=8e9)
    assert "time    12.0 s in all, 11.0 s training (640,000 bytes/s, 25% of peak)" in result_lines(measured, 10, data)


@pytest.mark.parametrize(
    ("width", "headings"),
    [(120, "op scope phase calls ms share GFLOP/s GB/s"), (60, "op scope phase calls ms share")],
)
def test_the_report_fits_the_terminal(width: int, headings: str) -> None:
    _, *table = lines = operation_lines(_summary(20), width)
    assert table[0].split() == headings.split()
    assert max(map(len, lines)) <= width
    assert max(map(len, result_lines(_summary(20), 10_000, config.load("mlp").data, verbose=True))) <= 60


losses = st.lists(st.tuples(st.integers(0, 10**6), st.floats(allow_nan=True, width=32)), max_size=30)


@given(losses, losses, st.integers(20, 120))
def test_the_curve_of_the_loss_fits_the_terminal(training: Any, validation: Any, width: int) -> None:
    lines = plot_lines({"training": training, "validation": validation}, width)
    shown = {name for name, points in (("training", training), ("validation", validation)) if finite(points)}
    assert bool(lines) == bool(shown)
    if lines:
        assert len(lines) == HEIGHT + 3
        assert max(map(len, lines[:-1])) <= width
        assert {name for name in ("training", "validation") if name in lines[-1]} == shown


def finite(points: Any) -> bool:
    return any(abs(y) < float("inf") for _, y in points)


def test_the_curve_of_the_loss_falls_from_the_first_row_to_the_last() -> None:
    _, *rows, _, _ = plot_lines({"training": [(step, 3.0 - step) for step in range(HEIGHT)]}, 60)
    columns = [row.index(".", row.index("|")) for row in rows]
    assert columns == sorted(set(columns))
    assert rows[0].startswith(" 3 |")
    assert rows[-1].startswith("-8 |")


@pytest.mark.parametrize("option", ["--json", "--quiet"])
def test_a_plot_is_refused_where_nothing_is_shown(cfg: Path, option: str) -> None:
    result = train(cfg, "--plot", option, expect=2)
    assert result.stderr.startswith(f"adtrain: error: found both {option} and --plot")


@pytest.mark.parametrize(("share", "shown"), [(0.95, "base    accuracy 95.00%, of"), (0.5, ""), (None, "")])
def test_the_share_of_a_majority_stands_before_the_accuracy(share: float | None, shown: str) -> None:
    summary = replace(_summary(1), majority_accuracy=share)
    *_, before, last = result_lines(summary, 100, load_data({"path": "a.csv"}))
    assert last.startswith("test    ")
    assert before.startswith(shown or "time")
    content = pages.run_page(Record(Path("run"), config.load("smoke"), [], summary), "no model")
    assert (">95.00%<" in content) is ("most frequent class" in content) is bool(shown)


@pytest.mark.parametrize(
    ("step", "profiled", "reason"),
    [
        (31.0, 30.5, ""),
        (60.0, 60.0, "30.000 ms of a profiled step pass between its operations"),
        (20.0, 20.0, "a profiled step takes 20.000 ms as a whole, because its operations overlap"),
        (60.0, 30.0, "the profiled steps took 30.000 ms each: during the training other programs"),
        (60.0, None, ""),
    ],
)
def test_a_sum_of_operations_unlike_the_step_says_why(step: float, profiled: float | None, reason: str) -> None:
    found = replace(_summary(3), ops_sum_ms=30.0, ops_to_step_ratio=30 / step, profiled_step_ms=profiled)
    text, _, why = operations_text(found).partition("; ")
    assert text == f"sum 30.000 ms, {30 / step:.1%} of a step of {step:.3f} ms"
    assert why.startswith(reason)
    assert bool(why) == bool(reason)


def test_full_autotuning_is_refused_on_the_cpu(cfg: Path) -> None:
    result = train(cfg, "--autotune", "full", expect=2)
    assert result.stderr.startswith("adtrain: error: --autotune full: only a GPU has kernels to choose from")
    assert not Path("runs").exists()
    train(cfg, "--autotune", "off", "--steps", "1")


def test_an_error_of_the_device_does_not_wait_for_the_data(cfg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported, waited = threading.Event(), list[bool]()
    monkeypatch.setattr(training, "read_ahead", lambda cfg: waited.append(reported.wait(PATIENCE)))
    train(cfg, "--autotune", "full", expect=2)
    reported.set()
    wait_until(lambda: bool(waited))
    assert waited == [True]


def test_lines_of_the_result_fit_60_columns_and_break_between_words(cfg: Path) -> None:
    result = invoke("train", cfg, "--device", "cpu", "--verbose", columns=60)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert {word for line in lines for word in line.split()} >= {*(f"{name}," for name in FILES[:-1]), FILES[-1]}
