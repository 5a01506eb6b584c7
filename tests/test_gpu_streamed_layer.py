"""Members of a sweep whose first layer is streamed, on the GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from npz_files import parts, write_npz
from sweep_runs import SGD, bytes_of
from test_gpu_sweep import trained

from adtrain import config
from adtrain.core import tree
from adtrain.sweeps.members import groups_of, members_of

pytestmark = pytest.mark.gpu

ADAM = "optimizer={adam: {lr: 0.001, eps: 1.0e-3}}"
"""With a small eps, Adam divides gradients near zero by their own size. Then rounding alone changes weights by 1e-4: on
the CPU, weights of such a network in float32 and in float64 differ as much."""


@pytest.mark.parametrize(
    ("layers", "batch", "optimizer", "order"),
    [
        ("[{linear: 512}, relu, {linear: 256}, relu, {linear: 10}]", 64, SGD, "own"),
        ("[{linear: 512}, tanh, {linear: 96}, relu, {linear: 10}]", 48, ADAM, "shared"),
        ("[{linear: 528}, layer_norm, relu, {linear: 10}]", 32, SGD, "own"),
    ],
    ids=["sgd", "adam", "units_in_blocks_of_16"],
)
def test_the_bytes_of_a_member_do_not_depend_on_the_others_and_agree_with_the_cpu(
    tmp_path: Path, layers: str, batch: int, optimizer: str, order: str
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (720, 28, 28)).astype(np.uint8)
    path = write_npz(tmp_path / "images.npz", parts(images))
    settings = [
        f"data={{path: {path}, batch_size: {batch}}}",
        f"model={{input: [784], layers: {layers}}}",
        optimizer,
        "training.epochs=1",
        f"sweep={{order: {order}, training.seed: {{range: 20}}}}",
    ]
    cfg = config.load("mlp-small", settings)
    (group,) = groups_of(cfg, members_of(cfg))
    members = list(group.members)
    alone = trained(group, [members[7]])
    for chosen in (members, members[5:9], [*members, *members * 9]):
        assert bytes_of(trained(group, chosen), 7) == bytes_of(alone, 7)
    expected = trained(group, [members[7]], "cpu")
    for x, y in zip(tree.leaves(alone.state), tree.leaves(expected.state), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-3, atol=1e-4)
