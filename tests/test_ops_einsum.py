"""einsum and norm are those of NumPy, and say what is wrong with their arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops
from adtrain.core.trace import Call, Hook, hook

LENGTHS = {"a": 2, "b": 3, "c": 1, "d": 4, "e": 0}


@st.composite
def contractions(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    """Subscripts of one to four operands, and their shapes."""
    parts = draw(st.lists(st.text(draw(st.sampled_from(["abcd", "abe"])), max_size=3), min_size=1, max_size=4))
    ellipsis = draw(st.booleans())
    text, shapes = [], []
    for part in parts:
        leading = draw(st.sampled_from([(), (3,), (2, 1), (2, 3)])) if ellipsis else ()
        shapes.append((*leading, *(LENGTHS[label] for label in part)))
        text.append(("..." if ellipsis else "") + part)
    subscripts = ",".join(text)
    if draw(st.booleans()):
        known = sorted({*"".join(parts)})
        chosen = draw(st.permutations(known))[: draw(st.integers(0, len(known)))]
        place = draw(st.integers(0, len(chosen))) if ellipsis else 0
        subscripts += "->" + "".join(chosen[:place]) + "..." * ellipsis + "".join(chosen[place:])
    return subscripts, shapes


@given(contractions(), st.sampled_from(["float64", "int32"]))
def test_einsum_is_that_of_numpy(contraction: Any, dtype: str) -> None:
    subscripts, shapes = contraction
    rng = np.random.default_rng(len(subscripts))
    operands = [np.asarray(rng.integers(-4, 5, shape)).astype(dtype) for shape in shapes]
    expected = np.einsum(subscripts, *operands)
    found = ops.einsum(subscripts, *operands).numpy()
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected, strict=True)


def test_an_axis_of_length_1_is_broadcast() -> None:
    a, b = np.arange(6.0).reshape(2, 3), np.array([[10.0], [1.0]])
    np.testing.assert_array_equal(ops.einsum("ij,ij->i", a, b).numpy(), (a * b).sum(1))
    np.testing.assert_array_equal(ops.einsum("ij,ij->ij", a, b).numpy(), a * b)


def test_a_product_whose_axes_are_in_order_is_one_matrix_product() -> None:
    calls: list[str] = []

    class Recorder(Hook):
        def after(self, call: Call) -> None:
            calls.append(call.primitive.name)

    a, b = ad.array(np.ones((2, 3, 4))), ad.array(np.ones((2, 5, 4)))
    with hook(Recorder()):
        ops.einsum("bik,bjk->bij", a, b)
        ops.einsum("bki,bjk->bij", a, ad.array(np.ones((2, 5, 3))))
    assert calls == ["matmul", "matmul"]


def test_the_order_of_several_products_needs_few_operations() -> None:
    calls: list[int] = []

    class Recorder(Hook):
        def after(self, call: Call) -> None:
            calls.append(call.primitive.cost(call.args, call.params).flops)

    a, b, c = (np.ones(shape) for shape in ((50, 40), (40, 30), (30, 1)))
    with hook(Recorder()):
        ops.einsum("ij,jk,kl->il", a, b, c)
    assert sum(calls) == 2 * (40 * 30 + 50 * 40)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.einsum("ij,jk", x), "einsum: 'ij,jk' has 2 operands, found 1"),
        (lambda x: ops.einsum("ijk->k", x), r"einsum: 'ijk' in 'ijk->k' does not fit shape \(2, 3\)"),
        (lambda x: ops.einsum("...ijk->k", x), r"einsum: '...ijk' in '...ijk->k' does not fit shape \(2, 3\)"),
        (lambda x: ops.einsum("ij->k", x), "einsum: axis 'k' of the result is in no operand of 'ij->k'"),
        (lambda x: ops.einsum("ij->ii", x), "einsum: the result of 'ij->ii' has an axis twice"),
        (lambda x: ops.einsum("ii", x), "einsum: axis 'i' has lengths 2 and 3 in one operand"),
        (lambda x: ops.einsum("ij,jk", x, x), "einsum: axis 'j' has lengths 3 and 2"),
        (lambda x: ops.einsum("...j->j", x), "einsum: the result of '...j->j' has no '...', expected"),
        (lambda x: ops.einsum("i1", x), "einsum: found subscripts 'i1', expected letters, '...', ',' and one '->'"),
        (lambda x: ops.einsum("ij"), "einsum: found no operands, expected at least one"),
        (lambda x: ops.einsum(x, [0, 1]), "einsum: found subscripts of type Array, expected text first, as in einsum"),
        (lambda x: ops.einsum("ij", x > 0), "einsum: found bool, expected numbers; use astype"),
        (lambda x: ops.norm(x, "nuc"), "norm: ord 'nuc' of matrices needs singular values, which adtrain does not"),
        (lambda x: ops.norm(x, 3), "norm: found ord 3 for matrices, expected None, 'fro', 1, -1, inf or -inf"),
        (lambda x: ops.norm(x, "fro", 0), "norm: found ord 'fro' for vectors, expected a number"),
        (lambda x: ops.norm(x, axis=(1, -1)), r"norm: found axes \(1, 1\) of shape \(2, 3\), expected one axis or two"),
        (lambda x: ops.norm(x, axis=2), "norm: axis 2 is out of range for an array of 2 dimensions"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(call: Any, message: str) -> None:
    with pytest.raises(ad.AdtrainError, match="^" + message.replace("...", r"\.\.\.")) as caught:
        call(ad.array(np.ones((2, 3))))
    assert "\n" not in str(caught.value)


INFINITE = float("inf")


@given(
    shape=st.sampled_from([(4,), (3, 4), (2, 3, 4)]),
    ord=st.sampled_from([None, "fro", 0, 1, 2, -1, -2, 2.5, INFINITE, -INFINITE]),
    axis=st.sampled_from([None, 0, -1, (0, 1), (2, 0), (-1, -2)]),
    keepdims=st.booleans(),
)
def test_norm_is_that_of_numpy(shape: tuple[int, ...], ord: Any, axis: Any, keepdims: bool) -> None:
    x = np.random.default_rng(6).normal(size=shape)
    try:
        expected = np.linalg.norm(x, ord, axis, keepdims)
    except (ValueError, TypeError):
        expected = None
    matrices = np.size(axis) == 2 if axis is not None else len(shape) == 2
    if expected is None or (matrices and ord in (2, -2)):
        with pytest.raises(ad.AdtrainError, match=r"^norm: "):
            ops.norm(x, ord, axis, keepdims)
        return
    found = ops.norm(x, ord, axis, keepdims).numpy()
    assert np.shape(expected) == found.shape
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_gradient_of_a_norm_of_zeros_is_zero() -> None:
    x = np.array([[0.0, 0.0], [3.0, 4.0]])
    for p, slope in ((None, [0.6, 0.8]), (3, [9 / 91 ** (2 / 3), 16 / 91 ** (2 / 3)])):
        found = ad.grad(lambda x, p=p: ops.norm(x, p, 1).sum())(x).numpy()
        np.testing.assert_allclose(found, [[0, 0], slope], rtol=1e-12)
    for power in (0.5, 1.5, -1):
        assert ad.grad(lambda x, p=power: ops.norm(x, p))(np.zeros(3)).numpy().tolist() == [0, 0, 0]
        beside = ad.grad(lambda x, p=power: ops.norm(x, p))(np.array([0.0, 2.0])).numpy()
        np.testing.assert_allclose(beside, [0, power > 0], rtol=1e-12)
    assert ops.norm(ad.array([3, 4])).numpy() == np.float32(5)
