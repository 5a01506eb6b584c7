"""Arrays: types, operators, indexing, immutability, trees, scopes, hooks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops
from adtrain.core import tree
from adtrain.core.staging import stage
from adtrain.core.trace import Call, Hook, current_scope, hook, phase, scope


@pytest.mark.parametrize(
    ("elements", "dtype"),
    [
        (1.5, "float32"),
        (2, "int64"),
        ([[1.0]], "float32"),
        (True, "bool"),
        (np.ones(2), "float64"),
        (np.uint8(3), "uint8"),
    ],
)
def test_default_dtypes_of_numbers_and_arrays(elements: Any, dtype: Any) -> None:
    assert ad.array(elements).dtype == dtype


def test_python_numbers_take_the_dtype_of_the_other_operand() -> None:
    single = ad.array([1.0, 2.0])
    for out in (
        single * 2,
        2.0 - single,
        single**2,
        single / 3,
        ops.maximum(single, 0),
        ops.where(single > 1, single, 0),
    ):
        assert out.dtype == np.float32
    assert (ad.array([1, 2]) * 0.5).dtype == np.float32
    assert (ad.array([1, 2]) / 2).dtype == np.float32
    assert (single + np.ones(2)).dtype == np.float64
    assert (single + ad.array([1, 2])).dtype == np.float32


def test_operators_of_numpy_arrays_and_values_are_operations() -> None:
    x, y = ad.array([1.0, 2.0]), np.array([4.0, 5.0], np.float32)
    operations: list[Any] = [
        lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: a // b,
        lambda a, b: a % b, lambda a, b: a**b, lambda a, b: a @ b, lambda a, b: a == b, lambda a, b: a != b,
        lambda a, b: a < b, lambda a, b: a <= b, lambda a, b: a > b, lambda a, b: a >= b,
    ]  # fmt: skip
    for operation in operations:
        for left, right in ((x, y), (y, x), (np.float64(3), x), (np.float32(3), x), (np.int64(3), x)):
            if operation is operations[7] and np.ndim(left) == 0:
                continue
            found = operation(left, right)
            assert isinstance(found, ad.Array)
            assert found.dtype in (np.float32, np.bool_)
            np.testing.assert_allclose(found, operation(np.asarray(left, "float32"), np.asarray(right)), rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: np.exp(x), "np.exp: found an adtrain array, expected NumPy arrays; use ad.ops.exp"),
        (lambda x: np.negative(x), "np.negative: found an adtrain array, expected NumPy arrays; use ad.ops.neg"),
        (
            lambda x: np.spacing(x),
            "np.spacing: found an adtrain array, expected NumPy arrays; convert it with x.numpy()",
        ),
        (
            lambda x: np.add.reduce(x),
            "np.add: found an adtrain array, expected NumPy arrays; convert it with x.numpy()",
        ),
        (
            lambda x: np.add(np.ones(2), x, out=np.ones(2)),
            "np.add: found an adtrain array and a NumPy array as output; write y = y + x",
        ),
        (lambda x: ad.grad(lambda x: np.exp(x).sum())(x), "np.exp: found an adtrain array, expected NumPy arrays; use"),
    ],
)
def test_a_function_of_numpy_says_which_operation_to_use(call: Any, message: str) -> None:
    with pytest.raises(ad.DTypeError) as caught:
        call(ad.array([1.0, 2.0]))
    assert str(caught.value).startswith(message)


def test_a_number_is_formatted() -> None:
    assert f"{ad.array(3.14159):.3f} {ad.array(7):04d} {ad.array([1, 2])}" == "3.142 0007 array([1, 2], int64)"
    with pytest.raises(ad.ShapeError, match=r"^format: found shape \(2,\) for '\.3f', expected a 0-d array$"):
        f"{ad.array([1.0, 2.0]):.3f}"


def test_an_array_is_an_immutable_copy() -> None:
    source = np.ones(3)
    x = ad.array(source)
    source[0] = 7
    assert x.numpy().tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="read-only"):
        x.numpy()[0] = 2
    for computed in (x + 1, ops.sum(x), stage(lambda x: x + 1)(x), ops.zeros((0, 2))):
        with pytest.raises(ValueError, match="WRITEABLE"):
            computed.numpy().flags.writeable = True
    assert np.asarray(x).flags.c_contiguous
    assert ops.broadcast_to(x, (2, 3)).numpy().flags.c_contiguous


def test_operators_and_methods_agree_with_numpy() -> None:
    a, b = np.array([[1.0, 2.0], [3.0, 5.0]]), np.array([[2.0, 0.5], [1.0, 4.0]])
    x, y = ad.array(a), ad.array(b)
    pairs: list[tuple[Any, Any]] = [
        (x + y, a + b), (x - y, a - b), (x * y, a * b), (x / y, a / b), (x**y, a**b), (x @ y, a @ b),
        (-x, -a), (abs(-x), a),
        (1 + x, 1 + a), (1 - x, 1 - a), (2 * x, 2 * a), (1 / x, 1 / a), (2**x, 2**a), (b @ x, b @ a), (b + x, b + a),
        (x == y, a == b), (x != y, a != b), (x < y, a < b), (x <= y, a <= b), (x > y, a > b), (x >= y, a >= b),
        (x.sum(0), a.sum(0)), (x.mean(), a.mean()), (x.max(1, keepdims=True), a.max(1, keepdims=True)),
        (x.min(), a.min()), (x.prod(), a.prod()), (x.var(), a.var()), (x.std(0, correction=1), a.std(0, ddof=1)),
        (x.argmax(1), a.argmax(1)), (x.argmin(), a.argmin()), (y.argsort(), b.argsort()), (x.ravel(), a.ravel()),
        (x[:, :1].squeeze(1), a[:, 0]), (x.repeat(2, 0), a.repeat(2, 0)), (x.diagonal(1), a.diagonal(1)),
        (x.clip(2, 4), a.clip(2, 4)), (x.any(0), a.any(0)), (x.all(), a.all()),
        (x.reshape(4), a.reshape(4)), (x.reshape(-1, 1), a.reshape(-1, 1)), (x.T, a.T), (x.transpose(1, 0), a.T),
        (x.astype("float32"), a.astype("float32")),
    ]  # fmt: skip
    for ours, expected in pairs:
        np.testing.assert_allclose(ours.numpy(), expected)
        assert ours.dtype == np.asarray(expected).dtype
    assert (len(x), x.ndim, x.size, x.device, float(x[0, 1]), x[1, 1].item()) == (2, 2, 4, "cpu", 2.0, 5.0)


index_items = st.one_of(
    st.integers(-3, 2),
    st.none(),
    st.just(Ellipsis),
    st.slices(3),
    st.slices(5),
    st.builds(slice, st.none(), st.none(), st.just(-2)),
)


@given(st.lists(index_items, max_size=5))
def test_indexing_agrees_with_numpy(items: Any) -> None:
    x = np.arange(60.0).reshape(3, 4, 5)
    try:
        expected = x[tuple(items)]
    except IndexError:
        with pytest.raises(ad.ShapeError, match="indexing"):
            ad.array(x)[tuple(items)]
        return
    np.testing.assert_array_equal(ad.array(x)[tuple(items)].numpy(), expected)


@given(st.lists(index_items, max_size=5), st.integers(0, 5), st.lists(st.integers(-3, 2), min_size=1, max_size=3))
def test_indexing_with_an_array_agrees_with_numpy(items: Any, place: int, indices: list[int]) -> None:
    x = np.arange(60.0).reshape(3, 4, 5)
    index = (*items[:place], np.array(indices), *items[place:])
    try:
        expected = x[index]
    except IndexError:
        with pytest.raises(ad.ShapeError):
            ad.array(x)[index]
        return
    np.testing.assert_array_equal(ad.array(x)[index].numpy(), expected)


array_indices = st.sampled_from(
    [
        np.array([0, -1, 1]),
        np.array([[2], [0]]),
        np.array(1),
        np.zeros(0, np.int32),
        [0, 1, 2],
        np.array([1, 0], np.uint8),
    ]
)
masks = st.sampled_from([np.array([True, False, True]), np.arange(12).reshape(3, 4) % 5 == 1, np.zeros(4, np.bool_)])


@given(st.lists(st.one_of(index_items, array_indices, array_indices, masks), max_size=5))
def test_indexing_with_several_arrays_and_masks_agrees_with_numpy(items: Any) -> None:
    x = np.arange(60.0).reshape(3, 4, 5)
    try:
        expected = x[tuple(items)]
    except IndexError:
        with pytest.raises(ad.ShapeError):
            ad.array(x)[tuple(items)]
        return
    np.testing.assert_array_equal(ad.array(x)[tuple(items)].numpy(), expected)
    # indices that are arguments of a jitted function
    places = [i for i, item in enumerate(items) if isinstance(item, np.ndarray) and item.dtype != np.bool_]

    def chosen(x: Any, *arrays: Any) -> Any:
        index = list(items)
        for i, array in zip(places, arrays, strict=True):
            index[i] = array
        return x[tuple(index)]

    traced = stage(chosen, ())(ad.array(x), *(ad.array(items[i]) for i in places))
    np.testing.assert_array_equal(traced.numpy(), expected)


@pytest.mark.parametrize("wrap", [lambda f: f, ad.jit])
def test_an_index_that_is_out_of_range_for_its_own_axis_is_an_error(wrap: Any) -> None:
    """Also if the element that it would lead to exists."""
    x, row = ad.array(np.ones((3, 4))), ad.array([0, 1])
    for column in ([0, 4], [-5, 0]):
        with pytest.raises(ad.ShapeError, match=r"index (4|-5|12) is out of range for length (4|12)"):
            wrap(lambda x, i, j: x[i, j])(x, row, ad.array(column)).numpy()


def test_functions_of_numpy_take_arrays() -> None:
    x = ad.array([[1.0, 4.0], [2.0, 3.0]])
    assert np.sum(x) == 10
    assert np.max(x, axis=1).tolist() == [4, 3]
    assert np.concatenate([x, x]).shape == (4, 2)
    with pytest.raises(ad.TraceError, match=r"use adtrain\.ops instead of NumPy"):
        ad.grad(lambda x: np.sum(x))(x)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: ad.array(np.ones(2, np.float16)),
            ad.DTypeError,
            "array: found elements of type float16, expected one of",
        ),
        (lambda: ad.array("text"), ad.DTypeError, "array: found elements of type <U4"),
        (lambda: ad.array([[1.0], [1.0, 2.0]]), ad.ShapeError, "array: nested lists have different lengths"),
        (
            lambda: ad.array([1.0], device="tpu"),
            ad.DeviceError,
            "device 'tpu' is not available; this version runs on: cpu, gpu",
        ),
        (lambda: ad.array([1.0, 2.0]).item(), ad.ShapeError, r"item: found shape \(2,\), expected exactly one element"),
        (lambda: ad.array([1, 2], "uint8") * 300, ad.DTypeError, "array: Python integer 300 out of bounds for uint8"),
        (lambda: ad.array([1.0])["a"], ad.DTypeError, "indexing: found str, expected integers"),
        (
            lambda: ad.array([[1.0]])[[0], [0.5]],
            ad.DTypeError,
            "indexing: found an index array of float32, expected integers",
        ),
        (
            lambda: ad.array([[1.0]])[[0, 0], [0, 0, 0]],
            ad.ShapeError,
            r"indexing: shapes \(2,\) and \(3,\) do not broadcast",
        ),
    ],
)
def test_invalid_arrays_raise_errors(make: Any, error: Any, message: Any) -> None:
    with pytest.raises(error, match=message):
        make()


class Point(NamedTuple):
    x: float
    y: float


def test_trees_are_flattened_and_unflattened() -> None:
    built = {"a": [1, (2, None)], "b": Point(3, 4), "c": {}}
    leaves, structure = tree.flatten(built)
    assert leaves == [1, 2, 3, 4]
    assert tree.unflatten(structure, leaves) == built
    assert tree.paths(built) == ["a.0", "a.1.0", "b.x", "b.y"]
    assert tree.map(lambda p, q: p + q, built, built)["b"] == Point(6, 8)
    with pytest.raises(ad.ShapeError, match=r"tree.map: found trees of different structure: .* and list\(\*\)"):
        tree.map(lambda p, q: p, (1,), [1])


def test_hooks_see_scope_and_phase_of_every_operation() -> None:
    seen: list[tuple[str, str, str]] = []

    class Recorder(Hook):
        def before(self, call: Call) -> None:
            seen.append((call.primitive.name, call.scope, call.phase))

    def f(x: Any) -> Any:
        with scope("0.outer"), scope("1.inner"):
            y = ops.exp(x)
        with scope("loss"):
            return y.sum()

    with hook(Recorder()), scope("model"):
        ad.grad(f)(np.ones(2))
        with phase("update"):
            ops.neg(np.ones(1))
    assert ("exp", "model.0.outer.1.inner", "forward") in seen
    assert ("mul", "model.0.outer.1.inner", "backward") in seen
    assert ("broadcast_to", "model.loss", "backward") in seen
    assert seen[-1] == ("neg", "model", "update")
    assert current_scope() == ""
    count = len(seen)
    ops.neg(np.ones(1))
    assert len(seen) == count
