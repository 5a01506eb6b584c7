"""Programs on the GPU: recorded steps compute the bits of steps whose kernels are launched one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gpu_parity import gpu

from adtrain import config, training
from adtrain.core import tree

__all__ = ["gpu"]

pytestmark = pytest.mark.gpu


def weights_after(steps: int) -> list[bytes]:
    experiment = training.prepare(config.load("smoke", [f"training.steps={steps}"]))
    return [x.numpy().tobytes() for x in tree.leaves(training.run(experiment, "gpu").state)]


def test_twenty_recorded_steps_are_twenty_launched_steps(gpu: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from adtrain.backends.cuda.graph import Graphs

    recordings = []
    record = Graphs._record

    def counted(self: Graphs, work: Callable[[], None]) -> object:
        recordings.append(work)
        return record(self, work)

    monkeypatch.setattr(Graphs, "_record", counted)
    recorded = weights_after(20)
    assert recordings
    monkeypatch.setattr(Graphs, "run", lambda self, addresses, work: work())
    assert weights_after(20) == recorded
