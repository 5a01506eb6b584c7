"""Members of a sweep on the GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sweep_runs import SGD, bytes_of, groups

from adtrain.core import tree
from adtrain.sweeps.members import Group, Member
from adtrain.sweeps.wave import Programs, WaveState, WaveTraining

pytestmark = pytest.mark.gpu
LAYERS = "[linear: 40, relu, dropout: 0.1, linear: 3]"
RATES = "optimizer.sgd.lr: [0.1, 0.03, 0.2, 1.0e+30], training.seed: {range: 5}"


def trained(group: Group, members: list[Member], device: str = "gpu") -> WaveState:
    wave = WaveTraining(group, members, Programs(group), device)
    for _ in range(group.experiment.epochs):
        assert wave.epoch(lambda: False, lambda count: None) is not None
    return wave.host_state()


@pytest.mark.parametrize("order", ["own", "shared"])
def test_the_bytes_of_a_member_do_not_depend_on_the_others(tmp_path: Path, order: str) -> None:
    (group,) = groups(tmp_path, f"{{order: {order}, {RATES}}}", SGD, "training.epochs=2", layers=LAYERS)
    members = list(group.members)
    expected = bytes_of(trained(group, [members[7]]), 7)
    for chosen in ([members[i] for i in (9, 7, 2)], members, members[::-1], [*members, *members * 9][:199]):
        assert bytes_of(trained(group, chosen), 7) == expected


def test_members_agree_with_those_on_the_cpu(tmp_path: Path) -> None:
    rates = "{optimizer.sgd.lr: [0.01, 0.03], training.seed: {range: 3}}"
    (group,) = groups(tmp_path, rates, SGD, "training.epochs=1", layers=LAYERS)
    found, expected = (trained(group, list(group.members), device) for device in ("gpu", "cpu"))
    for x, y in zip(tree.leaves(found.state), tree.leaves(expected.state), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-3, atol=1e-5)
