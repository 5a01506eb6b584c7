"""Gradients of single examples and eigenvalues of Hessians, against loops and dense matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops


def test_gradients_of_examples_are_those_of_each_alone() -> None:
    rng = np.random.default_rng(0)
    params, x, y = {"w": rng.normal(size=4)}, rng.normal(size=(6, 4)), rng.normal(size=6)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return ops.square(ops.matmul(x, params["w"]) - y)

    found = ad.per_example_grad(loss)(params, x, y)["w"].numpy()
    np.testing.assert_allclose(found, 2 * (x @ params["w"] - y)[:, None] * x, rtol=1e-13)
    swapped = ad.per_example_grad(lambda x, y, params: loss(params, x, y), -1)(x, y, params)["w"].numpy()
    np.testing.assert_array_equal(swapped, found)


def test_eigenvalues_are_the_largest_of_the_dense_hessian() -> None:
    rng = np.random.default_rng(1)
    params = {"w": rng.normal(size=(5, 4)), "b": rng.normal(size=5)}
    x = rng.normal(size=(30, 4))

    def loss(params: Any, x: Any) -> Any:
        return ops.mean(ops.sin(ops.matmul(x, params["w"], transpose_b=True) + params["b"]).sum(1) ** 2)

    blocks = ad.hessian(loss)(params, x)
    dense = np.block([[blocks[a][b].numpy().reshape(params[a].size, -1) for b in "wb"] for a in "wb"])
    expected = np.linalg.eigvalsh(dense)
    expected = expected[np.argsort(-np.abs(expected))][:6]
    np.testing.assert_allclose(ad.top_eigenvalues(loss, 6, tolerance=1e-10)(params, x), expected, rtol=1e-9)


def test_repeated_eigenvalues_are_found_where_the_first_vectors_span_too_little() -> None:
    found = ad.top_eigenvalues(lambda x: 3.0 * (x[:2] ** 2).sum() + 0.0 * x.sum(), 3)(np.zeros(7))
    np.testing.assert_allclose(found, [6, 6, 0], atol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ad.top_eigenvalues(ops.sum, 0), ad.OptionError, "top_eigenvalues: count is 0, expected an integer"),
        (lambda: ad.top_eigenvalues(ops.sum, 4)(np.ones(3)), ad.OptionError, "found 3 elements, expected at least 4"),
        (
            lambda: ad.top_eigenvalues(lambda x: (1.0 / x).sum(), 1)(np.zeros(3)),
            ad.AdtrainError,
            "a product with the Hessian is not finite",
        ),
    ],
)
def test_invalid_uses_are_one_line(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message) as raised, np.errstate(all="ignore"):
        call()
    assert "\n" not in str(raised.value)
