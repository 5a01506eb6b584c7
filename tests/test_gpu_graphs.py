"""Steps on a GPU as CUDA graphs have the bits of eager launches, at any addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_parity import gpu
from training_runs import prepare

import adtrain as ad
from adtrain import ops, training
from adtrain.core import tree
from adtrain.core.array import Value, from_numpy
from adtrain.core.errors import DeviceError, OutOfMemory
from adtrain.core.staging import stage
from adtrain.passes import SIMPLIFY
from adtrain.training import loop, trainer
from adtrain.training.examples import Streamed
from adtrain.training.loop import FiniteCheck
from adtrain.training.step import empty_log, repeated

__all__ = ["gpu"]

pytestmark = pytest.mark.gpu

LAYERS = "[linear: 24, relu, dropout: 0.2, linear: 3]"
ROWS, BATCH = 20, 16


def after_steps(experiment: training.Experiment, calls: tuple[int, ...]) -> list[np.ndarray]:
    """State and log after a step on each row of an order. ``calls`` are the numbers of steps of each call."""
    examples = training.on_device(experiment.train, "gpu")
    order = np.random.default_rng(0).integers(0, len(experiment.train), (ROWS, BATCH))
    carried: Any = (experiment.initial_state("gpu"), empty_log(experiment.network.task, ROWS, "gpu"))
    for times in calls:
        carried = repeated(experiment.logged_step, times, carried, experiment.seed("gpu"), *examples.batches(order))
    return [x.numpy() for x in tree.leaves(carried)]


@pytest.mark.parametrize("optimizer", ["{adam: {lr: 0.01}}", "{sgd: {lr: 0.1, momentum: 0.9}}"])
def test_twenty_steps_in_graphs_have_the_bits_of_eager_steps(gpu: Any, tmp_path: Path, optimizer: str) -> None:
    experiment = prepare(tmp_path, f"optimizer={optimizer}", layers=LAYERS)
    staged = replace(experiment, mode=training.Mode.STAGED)
    eager = after_steps(replace(experiment, mode=training.Mode.EAGER), (ROWS,))
    for calls in ((ROWS,), (1,) * ROWS, (3, 17)):
        for x, y in zip(after_steps(staged, calls), eager, strict=True):
            assert x.tobytes() == y.tobytes()


def test_fused_steps_have_the_same_bits_for_any_number_of_steps_per_graph(gpu: Any, tmp_path: Path) -> None:
    experiment = prepare(tmp_path, layers=LAYERS)
    one_by_one = after_steps(experiment, (1,) * ROWS)
    for calls in ((ROWS,), (13, 7)):
        for x, y in zip(after_steps(experiment, calls), one_by_one, strict=True):
            assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("streamed", [False, True])
def test_the_graphs_of_the_first_epoch_serve_in_all_epochs(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    from adtrain.backends.cuda.runtime.launch import Graphs

    recorded, after_epochs = list[object](), list[int]()
    record = Graphs._record

    def counted(graphs: Graphs, work: Callable[[], None]) -> Any:
        recorded.append(work)
        return record(graphs, work)

    monkeypatch.setattr(Graphs, "_record", counted)
    if streamed:
        monkeypatch.setattr(trainer, "on_device", Streamed)

    class Epochs(training.Observer):
        def epoch_done(self, epoch: training.Epoch, state: object) -> None:
            after_epochs.append(len(recorded))

    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)  # one step a call
    training.run(prepare(tmp_path, "data.validation=0.2", "training.epochs=4", layers=LAYERS), "gpu", [Epochs()])
    assert len(after_epochs) == 4
    assert len(set(after_epochs)) == 1


def test_a_donated_array_is_written_over_only_if_no_other_array_lies_there(gpu: Any) -> None:
    x = from_numpy(np.zeros(300, np.float32), "gpu")
    address = x.buffer.address
    x = from_numpy(np.ones(300, np.float32), "gpu", donated=x)
    assert x.buffer.address == address
    same_memory = ops.reshape(x, (3, 100))
    y = from_numpy(np.full(300, 2.0, np.float32), "gpu", donated=x)
    assert y.buffer.address != address
    np.testing.assert_array_equal(same_memory.numpy(), np.ones((3, 100)))
    assert from_numpy(np.zeros(3), "gpu", donated=y).shape == (3,)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_found_anywhere_in_the_state(gpu: Any, tmp_path: Path, bad: float) -> None:
    experiment = prepare(tmp_path, layers=LAYERS)
    check, good = FiniteCheck(experiment, "gpu"), experiment.initial_state("cpu")
    leaves, structure = tree.flatten(tree.map(lambda x: x.numpy(), good))
    assert check(tree.map(lambda x: x.to("gpu"), good))()
    for i, x in enumerate(leaves):
        if x.dtype.kind == "f":
            changed = x.copy()
            changed.reshape(-1)[-1] = bad
            state = tree.unflatten(structure, [*leaves[:i], changed, *leaves[i + 1 :]])
            assert not check(tree.map(lambda x: ad.array(x, device="gpu"), state))()


@pytest.mark.parametrize("times", [1, 3, 10, 21])
def test_donated_arguments_that_swap_places_are_carried_to_the_next_run(gpu: Any, times: int) -> None:
    def step(x: Value, y: Value) -> tuple[Value, Value]:
        return y + x.sum(), x * 2  # of one type, so that each result gets the memory of the other argument

    expected: Any = [ad.array(np.arange(5)), ad.array(np.ones(5, np.int64))]
    found = stage(step, SIMPLIFY, donate=(0, 1)).repeat(times, *(x.to("gpu") for x in expected))
    for _ in range(times):
        expected = step(*expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_a_program_accepts_arguments_at_new_addresses(gpu: Any) -> None:
    double = stage(lambda x: x * 2.0)
    kept = [ad.array(np.full(1000, i, np.float32), device="gpu") for i in range(20)]
    for _ in range(2):
        for i, x in enumerate(kept):
            np.testing.assert_array_equal(double(x).numpy(), np.full(1000, 2 * i, np.float32))


def test_an_error_while_recording_names_the_operation(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from adtrain.backends.cuda.runtime.launch import Launch

    enqueue = Launch.enqueue

    def waiting(launch: Launch, *args: Any) -> None:
        enqueue(launch, *args)
        gpu.device.synchronize()

    f = stage(lambda x: ops.softmax(x), SIMPLIFY)
    with monkeypatch.context() as patched:
        patched.setattr(Launch, "enqueue", waiting)
        with pytest.raises(DeviceError, match=r"^softmax cannot be recorded in a CUDA graph: "):
            f(ad.array(np.ones((4, 8)), device="gpu"))
    np.testing.assert_allclose(f(ad.array(np.ones((4, 8)), device="gpu")).numpy(), 1 / 8)


def test_early_launches_spread_over_all_multiprocessors(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import driver

    from adtrain.backends.cuda.runtime.driver import checked
    from adtrain.backends.cuda.runtime.launch import Launch

    if not gpu.device.overlaps:
        pytest.skip("launches of this GPU do not start early")
    early = []
    enqueue = Launch.enqueue

    def noting(launch: Launch, *args: Any) -> None:
        if not launch.empty and launch.early is not None:
            early.append((launch.early.function, launch.early.shape))
        enqueue(launch, *args)

    monkeypatch.setattr(Launch, "enqueue", noting)
    after_steps(prepare(tmp_path, layers=LAYERS), (1,))
    assert early
    for function, ((blocks, _, _), (threads, _, _), shared) in early:
        at_once = checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, shared))
        assert blocks == 1 or blocks > (at_once - 1) * gpu.device.multiprocessors


def test_a_profile_has_a_positive_time_for_every_operation(gpu: Any, tmp_path: Path) -> None:
    from adtrain.bench.profile import profile_steps

    experiment = prepare(tmp_path, layers="[linear: 512, relu, linear: 3]")
    profile = profile_steps(training.continuation(experiment, experiment.initial_state("gpu"), "gpu"), 5, device="gpu")
    assert all(row.ms > 0 for row in profile.rows if row.flops)


def test_running_out_of_memory_states_needed_and_free_bytes(gpu: Any) -> None:
    with pytest.raises(OutOfMemory, match=r"^device gpu: out of memory: .* MiB more needed, .* MiB of .* MiB free$"):
        gpu.device.allocate(1 << 50)
    np.testing.assert_array_equal(ad.array(np.arange(3.0), device="gpu").numpy(), np.arange(3.0))
