"""Training by several processes, over TCP and over MPI: the same bytes as one process, and faults.

The tests that need several networks use ranks as threads, which start at once: see test_train_ranks.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent

import pytest
from command_line import invoke
from training_runs import TEXT, write_config
from waiting import PATIENCE, wait_until

from adtrain import training as training_package
from adtrain.config import load
from adtrain.distributed.launch import start
from adtrain.training import RunFolder, checkpoint
from adtrain.training.run_folder import run_in_folder

pytestmark = pytest.mark.compiled
LONG = ["--set", "training.epochs=1000000", "--set", "training.checkpoint_every=20"]
BIN = Path(sys.executable).parent


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "adtrain", "train", *map(str, arguments), "--device", "cpu"]


def run(*arguments: object, launcher: Sequence[object] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, launcher), *command(*arguments)], capture_output=True, text=True)


def ranks_of(folder: Path) -> dict[int, int]:
    """The process ids of the ranks that train into the folder, by rank."""
    found = {}
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and str(folder).encode() in (process / "cmdline").read_bytes():
                variables = dict(x.split(b"=", 1) for x in (process / "environ").read_bytes().split(b"\0") if b"=" in x)
                for name in {b"RANK", b"PMI_RANK"} & variables.keys():
                    found[int(variables[name])] = int(process.name)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Without a short last batch, whose step is another Program to compile."""
    return write_config(tmp_path, TEXT.replace("batch_size: 16", "batch_size: 18"))


@pytest.fixture
def training(config: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A training of two ranks into tmp_path / "run" that would not end, after its first checkpoint.

    The parameter is its timeout. Without one, a rank may be late for any time.
    """
    folder, timeout = tmp_path / "run", getattr(request, "param", 2 * PATIENCE)
    process = subprocess.Popen(
        command(config, "--ranks", 2, "--output-dir", folder, "--timeout", timeout, *LONG, "-q"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until((folder / "last.safetensors").exists, process)
    yield process
    process.kill()
    process.communicate()
    for pid in ranks_of(folder).values():
        os.kill(pid, signal.SIGKILL)


def ended(process: subprocess.Popen[str], folder: Path) -> tuple[int, list[str]]:
    """The exit code and the lines of standard error, after a check that all processes have ended."""
    _, errors = process.communicate(timeout=PATIENCE)
    assert ranks_of(folder) == {}
    return process.returncode, errors.splitlines()


def trained_here(config: Path, folder: Path, *settings: str) -> bytes:
    """model.safetensors of one rank, trained in this process."""
    experiment = training_package.prepare(load(config, settings))
    run_in_folder(RunFolder.create(experiment, folder), experiment)
    return (folder / "model.safetensors").read_bytes()


def test_two_ranks_write_the_bytes_of_one_and_rank_0_alone_prints(config: Path, tmp_path: Path) -> None:
    settings = ["data.validation=0.2", "training.clip_norm=0.5"]
    options = [option for setting in settings for option in ("--set", setting)]
    two = run(config, *options, "--ranks", 2, "--output-dir", tmp_path / "2", "-q")
    assert (two.returncode, two.stdout, two.stderr) == (0, f"{tmp_path / '2'}\n", "")
    expected = trained_here(config, tmp_path / "one", *settings, "data.shards=2")
    assert (tmp_path / "2" / "model.safetensors").read_bytes() == expected
    for name in ("last.safetensors", "best.safetensors", "config.yaml"):
        assert (tmp_path / "2" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        pytest.param([BIN / "mpiexec", "-n", 2], 2, marks=pytest.mark.needs_mpi),
        pytest.param(
            [BIN / "torchrun", "--nproc-per-node", 2, "--no-python"],
            2,
            marks=[pytest.mark.needs_torch, pytest.mark.exhaustive],
        ),
    ],
)
def test_ranks_of_other_launchers_write_the_same_bytes(
    config: Path, tmp_path: Path, launcher: list[object], ranks: int
) -> None:
    done = run(config, "--output-dir", tmp_path / "run", "-q", launcher=launcher)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'run'}\n")
    expected = trained_here(config, tmp_path / "one", f"data.shards={ranks}")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == expected


def test_a_killed_rank_ends_all_and_one_rank_continues(
    training: subprocess.Popen[str], config: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    os.kill(ranks_of(folder)[1], signal.SIGKILL)
    code, errors = ended(training, folder)
    assert code == 1
    assert errors == [f"adtrain: error: rank 1 on {os.uname().nodename} died; all ranks end"]
    step = checkpoint.read(folder / "last.safetensors").progress.step
    resumed = invoke(
        "train", "--resume", folder, "-q", "--steps", step + 3, "--set", "data.shards=2", "--device", "cpu"
    )
    assert (resumed.exit_code, resumed.stderr) == (0, "")
    assert checkpoint.read(folder / "last.safetensors").progress.step == step + 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("training", [3], indirect=True)
def test_a_stopped_rank_ends_all_after_the_timeout(training: subprocess.Popen[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    os.kill(ranks_of(folder)[1], signal.SIGSTOP)
    code, errors = ended(training, folder)
    assert code == 1
    assert errors == [f"adtrain: error: rank 1 on {os.uname().nodename} has not answered for 3 s; all ranks end"]


@pytest.mark.parametrize(
    ("number", "to_rank"), [(signal.SIGINT, None), pytest.param(signal.SIGTERM, 1, marks=pytest.mark.exhaustive)]
)
def test_a_signal_to_the_launcher_or_to_a_rank_ends_all_with_a_checkpoint(
    training: subprocess.Popen[str], tmp_path: Path, number: signal.Signals, to_rank: int | None
) -> None:
    folder = tmp_path / "run"
    os.kill(training.pid if to_rank is None else ranks_of(folder)[to_rank], number)
    code, errors = ended(training, folder)
    assert code == 128 + number
    assert errors[-1].startswith("stopped at step ")
    assert errors[-1].endswith(f"continue with: adtrain train --resume {folder}")


PROGRAM = """
import os, sys
if os.environ["RANK"] == "{rank}":
{change}
sys.argv[0] = "adtrain"
from adtrain.__main__ import main
main()
"""
FULL_DISK = """
import resource, signal
from adtrain.training.run_folder import RunFolder
write = RunFolder.write_checkpoint
def limited(self, *arguments):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    write(self, *arguments)
RunFolder.write_checkpoint = limited
"""
BROKEN = """
from adtrain.training.loop import StepLoop
def broken(self):
    raise ValueError("broken on purpose")
StepLoop.row = property(broken)
"""


def run_changed(change: str, rank: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Two ranks without a launcher that watches them, one of which runs the Python lines `change` first."""
    program = PROGRAM.format(rank=rank, change=indent(change, "    "))
    started = [sys.executable, "-c", program, *command(*arguments)[3:]]
    ranks = start(2, started, {}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    printed = [rank.communicate() for rank in ranks]
    code = next((x.returncode for x in ranks if x.returncode), 0)
    return subprocess.CompletedProcess(started, code, *map("".join, zip(*printed, strict=True)))


@pytest.mark.exhaustive
def test_the_rank_with_the_watchdog_that_is_stopped_ends_all_after_the_timeout(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = command(config, "--output-dir", folder, "--timeout", 3, *LONG, "-q")
    first, second = start(2, arguments, {}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until((folder / "last.safetensors").exists, first)
    first.send_signal(signal.SIGSTOP)
    errors = "".join(rank.communicate()[1] for rank in (first, second))
    assert errors == f"adtrain: error: rank 0 on {os.uname().nodename} has not answered for 3 s; all ranks end\n"
    assert (first.returncode, second.returncode) == (-signal.SIGKILL, 1)


SIGNALLED = """
import signal, adtrain.training
adtrain.training.prepare = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.exhaustive
def test_a_signal_to_one_rank_before_the_training_ends_all(config: Path, tmp_path: Path) -> None:
    done = run_changed(SIGNALLED, 1, config, "--output-dir", tmp_path / "run", "-q")
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr == f"adtrain: error: rank 1 on {os.uname().nodename}: interrupted\n"


@pytest.fixture
def waiting(config: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A rank under mpiexec that waits for another one, which never starts MPI. The parameter is its timeout."""
    rank = [*command(config, "--output-dir", tmp_path / "run", "--timeout", request.param), "-q"]
    process = subprocess.Popen(
        [BIN / "mpiexec", "-n", "1", *rank, ":", "-n", "1", "sleep", str(PATIENCE)], stderr=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.needs_mpi
@pytest.mark.parametrize("waiting", [1], indirect=True)
def test_a_rank_that_never_starts_ends_all_after_the_timeout(waiting: subprocess.Popen[str], tmp_path: Path) -> None:
    code, errors = ended(waiting, tmp_path / "run")
    assert code != 0
    line = f"adtrain: error: rank 0 on {os.uname().nodename} waited 1 s for the start of other ranks; all ranks end"
    assert line in errors


@pytest.mark.needs_mpi
@pytest.mark.parametrize("waiting", [PATIENCE], indirect=True)
def test_a_signal_ends_a_rank_that_waits_for_mpi(waiting: subprocess.Popen[str], tmp_path: Path) -> None:
    def maps_mpi() -> list[int]:
        """The ranks that have loaded MPI, which they do last before they wait."""
        return [pid for pid in ranks_of(tmp_path / "run").values() if "libmpi" in Path(f"/proc/{pid}/maps").read_text()]

    wait_until(maps_mpi, waiting)
    os.kill(maps_mpi()[0], signal.SIGTERM)
    code, errors = ended(waiting, tmp_path / "run")
    assert code != 0
    assert "Traceback" not in "\n".join(errors)


@pytest.mark.exhaustive
def test_a_full_disk_at_rank_0_ends_all(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    layers = ["--set", "model.layers=[linear: 300, linear: 3]"]
    done = run_changed(FULL_DISK, 0, config, "--output-dir", folder, *layers, "-q")
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    written = folder / "last.safetensors"
    assert line.startswith(f"adtrain: error: {written}: cannot be written (File too large); it needs ")
    assert line.endswith("; the run has no checkpoint: train again")
    assert ranks_of(folder) == {}
    assert not (folder / "last.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sys.argv += ['--set', 'optimizer.adam.lr=0.5']", "has another config than rank 0: found 'lr: 0.5', expected"),
        ("import adtrain; adtrain.__version__ = '0.0'", "has another version of adtrain than rank 0"),
        ("sys.argv += ['--set', 'data.path=/nowhere']", "rank 1: /nowhere: "),
    ],
)
@pytest.mark.exhaustive
def test_a_rank_that_differs_from_rank_0_is_refused(config: Path, tmp_path: Path, change: str, message: str) -> None:
    done = run_changed(change, 1, config, "--output-dir", tmp_path / "run", "-q")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_an_exception_in_one_rank_ends_all_and_is_shown(config: Path, tmp_path: Path) -> None:
    done = run_changed(BROKEN, 1, config, "--output-dir", tmp_path / "run", "-q")
    assert done.returncode not in (0, 2)
    (shown,) = done.stderr.splitlines()
    assert shown.startswith(
        f"adtrain: error: rank 1 on {os.uname().nodename}: internal error: ValueError: broken on purpose"
    )


@pytest.mark.exhaustive
def test_an_error_of_all_ranks_is_printed_once(config: Path, tmp_path: Path) -> None:
    done = run(config, "--ranks", 2, "--output-dir", tmp_path / "run", "-q", "--set", "optimizer={sgd: {lr: 1.0e+30}}")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("adtrain: error: the loss is nan at step 2")
