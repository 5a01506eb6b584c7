"""Training on several GPUs through NCCL: the same bytes as one GPU with the same shards, and faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_rank_processes import ranks_of
from waiting import PATIENCE, wait_until

from adtrain.distributed.launch import end, start

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
TWO_GPUS = pytest.mark.skipif(
    find_spec("nccl") is None or len(list(Path("/dev").glob("nvidia[0-9]"))) < 2,
    reason="needs two GPUs, and nccl4py: pip install '.[multi-gpu]'",
)
EXCHANGES = """
import numpy as np
from adtrain.backends.cuda.runtime.exchanges import CopyEngines, Exchanges, connected
from adtrain.core import communicator
from adtrain.core.backend import backend
from adtrain.core.types import ArrayType
from adtrain.distributed.agreement import joined

with joined(60, print, lambda error: (str(error), 2)):
    ranks, gpu = communicator.current(), backend("gpu")
    peers = connected(gpu.device)
    exchanges, copies = Exchanges(gpu.device, [peers]), CopyEngines(peers)
    memory = gpu.device.reserve(ranks.size * 5_000_000)
    copies.map(memory, ranks.size * 5_000_000)
    random = np.random.default_rng(ranks.rank)
    for size in (1, 16, 70_000, 5_000_000):
        for name, expected, shape in (
            ("all_gather", communicator.all_gathered, (size,)),
            ("all_to_all", communicator.all_exchanged, (ranks.size, size)),
        ) * 5:
            x = random.integers(0, 256, shape, np.uint8)
            received_type = ArrayType((ranks.size, size), np.dtype(np.uint8))
            sent, received = gpu.from_numpy(x), gpu.empty(received_type)
            gpu.synchronize()
            exchanges.transport(name, size).enqueue(name, sent.address, received.address, size, exchanges.side)
            exchanges.side.synchronize()
            np.testing.assert_array_equal(gpu.to_numpy(received), expected(x))

            received = gpu.empty(received_type)
            gpu.device.copy(sent.address, int(memory), x.nbytes)
            gpu.synchronize()
            copies.enqueue(name, int(memory), received.address, size, exchanges.side)
            exchanges.side.synchronize()
            np.testing.assert_array_equal(gpu.to_numpy(received), expected(x))
"""
TRAINING = """
import runpy
from functools import cached_property
from adtrain.backends.cuda.backend import CudaBackend
from adtrain.backends.cuda.runtime.exchanges import CopyEngines, Exchanges

# NCCL refuses two ranks on one GPU.
found = cached_property(lambda self: Exchanges(self.device, [self.peers], CopyEngines(self.peers)))
found.__set_name__(CudaBackend, "exchanges")
CudaBackend.exchanges = found
runpy.run_module("adtrain", run_name="__main__")
"""
SETTINGS = ["--set", "data.shards=2", "--steps", "30"]
CLIPPED = ("training.clip_norm=0.5",)
UNEVEN = ("data.batch_size=7001",)
"""The last batch of an epoch has fewer images, and shards differ in size."""
WIDE = ("model.layers=[{linear: 1500}, relu, {linear: 1500}, relu, {linear: 10}]",)
"""Buckets of 9 and 5 MB. Copy engines exchange the larger one."""
DEEP = ("model.layers=[{linear: 1500}, relu, {linear: 1500}, relu, {linear: 1500}, relu, {linear: 10}]",)
"""Three buckets: an all-to-all begins before the update of the bucket before it."""
PLAIN = ("optimizer={sgd: {lr: 0.1}}",)
"""Ranks exchange whole gradients."""
MOMENTUM = "optimizer={sgd: {lr: 0.1, momentum: 0.9, weight_decay: 0.001}}"


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
    assert digest(config, tmp_path / "a", "--set", *CLIPPED) == digest(config, tmp_path / "b", "--set", *CLIPPED)


def on_one_gpu(script: str, *arguments: str) -> list[int]:
    """The exit codes of two ranks that share the first GPU, which runs their kernels in turns."""
    environment = {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1"}
    processes = start(2, [sys.executable, "-c", script, *arguments], environment)
    for process in processes:
        process.wait(100)
    return end(processes)


def test_exchanges_through_peer_memory_move_the_bytes() -> None:
    assert on_one_gpu(EXCHANGES) == [0, 0]


@pytest.mark.parametrize(
    "settings",
    [[], ["--set", *PLAIN], ["--set", *CLIPPED], ["--set", *WIDE], ["--set", *DEEP]],
    ids=["fused", "whole", "clipped", "copy-engines", "three-buckets"],
)
def test_two_ranks_that_exchange_through_peer_memory_give_the_bytes_of_one(tmp_path: Path, settings: list[str]) -> None:
    expected = digest("mlp", tmp_path / "one", *settings)
    folder = tmp_path / "two"
    assert on_one_gpu(TRAINING, *command("mlp", folder, *settings)[3:]) == [0, 0]
    assert sha256((folder / "model.safetensors").read_bytes()).hexdigest() == expected


@TWO_GPUS
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        pytest.param("mlp", CLIPPED, id="mlp-clipped"),
        pytest.param("mlp", UNEVEN, id="mlp-adam"),
        pytest.param("mlp", (*UNEVEN, MOMENTUM), id="mlp-momentum"),
        pytest.param("mlp", PLAIN, id="mlp-whole"),
        pytest.param("mlp", WIDE, id="mlp-copy-engines"),
        pytest.param("mlp", DEEP, id="mlp-three-buckets"),
        pytest.param("cnn", (), id="cnn"),
        pytest.param("lenet5-augmented", (), id="lenet5-augmented"),
    ],
)
def test_two_gpus_give_the_bytes_of_one_three_times(tmp_path: Path, config: str, settings: tuple[str, ...]) -> None:
    """With exchanges alone and, without clipping, fused with the update."""
    chosen = [x for setting in settings for x in ("--set", setting)]
    expected = digest(config, tmp_path / "one", *chosen)
    assert [digest(config, tmp_path / str(i), "--ranks", "2", *chosen) for i in range(3)] == [expected] * 3


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
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert f"rank 1 on {os.uname().nodename} {message}" in errors
    assert ranks_of(folder) == {}
