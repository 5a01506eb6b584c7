"""Faults around a training: nobody reads its messages, its compiler dies, its files are pipes, memory is short."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from command_line import invoke
from forked_commands import CLOSED, Case, Commands
from hypothesis import given
from hypothesis import strategies as st
from training_runs import write_config
from waiting import PATIENCE, wait_until

from adtrain import config
from adtrain.core.errors import AdtrainError
from adtrain.files import write_atomic
from adtrain.sweeps.folder import SweepFolder
from adtrain.sweeps.records import SweepOptions
from adtrain.text import short
from adtrain.training import tensor_file

COMMAND = [sys.executable, "-c", "from adtrain.cli.main import main; main()"]
LONG = ["train", "tiny.yaml", "--epochs", "1000000", "--output-dir", "run"]


@pytest.fixture(autouse=True)
def in_folder_of_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run = folder / "run"
    options = ["--eager", "--steps", "2", "--output-dir", str(run)]
    assert invoke("train", str(write_config(folder)), *options).exit_code == 0
    return run


def metrics() -> str:
    path = Path("run/metrics.jsonl")
    return path.read_text() if path.exists() else ""


def last_line() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(metrics().splitlines()[-1])
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_writes_its_checkpoint_although_the_messages_are_not_read(commands: Commands, number: int) -> None:
    pid = commands.start(Case(" ".join(LONG), CLOSED, CLOSED))
    wait_until(lambda: '"epoch"' in metrics(), commands)
    os.kill(pid, number)
    assert commands.wait() == 128 + number
    assert last_line()["kind"] == "stopped"
    assert Path("run/last.safetensors").exists()


def test_hangups_stay_ignored_where_the_caller_ignores_them(commands: Commands) -> None:
    pid = commands.start(Case(" ".join(LONG), before="signal.signal(signal.SIGHUP, signal.SIG_IGN)"))
    wait_until(lambda: '"epoch"' in metrics(), commands)
    os.kill(pid, signal.SIGHUP)
    os.kill(pid, signal.SIGTERM)
    assert commands.wait() == 143


@pytest.mark.parametrize("streams", [pytest.param("2>/dev/full", marks=pytest.mark.exhaustive), "<&- >&- 2>&-"])
def test_a_training_ends_well_without_streams_to_write_to(streams: str) -> None:
    arguments = "train tiny.yaml --epochs 1 --output-dir run"
    shell = ["/bin/sh", "-c", f'"$@" {arguments} {streams}', "sh", *COMMAND]
    assert subprocess.run(shell, stdout=subprocess.DEVNULL).returncode == 0
    assert last_line()["kind"] == "test"


@pytest.mark.exhaustive
@pytest.mark.compiled
def test_a_stop_of_the_whole_group_lets_the_compiler_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it NumPy would take the first steps, whose results have other bytes than those of compiled code."""
    compiler = Path("cc").absolute()
    mark = Path("compiling").absolute()
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *program.c*) touch {mark}; sleep 1;; esac\nexec gcc "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").absolute()))
    with subprocess.Popen([*COMMAND, *LONG], stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_until(mark.exists, process)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "running on NumPy" not in err
    assert "continue with: adtrain train --resume run" in err


@pytest.mark.compiled
def test_a_killed_compiler_ends_the_run_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Path("cc").absolute()
    compiler.write_text('#!/bin/sh\ncase "$*" in *program.c*) kill -9 $$;; esac\nexec gcc "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").absolute()))
    done = subprocess.run([*COMMAND, *LONG], capture_output=True, text=True)
    assert done.returncode == 2
    assert "ended by SIGKILL; is there enough memory? Run it again" in done.stderr.splitlines()[-1]


def has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.exhaustive
@pytest.mark.compiled
def test_a_second_signal_ends_a_compiler_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, mark = Path("cc").absolute(), Path("compiling").absolute()
    endless = f"echo $$ > {mark}.new; mv {mark}.new {mark}; exec sleep {2 * PATIENCE:.0f}"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *program.c*) {endless};; esac\nexec gcc "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").absolute()))
    with subprocess.Popen([*COMMAND, *LONG], stderr=subprocess.PIPE) as process:
        wait_until(mark.exists, process)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert b"a second signal ends at once" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 143
    wait_until(lambda: not has_processes(int(mark.read_text())))


@pytest.mark.parametrize(
    ("arguments", "pipe", "message"),
    [
        ("train pipe", "pipe", "pipe: cannot be read: it is not a regular file"),
        ("report run", "run/metrics.jsonl", "run/metrics.jsonl: cannot be read (it is not a regular file)"),
        ("report run", "run/summary.json", "run/summary.json: cannot be read (it is not a regular file)"),
        ("eval run", "run/model.safetensors", "run: found no model.safetensors"),
        (
            "train --resume run --steps 9 --epochs 9 --eager --quiet",
            "run/best.safetensors",
            "run/best.safetensors: cannot be written (it is a pipe that no process reads)",
        ),
        ("export run p.safetensors", "p.safetensors", "p.safetensors: cannot be written (it is a pipe that no process"),
        ("data inspect data.csv", "data.csv", "data.csv: found"),
        ("data inspect data.npz", "data.npz", "data.npz: found"),
    ],
)
def test_a_pipe_in_place_of_a_file_is_refused(finished_run: Path, arguments: str, pipe: str, message: str) -> None:
    shutil.copytree(finished_run, "run")
    Path(pipe).unlink(missing_ok=True)
    os.mkfifo(pipe)
    signal.alarm(int(PATIENCE))  # ends the process, should the command wait at the pipe
    done = invoke(*arguments.split())
    signal.alarm(0)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert message in line


def test_a_pipe_that_a_process_reads_is_written_to(finished_run: Path) -> None:
    shutil.copytree(finished_run, "run")
    os.mkfifo("pipe.safetensors")
    reader = os.open("pipe.safetensors", os.O_RDONLY | os.O_NONBLOCK)
    done = invoke("export", "run", "pipe.safetensors")
    assert done.exit_code == 0, done.stderr
    assert len(os.read(reader, 1 << 16)) > 1000
    os.close(reader)


def test_a_broken_link_named_runs_is_refused() -> None:
    Path("runs").symlink_to("nowhere/at/all")
    done = invoke("train", "mlp-small")
    assert done.exit_code == 2
    assert done.stderr == "adtrain: error: runs: found a file or a broken link, expected a folder\n"


def test_a_broken_link_named_runs_is_refused_for_a_sweep() -> None:
    Path("runs").symlink_to("nowhere/at/all")
    signal.alarm(int(PATIENCE))  # ends the process, should `create` try one folder after another
    with pytest.raises(AdtrainError, match=r"^runs: found a file or a broken link"):
        SweepFolder.create(config.load("mlp-small"), SweepOptions((), "train_loss"), None, {})
    signal.alarm(0)


@pytest.mark.parametrize("name", ["config.yaml", "last.safetensors", "model.safetensors", "summary.json"])
def test_a_full_disk_is_one_line_that_says_how_much_is_needed_and_what_to_do(
    name: str, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["tiny.yaml", "--eager", "--steps", "2", "--output-dir", "run"]
    replace, sizes = os.replace, list[int]()

    def full(source: Path, target: Path) -> None:
        if Path(target).name == name:
            sizes.append(Path(source).stat().st_size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        result = invoke("train", *options)
    assert result.exit_code == 2
    line = result.stderr.splitlines()[-1]
    reason = f"run/{name}: cannot be written (No space left on device); it needs {short(sizes[0], 'B')}"
    advice = {"config.yaml": "", "last.safetensors": "; the run has no checkpoint: train again"}
    assert line == f"adtrain: error: {reason}{advice.get(name, '; continue with: adtrain train --resume run')}"
    assert Path("run").exists() == (name != "config.yaml")
    if name not in advice:
        assert invoke("train", "--resume", "run").exit_code == 0
        expected, found = (
            safetensors.numpy.load_file(run / "model.safetensors") for run in (finished_run, Path("run"))
        )
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[key], expected[key]) for key in expected)


def test_atomic_writes_follow_links_and_keep_the_mode() -> None:
    file, link = Path("file"), Path("link")
    file.write_bytes(b"old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_atomic(link, b"new")
    assert link.is_symlink()
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o640)


def test_devices_are_written_to_and_not_replaced() -> None:
    write_atomic("/dev/null", b"text")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(AdtrainError, match="cannot be written"):
        write_atomic("/dev/full", b"text")
    assert Path("/dev/full").is_char_device()
    loop = Path("loop")
    loop.symlink_to(loop)
    with pytest.raises(AdtrainError, match="loop: cannot be written"):
        write_atomic(loop, b"text")


arrays = st.builds(
    lambda dtype, shape: np.arange(np.prod(shape, dtype=int), dtype=np.uint8).reshape(shape).astype(dtype),
    st.sampled_from(sorted(tensor_file.NAMES)),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
characters = st.characters(exclude_categories=["Cs"])


@given(st.dictionaries(st.text(characters, max_size=8), arrays, max_size=6), st.text(characters))
def test_model_files_have_the_bytes_of_the_safetensors_library(tensors: dict[str, np.ndarray], about: str) -> None:
    tensors.pop("__metadata__", None)
    expected = safetensors.numpy.save(tensors, {tensor_file.METADATA_KEY: json.dumps({"about": about})})
    assert tensor_file.encode(tensors, {"about": about}) == expected


def test_a_model_file_that_does_not_fit_into_memory_is_an_error_of_python() -> None:
    import resource

    x = np.zeros(1 << 28, np.uint8)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 26), limits[1]))
    try:
        with pytest.raises(MemoryError):
            tensor_file.encode({"x": x}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
