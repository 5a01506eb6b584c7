"""Training on tokens on a GPU: streamed from files as in memory, with the scores of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_parity import gpu
from test_train_tokens import write_tokens

from adtrain import config, training
from adtrain.core import tree
from adtrain.training import examples
from adtrain.training.examples import Resident, Streamed

__all__ = ["gpu"]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("order", ["in_order", "random_offsets"])
def test_tokens_streamed_to_a_gpu_train_as_those_in_its_memory(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    cfg = config.load(write_tokens(tmp_path), [f"data.order={order}"])
    experiment = training.prepare(cfg)
    assert isinstance(training.on_device(experiment.test, "gpu"), Resident)
    whole = training.run(experiment, "gpu")
    on_cpu = training.run(training.prepare(cfg), "cpu")
    monkeypatch.setattr(examples, "_copy_limit", lambda device: 0)
    again = training.prepare(cfg)
    assert isinstance(training.on_device(again.test, "gpu"), Streamed)
    streamed = training.run(again, "gpu")
    assert streamed.test == whole.test
    for x, y in zip(tree.leaves(streamed.state), tree.leaves(whole.state), strict=True):
        assert x.numpy().tobytes() == y.numpy().tobytes()
    assert whole.test._asdict() == pytest.approx(on_cpu.test._asdict(), rel=1e-3)
