"""Members of a sweep on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from npz_files import parts, write_npz
from sweep_runs import SGD, bytes_of, groups, run
from training_runs import load

import adtrain as ad
from adtrain import config, ops, passes, training
from adtrain.core import tree
from adtrain.core.staging import stage
from adtrain.core.views import per_member
from adtrain.sweeps.members import Group, Member, groups_of, members_of
from adtrain.sweeps.session import prepared
from adtrain.sweeps.wave import WaveState, WaveTraining, run_to_end

pytestmark = pytest.mark.gpu
LAYERS = "[linear: 40, relu, dropout: 0.1, linear: 3]"
TAIL = "conv2d: {out_channels: 4, kernel_size: 2}, relu, flatten, linear: 3]"
RATES = "optimizer.sgd.lr: [0.1, 0.03, 0.2, 1.0e+30], training.seed: {range: 5}"


def trained(group: Group, members: list[Member], device: str = "gpu") -> WaveState:
    wave = WaveTraining(group, members, device)
    for _ in range(group.experiment.epochs):
        assert run_to_end(wave.epoch_in_parts(lambda: False)) is not None
    return wave.host_state()


@pytest.mark.parametrize("order", ["own", "shared"])
def test_the_bytes_of_a_member_do_not_depend_on_the_others(tmp_path: Path, order: str) -> None:
    (group,) = groups(tmp_path, f"{{order: {order}, {RATES}}}", SGD, "training.epochs=2", layers=LAYERS)
    members = list(group.members)
    expected = bytes_of(trained(group, [members[7]]), 7)
    for chosen in ([members[i] for i in (9, 7, 2)], members, members[::-1], [*members, *members * 49][:999]):
        assert bytes_of(trained(group, chosen), 7) == expected


def test_a_member_that_stops_early_ends_with_the_same_bytes_and_metrics_whatever_the_others_are(tmp_path: Path) -> None:
    stopping = "training.early_stopping={patience: 1}", "training.metrics=[f1]", "training.best_by=validation_f1"
    settings = SGD, "training.epochs=5", "data.validation=0.2", *stopping
    (group,) = groups(tmp_path, f"{{{RATES}}}", *settings, layers=LAYERS)
    ends = []
    for members in ([group.members[7]], list(group.members)):
        wave = WaveTraining(group, members, "gpu")
        for _ in range(group.experiment.epochs):
            assert run_to_end(wave.epoch_in_parts(lambda: False)) is not None
        wave.end()
        i = [x.number for x in members].index(7)
        assert group.experiment.stops_early(wave.bests[i])
        ends.append((wave.bests[i], wave.test_results()[i].metrics, bytes_of(wave.host_state(), 7)))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "layers",
    [
        "[{linear: 128}, relu, {linear: 10}]",
        "[{linear: 128}, tanh, {linear: 64}, relu, {linear: 10}]",
        "[{linear: 64}, layer_norm, relu, {linear: 10}]",
        "[{linear: 16}, relu, {linear: 10}]",
    ],
    ids=["four_blocks", "two_hidden_layers", "layer_norm", "one_block"],
)
def test_a_first_layer_on_chip_gives_the_bytes_of_one_member_and_is_near_the_cpu(tmp_path: Path, layers: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (640, 28, 28)).astype(np.uint8)
    path = write_npz(tmp_path / "images.npz", parts(images))
    settings = [
        f"data={{path: {path}, batch_size: 64}}",
        f"model={{input: [784], layers: {layers}}}",
        "optimizer={sgd: {lr: 0.03, momentum: 0.9}}",
        "training.epochs=1",
        "sweep={order: own, training.seed: {range: 40}}",
    ]
    cfg = config.load("mlp-small", settings)
    (group,) = groups_of(cfg, members_of(cfg))
    members = list(group.members)
    alone = trained(group, [members[7]])
    assert bytes_of(trained(group, members), 7) == bytes_of(alone, 7)
    expected = trained(group, [members[7]], "cpu")
    for x, y in zip(tree.leaves(alone.state), tree.leaves(expected.state), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-3, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ("[linear: 40, batch_norm1d, relu, linear: 3]", "[36]"),
        ("[linear: 40, layer_norm, relu, linear: 3]", "[36]"),
        ("[lstm: 12, linear: 3]", "[6, 6]"),
        ("[linear: 16, multihead_attention: {num_heads: 2}, flatten, linear: 3]", "[6, 6]"),
        (f"[conv2d: {{out_channels: 5, kernel_size: 3}}, batch_norm2d, relu, {TAIL}", "[1, 6, 6]"),
        (f"[conv2d: {{out_channels: 4, kernel_size: 3, stride: 2, padding: 1}}, {TAIL}", "[1, 6, 6]"),
    ],
    ids=["batch_norm1d", "layer_norm", "lstm", "attention", "convolutions", "strides"],
)
@pytest.mark.parametrize("order", ["own", "shared"])
def test_the_bytes_of_a_member_of_any_network_do_not_depend_on_the_others(
    tmp_path: Path, layers: str, shape: str, order: str
) -> None:
    settings = SGD, f"model.input={shape}", "training.epochs=1", "data.batch_size=30"
    sweep = f"{{order: {order}, optimizer.sgd.lr: [0.1, 0.03], training.seed: {{range: 6}}}}"
    (group,) = groups(tmp_path, sweep, *settings, layers=layers)
    members = list(group.members)
    expected = bytes_of(trained(group, [members[7]]), 7)
    for chosen in ([members[i] for i in (9, 7, 2)], [*members, *members * 4]):
        assert bytes_of(trained(group, chosen), 7) == expected


def attention(q: Any, k: Any, v: Any) -> Any:
    out, pullback = ad.vjp(ops.attention, q, k, v)
    return (out, *pullback(out))


def embedding_gradient(indices: Any, ct: Any) -> Any:
    return ad.vjp(lambda table: ops.embedding(indices, table), ops.zeros((50, 8), device=ct.device))[1](ct)[0]


OPERATIONS: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "attention": (attention, [(2, 200, 64)] * 3),
    "attention of few queries": (attention, [(3, 8, 32)] * 3),
    "cumsum": (lambda x: ops.cumsum(x, 1), [(2, 100_000)]),
    "layer_norm": (lambda x: ops.layer_norm(x, (3, 30_000)), [(2, 3, 30_000)]),
    "embedding gradient": (embedding_gradient, [(300,), (300, 8)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_bytes_of_an_operation_of_a_member_do_not_depend_on_the_others(name: str) -> None:
    f, shapes = OPERATIONS[name]
    rng = np.random.default_rng(0)
    of_all = [
        rng.integers(0, 50, (64, *shape)) if len(shape) == 1 else rng.normal(size=(64, *shape)).astype(np.float32)
        for shape in shapes
    ]

    def results(chosen: Sequence[int]) -> list[bytes]:
        """Those of the last one of these members."""
        given = [ad.array(x[np.array(chosen) % len(x)], device="gpu") for x in of_all]
        found = stage(per_member(f), passes.ALL_BY_MEMBER)(*given)
        return [x.numpy()[-1].tobytes() for x in tree.leaves(found)]

    alone = results([7])
    assert all(results([*range(count), 7]) == alone for count in (2, 30, 31, 32, 63, 999))


def test_members_agree_with_those_on_the_cpu(tmp_path: Path) -> None:
    rates = "{optimizer.sgd.lr: [0.01, 0.03], training.seed: {range: 3}}"
    (group,) = groups(tmp_path, rates, SGD, "training.epochs=1", layers=LAYERS)
    found, expected = (trained(group, list(group.members), device) for device in ("gpu", "cpu"))
    for x, y in zip(tree.leaves(found.state), tree.leaves(expected.state), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-3, atol=1e-5)


def test_groups_side_by_side_have_the_bytes_of_groups_one_after_the_other(tmp_path: Path) -> None:
    sweep = (
        "{optimizer.sgd.lr: [0.1, 0.03, 1.0e+30], training.seed: {range: 4}, model.layers.0.linear: [40, 24, 56, 16]}"
    )
    cfg = load(tmp_path, f"sweep={sweep}", SGD, "training.epochs=4", "data.validation=0.2", layers=LAYERS)
    session = prepared(cfg, "gpu")
    for halving in (False, True):
        together, alone = (
            run(session, tmp_path / f"{name}{halving}", halving=halving) for name in ("together", "alone")
        )
        assert [len(groups) for groups in together.together] == [4]
        alone.together = [[group] for group in session.groups]
        assert together.run().members == alone.run().members
        for file in sorted((tmp_path / f"alone{halving}/states").iterdir()):
            assert (tmp_path / f"together{halving}/states" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.exhaustive
def test_the_ranking_of_300_members_on_mnist_agrees_with_members_trained_alone(tmp_path: Path) -> None:
    # Rates at which training is stable. At 0.3 rounding changes the accuracy by 0.1, also on the CPU.
    sweep = "{optimizer.sgd.lr: {log_uniform: [1.0e-4, 0.05], samples: 100}, training.seed: {range: 3}}"
    settings = f"sweep={sweep}", "data.validation=0.1", "training.epochs=1"
    session = prepared(config.load("mlp-small", settings), "gpu")
    results = run(session, tmp_path / "s").run()
    chosen = [results.members[i] for i in (0, 60, 150, 210, 299)]
    alone = []
    for found in chosen:
        experiment = training.prepare(session.members[found.member].config)
        validation = training.run(experiment, "gpu").validation
        assert validation is not None
        alone.append(validation._asdict()["accuracy"])
    values = [found.value or 0.0 for found in chosen]
    np.testing.assert_allclose(values, alone, atol=0.005)
    far = [i for i in range(4) if values[i] - values[i + 1] > 0.01]
    assert len(far) >= 2
    assert all(alone[i] > alone[i + 1] for i in far)
