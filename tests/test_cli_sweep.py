from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import pytest
from browser import Browser, assert_fits
from command_line import command
from report_runs import Elements, one_line
from sweep_runs import after
from training_runs import TEXT, write_config

from adtrain import config
from adtrain.core import timeline
from adtrain.report.pages import is_logarithmic
from adtrain.sweeps import wave
from adtrain.sweeps.folder import SweepFolder
from adtrain.sweeps.session import SweepInterrupted, SweepRun, prepared

SWEEP = """
sweep:
  optimizer.adam.lr: [0.01, 0.03]
  training.seed: {range: 2}
  model.layers.0.linear: [16, 8]
"""


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_config(tmp_path, TEXT.rstrip() + SWEEP)


def test_a_sweep_prints_its_plan_and_its_ranking(cfg: Path) -> None:
    result = command("sweep", cfg, "--device", "cpu", "--set", "data.validation=0.2")
    lines = result.stderr.splitlines()
    assert lines[0] == "sweep   8 members in 2 groups, ranked by validation_accuracy"
    assert "group 1 4 members of 323 parameters (model.layers.0.linear 8), 15 steps" in lines[3]
    assert lines[4].startswith("time ")
    ranks = [line.split()[0] for line in result.stdout.splitlines() if line]
    assert ranks[1:9] == [str(i) for i in range(1, 9)]
    folder = Path("runs/tiny-sweep")
    found = json.loads((folder / "results.json").read_text())
    assert {"config.yaml", "model.safetensors", "summary.json"} <= set(
        os.listdir(folder / "members" / str(found["members"][0]["member"]))
    )
    again = json.loads(command("compare", folder, "--json").stdout)
    assert again["sweeps"][0]["best"] == found["members"][0]["value"]


def test_the_time_in_all_counts_from_the_start_of_the_process(cfg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_current", timeline.Timeline(perf_counter() - 1000))
    result = command("sweep", cfg, "--device", "cpu", "--set", "sweep={training.seed: {range: 2}}")
    (shown,) = re.findall(r"^time +([0-9,.]+) s in all", result.stdout, re.MULTILINE)
    assert float(shown.replace(",", "")) > 1000
    assert json.loads(Path("runs/tiny-sweep/results.json").read_text())["seconds"] > 1000


def test_a_sweep_in_which_all_members_fail_is_an_error_and_has_no_best_member(cfg: Path) -> None:
    settings = "--set", "sweep={training.seed: [0, 1]}", "--set", "optimizer={sgd: {lr: 1.0e+30}}"
    result = command("sweep", cfg, *settings, "--device", "cpu", "--output-dir", "s", expect=2)
    assert result.stderr.splitlines()[-1].startswith("adtrain: error: s: no member finished; lower the optimizer's lr")
    assert "members 2 failed" in result.stdout
    (row,) = json.loads(command("compare", "s", "--json").stdout)["sweeps"]
    assert (row["failed"], row["best"], row["member"], row["values"]) == (2, None, None, {})


@pytest.mark.parametrize("base", [2.0, 10.0])
def test_values_at_equal_ratios_are_on_a_logarithmic_axis(base: float) -> None:
    assert is_logarithmic([1e-4 * base**i for i in range(5)])
    assert not is_logarithmic([1.0 + base * i for i in range(5)])
    assert not is_logarithmic([-1.0, 0.0, *(base**i for i in range(5))])


def test_the_page_fits_and_has_one_legend(cfg: Path, browser: Browser) -> None:
    command("sweep", cfg, "--device", "cpu", "--output-dir", "s", "-q")
    command("report", "s", "--device", "cpu")
    assert Path("s/report.html").read_text().count(">lr 0.01, linear 16 <") == 1
    assert_fits(browser, Path("s/report.html"))


def test_the_page_has_all_members_and_links_to_the_report_of_the_best(cfg: Path) -> None:
    command("sweep", cfg, "--device", "cpu", "--output-dir", "s", "-q")
    command("report", "s", "--device", "cpu")
    page = Elements(Path("s/report.html").read_text())
    assert len(page.rows) == 9
    best = json.loads(Path("s/results.json").read_text())["members"][0]["member"]
    for arguments in (("summary", "s"), ("predict", "s", "x.png"), ("report", "s", "s", "-o", "several.html")):
        error = one_line(command(*arguments, expect=2))
        assert error == f"s: found a sweep, expected a run, such as that of a member: s/members/{best}"
    error = one_line(command("train", "--resume", "s", expect=2))
    assert "s: found a sweep, expected a run; adtrain sweep --resume s continues it" in error
    assert page.addresses == [f"members/{best}/report.html"]
    assert Path(f"s/members/{best}/report.html").exists()
    shutil.rmtree("s/members")
    assert "s: the sweep is finished" in one_line(command("sweep", "--resume", "s", expect=2))
    assert Path(f"s/members/{best}/summary.json").exists()  # a run that was not written is


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sweep",), "found neither CONFIG nor --resume SWEEP"),
        (("sweep", "CFG", "--set", "sweep=null"), "found no section sweep"),
        (
            ("sweep", "CFG", "--set", "sweep={model.layers.2.linear: [3, 2]}"),
            "model.layers[2]: found 2 outputs, expected at least 3",
        ),
        (("sweep", "CFG", "--by", "validation_accuracy"), "--by: found validation_accuracy, expected data.vali"),
        (("sweep", "CFG", "--by", "test_rmse"), "--by: found 'test_rmse', expected train_, validation_ or test_"),
        (("sweep", "--resume", "nothing"), "nothing: found nothing, expected the folder of a sweep"),
        (("sweep", "CFG", "--set", "data.shards=2"), "data.shards: found it in a sweep, expected none"),
        (("train", "CFG"), "found a sweep, expected none for one training"),
        (("train", "CFG", "--seeds", "2"), "found a sweep, expected none beside --seeds"),
        (("eval", "CFG", "--top", "2"), "--top is for a sweep"),
    ],
)
def test_wrong_use_is_one_line(cfg: Path, arguments: tuple[str, ...], message: str) -> None:
    given = [str(cfg) if x == "CFG" else x for x in arguments]
    assert message in one_line(command(*given, expect=2))
    assert not Path("runs").exists()


@pytest.mark.parametrize("arguments", [("sweep",), ("train", "--set", "sweep=null", "--seeds", "2")])
def test_a_folder_with_files_is_refused_before_data_are_read(cfg: Path, arguments: tuple[str, ...]) -> None:
    Path("used").mkdir()
    Path("used/notes.txt").write_text("mine")
    rest = "--set", "data.path=nowhere", "--device", "cpu", "--output-dir", "used"
    message = one_line(command(arguments[0], cfg, *arguments[1:], *rest, expect=2))
    assert "used: already exists and is not an empty folder; give another --output-dir" in message
    assert [x.name for x in Path("used").iterdir()] == ["notes.txt"]


def test_several_processes_are_refused(cfg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert "mpiexec started 2 processes, but a sweep runs in one" in one_line(command("sweep", str(cfg), expect=2))


KILLED = """\
import os, signal
from adtrain.cli.main import main
from adtrain.sweeps.folder import SweepFolder
from adtrain.training.progress import METRICS

append = SweepFolder.append_metrics

def append_or_die(self, line, durable):
    append(self, line, durable)
    if (self.path / METRICS).stat().st_size > 4_000:
        os.kill(os.getpid(), signal.SIGKILL)

SweepFolder.append_metrics = append_or_die
main()
"""
"""A command that kills itself in its sweep."""


@pytest.mark.exhaustive
@pytest.mark.compiled
def test_a_killed_sweep_resumes_with_the_same_bytes(cfg: Path) -> None:
    options = "--set", "training.epochs=60", "--device", "cpu"
    command("sweep", cfg, *options, "--output-dir", "whole", "-q")
    call = [sys.executable, "-c", KILLED, "sweep", str(cfg), *options, "--output-dir", "killed", "-q"]
    assert subprocess.run(call).returncode == -signal.SIGKILL
    command("sweep", "--resume", "killed", "--device", "cpu", "-q")
    for file in sorted(Path("whole/states").iterdir()):
        assert Path("killed/states", file.name).read_bytes() == file.read_bytes()
    results = [json.loads(Path(x, "results.json").read_text())["members"] for x in ("whole", "killed")]
    assert results[0] == results[1]


def test_a_sweep_on_changed_data_is_refused_without_override(cfg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wave, "REPORT_SECONDS", 0.0)
    session = prepared(config.load(cfg, ["data.batch_size=8"]), "cpu")
    folder = SweepFolder.create(session.config, session.options(False, None), Path("s"), session.digests)
    with pytest.raises(SweepInterrupted):
        SweepRun(session, folder, session.plans(), stop=after(2)).run()
    labels = cfg.parent / "data" / "t10k-labels-idx1-ubyte"
    content = labels.read_bytes()
    labels.write_bytes(content[:8] + content[8:][::-1])
    message = one_line(command("sweep", "--resume", "s", "--device", "cpu", expect=2))
    assert message == (
        "s: the sweep was trained on other data: the test labels of group 0 have changed; "
        "undo the changes, or accept them with --override"
    )
    labels.write_bytes(content)
    labels.write_bytes(content[:8] + content[8:][::-1])
    command("sweep", "--resume", "s", "--device", "cpu", "--override", "--dry-run")
    assert folder.changed_data(session.digests) == []
    shown = command("sweep", "--resume", "s", "--device", "cpu", "--override").stdout
    assert re.search(r"^time +[0-9,.]+ s since the resumption, [0-9,.]+ s training in all$", shown, re.MULTILINE)
    assert folder.changed_data(session.digests) != []
    assert folder.results() is not None
