"""A failure on a GPU ends a run with one line and an exit code, and the files that it has written stay.

Each run is a process of its own, as a process cannot use its GPU after a fault.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_parity import gpu
from training_runs import TEXT, write_config, write_data
from waiting import PATIENCE, wait_until

from adtrain.training import model_file

__all__ = ["gpu"]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

MAIN = "from adtrain.cli.main import main; main()"

FAULT = """
import numpy as np
from adtrain import ops
from adtrain.core.array import array
from adtrain.training import Recorder

write = Recorder.checkpoint

def write_and_break(self, checkpoint, best):
    write(self, checkpoint, best)
    x = array(np.ones(1000, np.float32), device="gpu")
    x.buffer.address = 1 << 60  # nobody's
    ops.exp(x)

Recorder.checkpoint = write_and_break
"""

TAKE_ALL_BUT = """
import pycuda.driver as cuda
from adtrain.core.backend import backend

backend("gpu")
free, _ = cuda.mem_get_info()
taken = cuda.mem_alloc(max(free - ({free} << 20), 1))
"""

OUT_OF_MEMORY = re.compile(
    r"adtrain: error: .*out of memory.*needs ([\d,.]+) MiB.*?([\d,.]+) MiB free.*batch_size ([\d,]+) fits"
)
WRITTEN = ["best.safetensors", "config.yaml", "last.safetensors", "metrics.jsonl", "model.safetensors"]


def train(cfg: Path, *options: str, before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", before + MAIN, "train", str(cfg), "--device", "gpu", *options]
    command += ["--output-dir", str(cfg.parent / "run")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def error_line(process: subprocess.Popen[str]) -> str:
    """The last line on stderr of a run that failed as it should; the others are about epochs."""
    out, err = process.communicate(timeout=PATIENCE)
    *others, last = err.splitlines()
    assert (process.returncode, out) == (2, ""), err
    assert [line for line in others if not line.startswith("epoch ")] == []
    return last


def check_kept(folder: Path) -> None:
    """The files that a run has after an epoch, each whole."""
    assert sorted(path.name for path in folder.iterdir()) == WRITTEN
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    model_file.load(folder)


def wide(folder: Path, batch_size: int, width: int, images: int) -> Path:
    """A config whose step takes about 8 * batch_size * width bytes."""
    cfg = write_config(
        folder, TEXT.replace("linear: 16", f"linear: {width}").replace("size: 16", f"size: {batch_size}")
    )
    write_data(folder / "data", train=images)
    return cfg


def numbers(line: str) -> tuple[float, float, int]:
    """MiB that the step needs, MiB that are free, and the batch size that fits."""
    found = OUT_OF_MEMORY.search(line)
    assert found, line
    needed, free, fits = (x.replace(",", "") for x in found.groups())
    return float(needed), float(free), int(fits)


def test_a_kernel_that_faults_ends_the_run_in_one_line(tmp_path: Path) -> None:
    line = error_line(train(write_config(tmp_path), "--epochs", "100", before=FAULT))
    assert re.match(r"adtrain: error: device gpu: .*(illegal|fault)", line), line
    check_kept(tmp_path / "run")


def test_a_step_that_does_not_fit_names_a_batch_size_that_does(tmp_path: Path) -> None:
    """Of a GPU of 24, 40, 48, 80, 141 or 180 GB, at most 70% fits: the rest is for tests that run beside this one."""
    cfg = wide(tmp_path, batch_size=800_000, width=1 << 16, images=800_000)
    needed, free, fits = numbers(error_line(train(cfg)))
    assert needed > free > 1000
    assert 0 < fits < 800_000
    assert not (tmp_path / "run" / "model.safetensors").exists()
    smaller = train(wide(tmp_path / "smaller", fits, 1 << 16, fits + 1), "--steps", "1")
    _, err = smaller.communicate(timeout=PATIENCE)
    assert smaller.returncode == 0, err


def test_a_step_ends_in_one_line_if_others_have_allocated_its_memory(tmp_path: Path) -> None:
    """Tests that run beside this one take and free less than the gigabytes between what is left and what is needed."""
    cfg = wide(tmp_path, batch_size=400_000, width=1 << 14, images=400_000)
    needed, free, fits = numbers(error_line(train(cfg, before=TAKE_ALL_BUT.format(free=8 << 10))))
    assert needed > 40_000
    assert free < needed / 2
    assert 0 < fits < 400_000


def test_an_interrupt_keeps_the_folder_whole(tmp_path: Path) -> None:
    process = train(write_config(tmp_path), "--epochs", "1000000")
    wait_until((tmp_path / "run" / "best.safetensors").exists, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, ""), err
    assert err.endswith(f"continue with: adtrain train --resume {tmp_path / 'run'}\n")
    assert "Traceback" not in err
    check_kept(tmp_path / "run")
