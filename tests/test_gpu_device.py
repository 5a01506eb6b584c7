"""A GPU serves the main thread only, other threads may drop its memory, and a process may end with arrays on it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gpu_parity import gpu

import adtrain as ad
from adtrain import ops
from adtrain.core.errors import DeviceError

__all__ = ["gpu"]

pytestmark = pytest.mark.gpu

TRAINING = """
from adtrain import config, training
experiment = training.prepare(config.load("smoke"), device="gpu")
run = training.continuation(experiment, experiment.initial_state("cpu"), "gpu")
state = run(3)
"""


def test_memory_that_another_thread_drops_is_freed_at_the_next_reservation(gpu: Any) -> None:
    size = 1 << 20
    held = [gpu.device.reserve(size)]
    before = gpu.device.reserved
    with ThreadPoolExecutor(1) as other:
        other.submit(held.clear).result()
    assert gpu.device.reserved == before
    gpu.device.reserve(1)
    assert gpu.device.reserved == before - size


def test_arrays_that_another_thread_drops_do_no_harm(gpu: Any) -> None:
    held = [ad.array([1.0, 2.0], device="gpu") for _ in range(3)]
    with ThreadPoolExecutor(1) as other:
        other.submit(held.clear).result()
    assert float(ops.sum(ad.array([1.0, 2.0], device="gpu"))) == 3


def test_another_thread_is_told_that_the_main_thread_uses_the_gpu(gpu: Any) -> None:
    x = ad.array([1.0, 2.0], device="gpu")
    with ThreadPoolExecutor(1, "other") as other, pytest.raises(DeviceError, match="found the thread 'other_0'"):
        other.submit(ops.exp, x).result()


def test_a_process_may_end_while_its_variables_hold_a_training() -> None:
    ended = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
