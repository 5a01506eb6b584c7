"""Training on several GPUs through NCCL: the same bytes as one GPU with the same shards, and faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from time import monotonic

import pytest
from test_rank_processes import ranks_of
from waiting import wait_until

pytestmark = pytest.mark.gpu
TWO_GPUS = pytest.mark.skipif(
    find_spec("nccl") is None or len(list(Path("/dev").glob("nvidia[0-9]"))) < 2,
    reason="needs two GPUs, and nccl4py: pip install '.[multi-gpu]'",
)
SETTINGS = ["--set", "data.shards=2", "--steps", "30", "--set", "training.clip_norm=0.5", "--profile-steps", "0"]


def command(config: str, folder: Path, *arguments: str) -> list[str]:
    start = [sys.executable, "-m", "adtrain", "train", config, "--device", "gpu", "--output-dir", str(folder), "-q"]
    return [*start, *SETTINGS, *arguments]


def digest(config: str, folder: Path, *arguments: str) -> str:
    """The digest of the trained model."""
    done = subprocess.run(command(config, folder, *arguments), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("config", ["mlp", "lenet5-augmented"])
def test_one_gpu_trains_several_shards_with_the_same_bytes_twice(tmp_path: Path, config: str) -> None:
    assert digest(config, tmp_path / "a") == digest(config, tmp_path / "b")


@TWO_GPUS
@pytest.mark.parametrize("config", ["mlp", "cnn", "lenet5-augmented"])
def test_two_gpus_give_the_bytes_of_one_three_times(tmp_path: Path, config: str) -> None:
    expected = digest(config, tmp_path / "one")
    assert [digest(config, tmp_path / str(i), "--ranks", "2") for i in range(3)] == [expected] * 3


@TWO_GPUS
@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "has not answered for 4 s")]
)
def test_a_rank_that_is_killed_or_stopped_ends_all(tmp_path: Path, number: signal.Signals, message: str) -> None:
    folder = tmp_path / "run"
    more = ["--ranks", "2", "--timeout", "4", "--steps", "10000000", "--epochs", "100000"]
    process = subprocess.Popen(
        command("mlp", folder, *more, "--set", "training.checkpoint_every=500"), stderr=subprocess.PIPE, text=True
    )
    wait_until((folder / "last.safetensors").exists, process)
    os.kill(ranks_of(folder)[1], number)
    started = monotonic()
    _, errors = process.communicate()
    assert monotonic() - started < 14
    assert process.returncode == 1
    assert f"rank 1 on {os.uname().nodename} {message}" in errors
    assert ranks_of(folder) == {}
