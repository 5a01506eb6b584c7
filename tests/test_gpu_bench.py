"""`adtrain bench` on a GPU: kernels, launches, clocks and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import training_runs
from gpu_parity import gpu

from adtrain.bench import ops, sampling
from adtrain.bench.explain import find
from adtrain.bench.explain.measure import Measured, observe
from adtrain.bench.machine import Roofline, protocol
from adtrain.bench.op_table import BENCHES
from adtrain.bench.profile import held_bytes
from adtrain.bench.step import bench_modes, record

__all__ = ["gpu"]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

PEAK = Roofline(1.0, {"float32": 1.0})


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_SAMPLES", sampling.MIN_SAMPLES)


@pytest.mark.parametrize("op", ["matmul", "gelu", "sum", "softmax"])
def test_rows_name_kernels_and_launch_shapes(op: str) -> None:
    each = next(each for each in BENCHES if each.op == op)
    for row in ops.rows(each, 512, PEAK, device="gpu"):
        assert row.kernels
        for kernel in row.kernels:
            assert kernel.launch.keys() == {"grid", "block", "shared_bytes"}
            assert ".cu" in kernel.name


def test_every_fused_operation_names_its_kernels(tmp_path: Path) -> None:
    modes = bench_modes(training_runs.prepare(tmp_path), "gpu")
    assert list(modes) == ["eager", "staged", "fused"]
    assert all(row.kernels for row in record(modes["fused"], PEAK, "float32").ops)


def test_memory_and_clocks_are_known(tmp_path: Path) -> None:
    held: Any = held_bytes(training_runs.prepare(tmp_path), "gpu")
    assert held > 0
    about = protocol("gpu", None)
    assert (about.clock_mhz or 0) > 0
    assert (about.memory_clock_mhz or 0) > 0
    assert "events" in about.clock["operations"]


def test_a_step_is_explained_with_the_blocks_of_its_kernels(tmp_path: Path) -> None:
    measured = Measured(lambda more: training_runs.load(tmp_path, *more), "gpu")
    found = observe(measured, PEAK, 0.0)
    assert found.blocks
    assert all(x.blocks for x in found.operations)
    assert sum(found.bounds().values()) == pytest.approx(1.0)
    assert "few threads" not in [x.cause for x in find(found)]
