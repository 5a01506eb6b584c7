"""Training by several ranks, as threads: the same bytes for each number of ranks that divides the shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import command
from thread_ranks import ThreadRank, on_ranks
from training_runs import write_config

from adtrain import config, ops, optim, training
from adtrain.config import ConfigError
from adtrain.core import tree
from adtrain.passes.plan_memory import plan_memory
from adtrain.training import Experiment, RunFolder, model_file, preparation
from adtrain.training.checkpoint import fetch
from adtrain.training.costs import planned_peak
from adtrain.training.run_folder import LAST, Recorder
from adtrain.training.sharding import Sharding
from adtrain.training.trainer import Start

CNN = """model.layers=[
    {conv2d: {out_channels: 4, kernel_size: 3}}, batch_norm2d, relu, {max_pool2d: 2}, flatten, {dropout: 0.3},
    {linear: 3}]"""
IMAGES = ("model.input=[1,6,6]", CNN)
SYNC = "model.layers=[{linear: 8}, {batch_norm1d: {sync: true}}, relu, {dropout: 0.3}, {linear: 3}]"
EMPTY_SHARDS = [SYNC, "data.batch_size=29", "training.epochs=2", "optimizer={adamw: {lr: 0.01}}", "schedule=one_cycle"]
EVEN = ("data.batch_size=18",)
"""Of 90 or 72 images: no short last batch, whose step is another Program to compile."""


def both(ranks: int) -> list[tuple[int, bool]]:
    """The runs of one rank, and of several that share memory or do not."""
    return [(1, False), (ranks, False), (ranks, True)]


CASES = {
    # 90 images: the last of batches of 29 has 3, in shards of 1, 1, 1 and 0
    "convolutions, batch norm, dropout, clipping by norm": (
        4,
        [(1, False), (4, True)],
        [*IMAGES, *EVEN, "training.clip_norm=0.5", "data.validation=0.2", "training.epochs=2"],
    ),
    "batch norm over all shards, empty shards": (4, [(1, False), (4, True)], EMPTY_SHARDS),
    "class weights, empty shards": (
        4, [(1, False), (2, True)], ["data.batch_size=29", "loss={cross_entropy: {weight: [1, 9, 0]}}",
        "data.validation=0.2", "training.epochs=2"],
    ),
    "parameter groups, frozen parameters, average of weights": (
        4, [(1, False), (2, True)], [*EVEN, "training.epochs=2", "optimizer={adamw: {lr: 0.01}}",
        "parameter_groups=[no_decay, {paths: 2.weight, lr_factor: 3}, {paths: 0.bias, trainable: false}]",
        "training.average=ema"],
    ),
    "muon, lookahead, plateau": (
        2, [(1, False), (2, True)], [*EVEN, "training.epochs=1", "optimizer={muon: {rest: {sgd: 0.1}}}",
        "training.average={lookahead: {steps: 2}}", "schedule={plateau: {warmup_steps: 2}}"],
    ),
    "alternating flip, mixup, momentum, clipping by value, early stopping": (
        2,
        both(2),
        [*EVEN, "data.augment=[flip: {alternate: true}, mixup: 0.2]",
         "optimizer={sgd: {lr: 0.3, momentum: 0.9, weight_decay: 0.01}}",
         "training.clip_value=0.1", "training.epochs=9", "training.early_stopping={patience: 1}"],
    ),
}  # fmt: skip


def encoded(experiment: Experiment, result: training.Result) -> bytes:
    """The bytes of the model's file."""
    return b"".join(model_file.encode(experiment, fetch(result.state)()))


def trained(
    path: Path, ranks: int, settings: Sequence[str], shares_memory: bool = False
) -> list[tuple[bytes, training.Result]]:
    """The bytes of model.safetensors, and the result, of each rank."""

    def run(rank: ThreadRank) -> tuple[bytes, training.Result]:
        experiment = training.prepare(config.load(path, settings))
        result = training.run(experiment)
        return encoded(experiment, result), result

    return on_ranks(ranks, run, shares_memory)


COMPILED = "alternating flip, mixup, momentum, clipping by value, early stopping"
"""The case that plain pytest compiles. Shards are summed in one order by any code."""


@pytest.mark.parametrize(
    ("case", "code"),
    [
        *((x, "on_numpy") for x in CASES if x != COMPILED),
        pytest.param(COMPILED, "quick_compiler", marks=pytest.mark.compiled),
        pytest.param(
            "convolutions, batch norm, dropout, clipping by norm",
            "optimised",
            marks=[pytest.mark.compiled, pytest.mark.exhaustive],
        ),
    ],
)
def test_each_number_of_ranks_gives_the_same_bytes_and_scores(
    tmp_path: Path, request: pytest.FixtureRequest, case: str, code: str
) -> None:
    request.getfixturevalue(code)
    shards, kinds, settings = CASES[case]
    path = write_config(tmp_path)
    settings = [*settings, f"data.shards={shards}"]
    runs = [trained(path, ranks, settings, shares_memory) for ranks, shares_memory in kinds]
    (expected, first), *others = [rank for run in runs for rank in run]
    for content, result in others:
        assert content == expected
        assert (result.train, result.validation, result.test) == (first.train, first.validation, first.test)
        assert (result.steps, result.ended, result.best) == (first.steps, first.ended, first.best)


def test_the_gradient_of_shards_is_that_of_the_batch(tmp_path: Path) -> None:
    """One SGD step on two shards moves the weights as one step on the whole batch does, up to rounding."""
    path = write_config(tmp_path)
    moved = []
    for settings in ([], ["data.shards=4"]):
        cfg = config.load(path, ["training.steps=1", "optimizer={sgd: {lr: 0.5}}", *EVEN, *settings])
        moved.append(tree.leaves(training.run(training.prepare(cfg)).state.params))
    for x, y in zip(*moved, strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-5, atol=1e-7)


def test_a_micro_batch_chooses_the_least_number_of_shards(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    for size, shards in ((16, 1), (8, 2), (5, 4), (4, 4), (1, 16)):
        found = training.prepare(config.load(path, [f"training.micro_batch={size}"])).config
        assert found == training.prepare(config.load(path, [f"data.shards={shards}"])).config


AUTO = "training.micro_batch=auto"


@pytest.mark.parametrize(("halvings", "shards"), [(0, None), (1, 2), (2, 4), (30, 8)])
def test_an_automatic_micro_batch_is_the_largest_that_fits_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, halvings: int, shards: int | None
) -> None:
    """Here a step needs 1 byte for each example of a shard."""
    path = write_config(tmp_path)
    monkeypatch.setattr(preparation, "planned_peak", lambda x, device: 16 // (x.config.data.shards or 1))
    monkeypatch.setattr(preparation, "machine_memory", lambda: 16 >> halvings)
    found = training.prepare(config.load(path, [AUTO]), device="cpu").config
    assert found == training.prepare(config.load(path, [f"data.shards={shards or 'null'}"])).config


def test_an_automatic_micro_batch_fits_by_the_memory_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, images = write_config(tmp_path), [*IMAGES, "data.batch_size=64"]
    peaks = [
        planned_peak(training.prepare(config.load(path, [*images, f"data.shards={shards}"])), "cpu")
        for shards in (1, 2)
    ]
    assert peaks[1] < peaks[0]
    monkeypatch.setattr(preparation, "machine_memory", lambda: peaks[1])
    found = training.prepare(config.load(path, [*images, AUTO]), device="cpu").config
    assert (found.data.shards, found.training.micro_batch) == (2, None)


def test_training_chooses_an_automatic_micro_batch_and_resumes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = write_config(tmp_path), tmp_path / "run"
    monkeypatch.setattr(preparation, "planned_peak", lambda x, device: 16 // (x.config.data.shards or 1))
    monkeypatch.setattr(preparation, "machine_memory", lambda: 4)
    command("train", path, "--set", AUTO, "--output-dir", run, "--epochs", 1)
    assert "shards: 4" in (run / "config.yaml").read_text()
    monkeypatch.setattr(preparation, "machine_memory", lambda: 16)
    command("train", "--resume", run, "--epochs", 2)
    assert "shards: 4" in (run / "config.yaml").read_text()


def test_the_memory_of_a_step_is_that_of_a_micro_batch(tmp_path: Path) -> None:
    path, sizes = write_config(tmp_path), {}
    for shards, settings in ((1, []), (8, ["training.micro_batch=64"])):
        cfg = config.load(path, [*IMAGES, "data.batch_size=512", *settings])
        sizes[shards] = plan_memory(training.outline(cfg).step_program()).arena_bytes
    assert sizes[8] < 0.25 * sizes[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.shards=2", "training.micro_batch=8"], "found 8 and data.shards 2, expected one of them"),
        (["data.shards=2", AUTO], "found auto and data.shards 2, expected one of them"),
        ([AUTO], "found auto, expected a number of examples: only a training knows the memory of its device"),
        (
            ["data.batch_size=10", "training.micro_batch=1"],
            "found 1, which divides batches of 10 into 16 parts, expected at most 10",
        ),
    ],
)
def test_the_line_of_a_micro_batch_that_does_not_fit(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        training.prepare(config.load(write_config(tmp_path), settings))
    assert str(caught.value).endswith(f"training.micro_batch: {message}")


def test_steps_that_are_measured_continue_a_run_on_shards(tmp_path: Path) -> None:
    """They move the weights as the steps that continue a run on whole batches do, up to rounding."""
    path, moved = write_config(tmp_path), []
    for settings in ([], ["data.shards=2"]):
        experiment = training.prepare(config.load(path, [*EVEN, *settings]))
        state = training.continuation(experiment, training.run(experiment).state)(3)
        moved.append(tree.leaves(experiment.with_params(state).params))
    for x, y in zip(*moved, strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-4, atol=1e-6)


def test_optimizer_state_is_divided_among_ranks(tmp_path: Path) -> None:
    path = write_config(tmp_path)

    def held(rank: ThreadRank) -> int:
        experiment = training.prepare(config.load(path, EVEN))
        state = training.run(experiment).state
        return sum(x.size for x in tree.leaves(state.optimizer["exp_avg"]))

    assert on_ranks(2, held) == [336, 336]  # of 643 parameters, and padding


def test_elements_between_parameters_are_not_checked(tmp_path: Path) -> None:
    settings = ["data.shards=2", *EVEN, "training.steps=3", "optimizer={adam: {lr: 0.01, eps: 0}}"]
    model = "model.layers=[{linear: 16}, tanh, {linear: 3}]"
    contents = [x[0] for ranks in (1, 2) for x in trained(write_config(tmp_path), ranks, [*settings, model])]
    assert contents == contents[:1] * 3


@dataclass(frozen=True)
class DoubleMomentum(optim.SGD):
    """Momentum whose average is in float64."""

    def init(self, params: Any) -> optim.OptState:
        return {**super().init(params), "sum": tree.map(lambda x: ops.zeros(x.shape, np.float64), params)}

    def updated(self, params: Any, grads: Any, state: optim.OptState, lr: Any) -> tuple[Any, optim.OptState]:
        total = tree.map(lambda s, g: s * 0.9 + ops.astype(g, np.float64), state["sum"], grads)
        moved = tree.map(lambda p, s: p - ops.astype(s * lr, p.dtype), params, total)
        return moved, {"step": state["step"] + 1, "sum": total}


def test_averages_keep_their_dtype_when_they_are_divided(tmp_path: Path) -> None:
    experiment = training.prepare(config.load(write_config(tmp_path), ["data.shards=2", "training.steps=3", *EVEN]))
    experiment = replace(experiment, optimizer=DoubleMomentum(0.1))
    state = tree.map(lambda x: x.numpy(), experiment.initial_state("cpu"))
    divided = experiment.divided(state)
    assert {x.dtype.name for x in tree.leaves(divided.optimizer["sum"])} == {"float64"}
    assert {x.dtype.name for x in tree.leaves(training.run(experiment).state.optimizer["sum"])} == {"float64"}


def test_a_run_resumed_on_other_numbers_of_ranks_continues_with_the_same_bytes(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    settings = ["model.layers=[{linear: 16}, {dropout: 0.3}, relu, {linear: 3}]", "data.shards=2", *EVEN]
    expected = trained(path, 2, settings)[0][0]
    folder = tmp_path / "run"

    def part(rank: ThreadRank, steps: int) -> bytes:
        """Train up to `steps` in the folder."""

        def stop() -> bool:
            return False

        start: Start | None = None
        if steps == 4:
            experiment = training.prepare(config.load(path, settings))
            if rank.rank == 0:
                RunFolder.create(experiment, folder)
        else:
            experiment, _, start, _ = training.resume(folder)
        recorders = [Recorder(RunFolder(folder), experiment)] if rank.rank == 0 else []
        taken = [0 if start is None else start.checkpoint.progress.step]

        class Counting(training.Observer):
            def step_done(self, images: int) -> None:
                taken[0] += 1

        try:
            result = training.run(experiment, "cpu", [*recorders, Counting()], start, lambda: taken[0] >= steps)
        except training.Interrupted:
            return b""
        return encoded(experiment, result)

    for ranks, steps in ((2, 4), (1, 9), (2, 1000)):
        found = on_ranks(ranks, lambda rank, steps=steps: part(rank, steps), ranks > 1)  # type: ignore[misc]
        assert (folder / LAST).exists()
    assert found == [expected] * 2


@pytest.mark.parametrize(
    ("ranks", "settings", "message"),
    [
        (2, ["data.shards=1"], "found 1, expected a multiple of the number of ranks, 2"),
        (3, [], "found 3 ranks and no data.shards, expected a power of two"),
        (3, ["data.shards=4"], "found 3 ranks, expected a power of two of ranks"),
        (1, ["data.shards=32"], "found 32 shards of batches of 16, expected at most 16"),
        (1, ["data.shards=3"], "expected a power of two"),
        (1, ["data.shards=16", "model.layers=[linear: 3, batch_norm1d]"], "needs 2 images per shard of a batch"),
    ],
)
def test_shards_that_do_not_fit_are_refused(tmp_path: Path, ranks: int, settings: list[str], message: str) -> None:
    path = write_config(tmp_path)
    with pytest.raises(ConfigError, match=message):
        on_ranks(ranks, lambda rank: training.prepare(config.load(path, settings)))


def test_the_number_of_ranks_is_written_into_the_config(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    for shards in on_ranks(2, lambda rank: training.prepare(config.load(path)).config.data.shards):
        assert shards == 2
    assert training.prepare(config.load(path)).config.data.shards is None


def test_ranks_divide_a_batch_in_order() -> None:
    batch = np.arange(11)
    for ranks in (1, 2, 4):
        parts = [Sharding(4, ranks, rank).part(batch) for rank in range(ranks)]
        np.testing.assert_array_equal(np.concatenate(parts), batch)
    assert [Sharding(4, 4, rank).sizes(2) for rank in range(4)] == [[1], [1], [0], [0]]
