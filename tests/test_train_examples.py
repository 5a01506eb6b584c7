from __future__ import annotations

from collections.abc import Callable
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_runs import prepare

from adtrain import training
from adtrain.core import tree
from adtrain.core.array import Array, from_numpy
from adtrain.core.errors import TraceError
from adtrain.core.types import ArrayType
from adtrain.data import Split
from adtrain.training import Observer, TrainState, evaluation, examples, loop, step, trainer
from adtrain.training.examples import Examples, Resident, Streamed

pytestmark = pytest.mark.unfused

ROWS = 5


def numbered(count: int) -> Split:
    """Image i has the single pixel i and the label i; the order in memory is shuffled."""
    shuffled = np.random.default_rng(0).permutation(count)
    return Split(shuffled.astype(np.float32).reshape(-1, 1, 1, 1), shuffled).take(np.argsort(shuffled))


sizes = st.lists(st.integers(1, 7), min_size=1, max_size=30)


@given(sizes=sizes, chunk=st.integers(1, 200), kind=st.sampled_from([Resident, Streamed]))
def test_groups_contain_the_batches_in_order(
    sizes: list[int], chunk: int, kind: Callable[[Split, str], Examples]
) -> None:
    rng = np.random.default_rng(1)
    batches = [rng.integers(0, 50, size) for size in sizes]
    found, row = [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples, "CHUNK_BYTES", chunk)
        for group in kind(numbered(50), "cpu").groups(iter(batches), ROWS):
            assert group.position == row % ROWS
            images, labels, order = (x.numpy() for x in group.inputs)
            assert order.shape == (ROWS, group.size)
            for indices in order[group.position : group.position + group.steps]:
                np.testing.assert_array_equal(images[indices].ravel(), labels[indices])
                found.append(labels[indices])
            row += group.steps
    assert [batch.tolist() for batch in found] == [batch.tolist() for batch in batches]


@pytest.mark.parametrize("kind", [Resident, Streamed])
def test_batches_may_be_endless(kind: Callable[[Split, str], Examples]) -> None:
    batches = (np.full(3, i % 50) for i in count())
    groups = list(islice(kind(numbered(50), "cpu").groups(batches, ROWS), 4))
    assert [group.steps for group in groups] == [ROWS] * 4


def test_chunks_for_one_batch_size_have_one_shape() -> None:
    """A Program is compiled for each shape."""
    batches = [np.zeros(size, np.int64) for size in [4] * 13 + [2]]
    groups = Streamed(numbered(9), "cpu").groups(batches, ROWS)
    assert {(group.size, group.inputs[0].shape) for group in groups} == {(4, (20, 1, 1, 1)), (2, (10, 1, 1, 1))}


@pytest.mark.parametrize("chunk", [1, 36 * 16 * 2, 1 << 20])
def test_streamed_training_equals_resident_training_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    def train() -> tuple[list[np.ndarray], object]:
        augment = "data.augment=[crop: {padding: 2, padding_mode: reflect}, flip: {alternate: true}]"
        result = training.run(prepare(tmp_path, "data.validation=0.2", "training.epochs=2", augment))
        return [x.numpy() for x in tree.leaves(result.state)], (result.train, result.validation, result.test)

    expected = train()
    monkeypatch.setattr(examples, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(trainer, "on_device", Streamed)
    found = train()
    assert found[1] == expected[1]
    for a, b in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_split_that_needs_a_copy_is_streamed_if_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.zeros((4, 3, 2, 2), np.uint8)
    strided = Split(images.transpose(0, 2, 3, 1), np.arange(4))
    assert isinstance(training.on_device(strided, "cpu"), Resident)
    monkeypatch.setattr(examples, "_copy_limit", lambda device: images.nbytes - 1)
    assert isinstance(training.on_device(Split(images, np.arange(4)), "cpu"), Resident)
    streamed = training.on_device(strided, "cpu")
    assert isinstance(streamed, Streamed)
    assert examples.held_bytes(strided, "cpu") == 2 * examples.CHUNK_BYTES * (48 + 32) // 48
    found = streamed.batches(np.array([[2, 1], [0, 3]]))
    np.testing.assert_array_equal(found[1].numpy()[found[2].numpy()], [[2, 1], [0, 3]])


@pytest.mark.parametrize("kind", [Resident, Streamed])
def test_what_later_epochs_upload_gets_the_memory_of_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[Split, str], Examples]
) -> None:
    """So the launches that a GPU has recorded for the steps and the evaluation serve in all epochs."""
    uploads: list[tuple[ArrayType, ArrayType | None]] = []
    of_epochs: list[int] = []

    def noted(x: np.ndarray, device: str, donated: Array | None = None) -> Array:
        type_ = None if donated is None else ArrayType(donated.shape, donated.dtype)
        uploads.append((ArrayType(x.shape, x.dtype), type_))
        return from_numpy(x, device, donated)

    class Epochs(Observer):
        def epoch_done(self, epoch: training.Epoch, state: Callable[[], TrainState]) -> None:
            of_epochs.append(len(uploads))

    for module in (examples, evaluation, loop, step):
        monkeypatch.setattr(module, "from_numpy", noted)
    monkeypatch.setattr(trainer, "on_device", kind)
    training.run(prepare(tmp_path, "data.validation=0.2", "training.epochs=4"), "cpu", [Epochs()])
    first, *_, last = of_epochs
    assert len(uploads[first:last]) >= 3 * 8
    for found, donated in uploads[first:last]:
        assert found == donated


def test_the_memory_of_an_array_that_is_given_for_another_one_cannot_be_used_any_more() -> None:
    before = from_numpy(np.zeros(3), "cpu")
    np.testing.assert_array_equal(from_numpy(np.ones(3), "cpu", donated=before).numpy(), np.ones(3))
    with pytest.raises(TraceError, match="was donated"):
        before.numpy()
