"""prod, tensordot, kron, cross, std, argmin and pad with negative widths, against PyTorch and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled_parity import check_all
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import adtrain as ad
from adtrain import ops

SOME_ZEROS = st.sampled_from([0.0, 0.0, 0.5, -1.5, 2.0, 3.0])
SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6)


@pytest.mark.needs_torch
@given(x=arrays.arrays("float64", SHAPES, elements=SOME_ZEROS), axis=st.sampled_from([None, 0, -1]))
def test_derivatives_of_products_with_zeros_are_those_of_pytorch(x: np.ndarray, axis: int | None) -> None:
    torch = pytest.importorskip("torch")
    leaf = torch.tensor(x, requires_grad=True)
    expected = torch.prod(leaf) if axis is None else torch.prod(leaf, axis)
    np.testing.assert_allclose(ops.prod(x, axis).numpy(), expected.detach().numpy(), rtol=1e-12)
    u, v = (np.random.default_rng(1).normal(size=shape) for shape in (tuple(expected.shape), x.shape))
    slope = lambda x: ad.vjp(lambda x: ops.prod(x, axis), x)[1](u)[0]  # noqa: E731
    (first,) = torch.autograd.grad(expected, leaf, torch.tensor(u), create_graph=True)
    np.testing.assert_allclose(slope(x).numpy(), first.detach().numpy(), rtol=1e-12, atol=1e-14)
    if not first.requires_grad:  # the derivative of a product of one element is constant
        return
    (second,) = torch.autograd.grad(first, leaf, torch.tensor(v), materialize_grads=True)
    np.testing.assert_allclose(ad.vjp(slope, x)[1](v)[0].numpy(), second.numpy(), rtol=1e-11, atol=1e-13)


@given(
    x=arrays.arrays(st.sampled_from(["float32", "int32", "uint8", "bool"]), SHAPES, elements=st.integers(0, 1)),
    axes=st.sampled_from([None, (), 0, (0, -1)]),
    keepdims=st.booleans(),
)
def test_products_over_axes_are_those_of_numpy(x: np.ndarray, axes: Any, keepdims: bool) -> None:
    axes = 0 if axes == (0, -1) and x.ndim == 1 else axes
    expected = np.prod(x, axes, keepdims=keepdims, dtype=None if x.dtype.kind == "f" else np.int64)
    found = ops.prod(x, axes, keepdims).numpy()
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected, strict=True)


def test_products_propagate_nan_and_overflow() -> None:
    assert np.isnan(ops.prod(np.array([0.0, np.nan, 2.0])).item())
    assert ops.prod(np.array([1e300, 1e300, 3.0])).item() == np.inf
    assert ops.prod(np.array([2**62, 2])).item() == -(2**63)


def test_the_gradient_of_a_standard_deviation_of_zero_is_zero() -> None:
    x = np.array([[2.0, 2.0, 2.0], [1.0, 2.0, 3.0]])
    value, slope = ad.value_and_grad(lambda x: ops.std(x, 1, correction=1).sum())(x)
    assert value.item() == pytest.approx(1)
    np.testing.assert_allclose(slope.numpy(), np.array([[0, 0, 0], [-0.5, 0, 0.5]]), atol=1e-15)
    assert np.isfinite(ad.hessian(lambda x: ops.std(x))(x[0]).numpy()).all()
    assert np.isnan(ops.std(np.array([1.0, np.nan])).item())


LIMITS: dict[str, tuple[Any, ...]] = {
    "float64": (0.0, -0.0, 1.5, -np.inf, np.inf, np.nan),
    "int64": (0, -1, 2**63 - 1, -(2**63)),
    "uint8": (0, 1, 255),
    "bool": (False, True),
}


@pytest.mark.compiled
def test_argmin_is_the_first_smallest_element_or_nan() -> None:
    functions: dict[str, Any] = {}
    for dtype, elements in LIMITS.items():
        x = np.random.default_rng(2).choice(np.array(elements, dtype), (40, 3))
        for axis in (None, 0, 1):
            np.testing.assert_array_equal(ops.argmin(x, axis).numpy(), np.argmin(x, axis))
            assert ops.argmin(x, axis, keepdims=True).shape == np.argmin(x, axis, keepdims=True).shape
            functions[f"{dtype} {axis}"] = (lambda x, axis=axis: ops.argmin(x, axis), [x])
    check_all(functions, 0)


WIDTHS = st.tuples(st.integers(-2, 3), st.integers(-2, 3))


@given(widths=st.tuples(WIDTHS, WIDTHS), dtype=st.sampled_from(["float64", "uint8"]))
def test_negative_widths_of_pad_cut_off_elements(widths: Any, dtype: str) -> None:
    x = np.arange(1, 21).astype(dtype).reshape(4, 5)
    rows, columns = (slice(max(-low, 0), n - max(-high, 0)) for n, (low, high) in zip(x.shape, widths, strict=True))
    added = [[max(w, 0) for w in pair] for pair in widths]
    np.testing.assert_array_equal(
        ops.pad(x, widths, 7).numpy(), np.pad(x[rows, columns], added, constant_values=7), strict=True
    )


@given(
    pairs=st.integers(0, 2).flatmap(
        lambda n: st.tuples(
            st.permutations(range(3)).map(lambda p: p[:n]), st.permutations(range(3)).map(lambda p: p[:n])
        )
    ),
    negative=st.booleans(),
    empty=st.booleans(),
)
def test_tensordot_is_that_of_numpy(pairs: Any, negative: bool, empty: bool) -> None:
    rng = np.random.default_rng(3)
    a = rng.normal(size=(2, 3, 4))
    lengths = [5, 6, 2]
    for i, j in zip(*pairs, strict=True):
        lengths[j] = a.shape[i]
    if empty:
        a = a[:0] if 0 not in pairs[0] else a
    b = rng.normal(size=lengths)
    axes: Any = tuple([i - 3 if negative else i for i in part] for part in pairs)
    np.testing.assert_allclose(ops.tensordot(a, b, axes).numpy(), np.tensordot(a, b, axes), rtol=1e-12, atol=1e-13)
    assert ops.tensordot(a, b, 0).shape == (*a.shape, *b.shape)


def test_tensordot_over_no_elements_is_zero() -> None:
    assert ops.tensordot(np.ones((2, 0)), np.ones((0, 3)), 1).numpy().tolist() == [[0.0] * 3] * 2


def test_an_axis_of_tensordot_may_be_a_number() -> None:
    a, b = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(ops.tensordot(a, b, (1, 1)).numpy(), a @ b.T)


@given(a=arrays.arrays("int64", SHAPES, elements=st.integers(-9, 9)),
       b=arrays.arrays("int64", SHAPES, elements=st.integers(-9, 9)))  # fmt: skip
def test_kron_is_that_of_numpy(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(ops.kron(a, b).numpy(), np.kron(a, b), strict=True)
    assert ops.kron(a, 2).shape == a.shape


@given(
    shapes=st.sampled_from([((3,), (3,)), ((2, 3), (3,)), ((2, 1, 3), (4, 3)), ((0, 3), (0, 3))]),
    integers=st.booleans(),
)
def test_cross_is_that_of_numpy(shapes: Any, integers: bool) -> None:
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-9, 9, s) if integers else rng.normal(size=s) for s in shapes)
    np.testing.assert_allclose(ops.cross(a, b).numpy(), np.cross(a, b), rtol=1e-12)


def test_cross_along_another_axis_is_that_of_the_transpose() -> None:
    a, b = np.random.default_rng(5).normal(size=(2, 3, 4))
    np.testing.assert_array_equal(ops.cross(a, b, 0).numpy(), np.cross(a.T, b.T).T)


@pytest.mark.compiled
def test_compiled_products_equal_eager_ones() -> None:
    """Even and odd numbers of elements, one, and none."""
    functions: dict[str, Any] = {}
    for n in (0, 1, 3, 8):
        x = np.random.default_rng(n).uniform(0.5, 2, (3, n)).astype(np.float32)
        functions[f"prod {n}"] = (lambda x: (ops.prod(x), ops.prod(x, 1), ad.grad(ops.prod)(x)), [x])
        if n:
            functions[f"std {n}"] = (lambda x: (ops.std(x), ops.std(x, 0, keepdims=True)), [x])
    check_all(functions, 2e-5)
