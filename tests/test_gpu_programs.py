"""Fused Programs on a GPU match unfused ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cuda_samples import mixture_gradients
from gpu_parity import check, gpu, poisoned
from program_samples import OPTIMIZERS, batch, names, two_updates, update_arguments
from program_samples import training as sample
from test_cuda_back_to_back_on_host import feed_forward_gradients, of_lengths
from test_passes_sequences import encoder_arguments, encoder_gradients

import adtrain as ad
from adtrain import ops
from adtrain.core import tree
from adtrain.core.errors import ShapeError
from adtrain.core.program import label
from adtrain.core.staging import stage
from adtrain.passes import ALL, SIMPLIFY

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu

STEPS = 3
TOLERANCE = {"float32": 2e-4, "float64": 1e-10}


def after_steps(optimizer: str, dtype: str, passes: Sequence[Any]) -> list[np.ndarray]:
    """State and loss after a few steps of a convolutional network."""
    step, first = sample(optimizer, dtype, dropout=0.25)
    given = [[x.to("gpu") for x in batch(dtype, seed)] for seed in range(STEPS)]
    staged = stage(step, passes, donate=(0,))
    # Zeros may be a broadcast scalar. A step that donates its state needs arrays that own their memory.
    state: Any = tree.map(lambda x: ad.array(x.numpy().copy(), device="gpu"), first)
    for arguments in given:
        state, loss = staged(state, *arguments)
    return [x.numpy() for x in tree.leaves((state, loss))]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fused_steps_match_unfused_steps_and_repeat_bit_for_bit(optimizer: str, dtype: str) -> None:
    found = after_steps(optimizer, dtype, ALL)
    check(found, after_steps(optimizer, dtype, SIMPLIFY), TOLERANCE[dtype])
    for x, y in zip(found, after_steps(optimizer, dtype, ALL), strict=True):
        assert x.tobytes() == y.tobytes()


def test_products_back_to_back_match_separate_ones_and_repeat_bit_for_bit() -> None:
    """An H200 computes products with this number of rows by `back_to_back` equations."""
    *arrays, _ = of_lengths(8192, 128, 512, 128, (True, True))
    given = [ad.array(x, device="gpu") for x in arrays]

    def results(passes: Sequence[Any]) -> list[np.ndarray]:
        return [x.numpy() for x in tree.leaves(stage(feed_forward_gradients, passes)(*given))]

    found = results(ALL)
    check(found, results(SIMPLIFY), TOLERANCE["float32"])
    assert [x.tobytes() for x in found] == [x.tobytes() for x in results(ALL)]


def projection_gradients(*given: Any) -> Any:
    *arguments, gradient = given
    out, pullback = ad.vjp(lambda x, w, b: ops.matmul(x, w, transpose_b=True) + b, *arguments)
    return out, pullback(gradient)


def test_tiled_products_match_separate_equations_and_repeat_bit_for_bit() -> None:
    """An H200 computes products with this number of rows by `tiled_product` equations."""
    given = on_gpu((8192, 128), (384, 128), (384,), (8192, 384))

    def results(passes: Sequence[Any]) -> list[np.ndarray]:
        return [x.numpy() for x in tree.leaves(stage(projection_gradients, passes)(*given))]

    found = results(ALL)
    check(found, results(SIMPLIFY), TOLERANCE["float32"])
    assert [x.tobytes() for x in found] == [x.tobytes() for x in results(ALL)]


@pytest.mark.parametrize("causal", [False, True])
def test_a_fused_transformer_matches_the_unfused_one_and_repeats_bit_for_bit(causal: bool) -> None:
    given = [ad.array(x, device="gpu") for x in encoder_arguments(128, 16)]

    def gradients(passes: Sequence[Any]) -> list[np.ndarray]:
        found = stage(lambda *x: encoder_gradients(*x, causal=causal), passes)(*given)
        return [x.numpy() for x in tree.leaves(found)]

    found = gradients(ALL)
    check(found, gradients(SIMPLIFY), TOLERANCE["float32"])
    assert [x.tobytes() for x in found] == [x.tobytes() for x in gradients(ALL)]


def on_gpu(*shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [ad.array(rng.normal(size=shape).astype(np.float32), device="gpu") for shape in shapes]


LENGTHS = [(1, 1, 1), (5, 3, 7), (33, 65, 47), (128, 512, 784), (100, 60, 2049)]


@pytest.mark.parametrize(("m", "n", "k"), LENGTHS)
def test_an_epilogue_has_the_bits_of_separate_equations(m: int, n: int, k: int) -> None:
    def f(x: Any, w: Any, row: Any, column: Any, whole: Any) -> Any:
        product = ops.matmul(x, w, transpose_b=True)
        scaled = ops.tanh(product * 0.5 + row) * column
        return product, scaled, ops.exp(scaled) * whole

    given = on_gpu((m, k), (n, k), (n,), (m, 1), (m, n))
    program = stage(f, ALL).program(*given)
    assert [e.name for e in program.equations] == ["product"]
    for x, y in zip(stage(f, ALL)(*given), stage(f, SIMPLIFY)(*given), strict=True):
        np.testing.assert_array_equal(x.numpy(), y.numpy())


def test_an_epilogue_of_a_batched_product_has_the_bits_of_separate_equations() -> None:
    def f(x: Any, w: Any, item: Any) -> Any:
        return ops.relu(ops.matmul(x, w) + item)

    given = on_gpu((2, 3, 20, 30), (2, 3, 30, 40), (2, 1, 1, 40))
    assert label(stage(f, ALL).program(*given).equations[0]) == "matmul+add+relu"
    np.testing.assert_array_equal(stage(f, ALL)(*given).numpy(), stage(f, SIMPLIFY)(*given).numpy())


REDUCTIONS = {
    "rows": ((2000, 1500), (1,)),
    "short rows": ((3, 50_000, 3), (2,)),
    "unaligned rows": ((4, 9000, 401), (2,)),
    "columns": ((50_000, 12), (0,)),
    "planes": ((6, 70, 5, 1001), (0, 2)),
    "all": ((31, 40, 2049), (0, 1, 2)),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["sum", "max", "min"])
@pytest.mark.parametrize("case", REDUCTIONS)
def test_a_reduction_of_what_it_computes_matches_separate_equations(case: str, name: str, dtype: str) -> None:
    shape, axes = REDUCTIONS[case]

    def f(x: Any, row: Any, column: Any) -> Any:
        return getattr(ops, name)(ops.tanh(x * row + column) * x, axes)

    rng = np.random.default_rng(0)
    shapes = shape, shape[1:], (*shape[:-1], 1)
    given = [ad.array(rng.normal(size=each).astype(dtype), device="gpu") for each in shapes]
    form = "column_sum" if (case, name) == ("columns", "sum") else "reduction"
    assert names(stage(f, ALL).program(*given)) == [form]
    found, again, expected = ([stage(f, p)(*given).numpy()] for p in (ALL, ALL, SIMPLIFY))
    check(found, expected, TOLERANCE[dtype])
    assert found[0].tobytes() == again[0].tobytes()


def test_what_reductions_leave_of_loops_matches_separate_equations() -> None:
    def f(x: Any, w: Any) -> Any:
        return ad.value_and_grad(lambda x, w: ops.mean((x * w) ** 2), argnums=(0, 1))(x, w)

    given = on_gpu((64, 64, 28, 28), (64, 64, 1, 1))
    assert not {"reduction", "row_fused"}.isdisjoint(names(stage(f, ALL).program(*given)))
    found, again, expected = ([x.numpy() for x in tree.leaves(stage(f, p)(*given))] for p in (ALL, ALL, SIMPLIFY))
    check(found, expected, TOLERANCE["float32"])
    assert [x.tobytes() for x in found] == [x.tobytes() for x in again]


def test_products_with_reciprocals_and_sums_of_one_kernel_match_separate_equations() -> None:
    given = on_gpu((50_000, 16), (8, 16), (8, 16))
    assert names(stage(mixture_gradients, ALL).program(*given)).count("column_sum") == 1
    found, again, expected = ([x.numpy() for x in stage(mixture_gradients, p)(*given)] for p in (ALL, ALL, SIMPLIFY))
    check(found, expected, TOLERANCE["float32"])
    assert [x.tobytes() for x in found] == [x.tobytes() for x in again]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", [64, 512])
def test_horizontal_fusion_of_updates_matches_separate_updates(length: int, dtype: str) -> None:
    given = [ad.array(x, device="gpu") for x in update_arguments(length, dtype)]
    assert [e.name for e in stage(two_updates, ALL).program(*given).equations] == ["horizontal"]
    found, again, expected = ([x.numpy() for x in stage(two_updates, p)(*given)] for p in (ALL, ALL, SIMPLIFY))
    check(found, expected, {"float32": 1e-5, "float64": 1e-13}[dtype])
    assert [x.tobytes() for x in found] == [x.tobytes() for x in again]


@pytest.mark.parametrize("shape", [(7, 11), (50, 4, 8), (300, 100)])
def test_a_fused_gather_has_the_bits_of_separate_equations(shape: tuple[int, ...]) -> None:
    table = ad.array(np.random.default_rng(0).integers(0, 256, shape, np.uint8), device="gpu")
    rows = ad.array(np.random.default_rng(1).integers(0, shape[0], 3000), device="gpu")

    def f(table: Any, rows: Any) -> Any:
        return ops.embedding(rows, table).astype(np.float32) * 0.1 - 3.0

    assert "gather" in [e.name for e in stage(f, ALL).program(table, rows).equations]
    np.testing.assert_array_equal(stage(f, ALL)(table, rows).numpy(), stage(f, SIMPLIFY)(table, rows).numpy())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("count", [32, 127, 1000, 7500])
def test_a_row_fused_layer_and_loss_match_separate_equations(count: int, dtype: str) -> None:
    def f(x: Any, w: Any, b: Any, labels: Any) -> Any:
        def loss(x: Any, w: Any, b: Any) -> Any:
            return ops.cross_entropy(ops.matmul(ops.relu(x), w, transpose_b=True) + b, labels)

        return ad.value_and_grad(loss, argnums=(0, 1, 2))(x, w, b)

    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(dtype) for shape in ((count, 84), (10, 84), (10,))]
    given = [ad.array(x, device="gpu") for x in (*arrays, np.arange(count) % 10)]
    assert "row_fused" in [e.name for e in stage(f, ALL).program(*given).equations]
    found, again, expected = ([x.numpy() for x in tree.leaves(stage(f, p)(*given))] for p in (ALL, ALL, SIMPLIFY))
    check(found, expected, {"float32": 1e-5, "float64": 1e-13}[dtype])
    assert [x.tobytes() for x in found] == [x.tobytes() for x in again]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("classes", [1025, 5000, 50304, 100_001])
def test_a_loss_over_many_classes_and_its_gradient_match_separate_equations(classes: int, dtype: str) -> None:
    def f(logits: Any, labels: Any) -> Any:
        value, gradient = ad.value_and_grad(lambda x: ops.cross_entropy(x, labels, 0.1, ignore_index=5))(logits)
        return value, gradient, ops.argmax(logits, axis=1), ops.layer_norm(logits, classes)

    rng = np.random.default_rng(0)
    count = 200
    labels = rng.integers(0, classes, count)
    labels[17] = 5
    given = [ad.array(x, device="gpu") for x in (3 * rng.normal(size=(count, classes)).astype(dtype), labels)]
    assert "long_rows" in [e.name for e in stage(f, ALL).program(*given).equations]
    found, again, expected = ([x.numpy() for x in tree.leaves(stage(f, p)(*given))] for p in (ALL, ALL, SIMPLIFY))
    check(found, expected, {"float32": 1e-5, "float64": 1e-13}[dtype])
    assert [x.tobytes() for x in found] == [x.tobytes() for x in again]


@pytest.mark.parametrize("count", [3, 3000], ids=["in a block", "in a gather"])
@pytest.mark.parametrize("wrong", [-1, 300])
def test_an_index_out_of_range_raises_a_shape_error(count: int, wrong: int) -> None:
    (table,) = on_gpu((300, 100))
    rows = np.arange(count) % 300
    rows[count // 2] = wrong
    f = stage(lambda table, rows: ops.softmax(ops.embedding(rows, table) * 2.0, 1), ALL)
    with pytest.raises(ShapeError, match="an index is out of range"):
        f(table, ad.array(rows, device="gpu")).numpy()


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_large_results_that_are_held_survive_later_runs(kept: int) -> None:
    f = stage(lambda x: (x + 1.0, ops.reshape(x * 2.0, (-1,))), ALL)
    base = np.arange(2**19, dtype=np.float32).reshape(512, 1024)
    held: deque[tuple[int, Any]] = deque(maxlen=kept)
    for i in range(8):
        held.append((i, f(ad.array(base + i, device="gpu"))))
        for j, (more, twice) in held:
            assert np.array_equal(more.numpy(), base + j + 1)
            assert np.array_equal(twice.numpy(), 2 * (base + j).reshape(-1))


def test_a_large_result_can_be_the_next_argument() -> None:
    f = stage(lambda x: x + 1.0, ALL)
    x = ad.array(np.zeros((512, 1024), np.float32), device="gpu")
    for _ in range(9):
        x = f(x)
    assert np.array_equal(x.numpy(), np.full((512, 1024), 9, np.float32))
