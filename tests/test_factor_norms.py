"""Norms of the gradients of examples by their factors, against those of the gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_samples import everywhere

import adtrain as ad
from adtrain import nn, ops
from adtrain.core import tree
from adtrain.core.staging import stage
from adtrain.curvature import FACTORED
from adtrain.passes import fuse


def sums_of(gradients: Any) -> Any:
    """The sum of the gradients of all examples, and the squared norm of each."""
    leaves = tree.leaves(gradients)
    squares = [ops.sum(g * g, axis=tuple(range(1, g.ndim))) for g in leaves]
    return [ops.sum(g, axis=0) for g in leaves], sum(squares[1:], start=squares[0])


def network(params: Any, x: Any) -> Any:
    return ops.mean(ops.tanh(ops.matmul(ops.tanh(ops.matmul(x, params["a"])), params["b"], transpose_b=True)) ** 2)


@settings(max_examples=8)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 9), st.integers(0, 99))
def test_norms_and_sums_are_those_of_the_gradients(examples: int, rows: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = {"a": rng.normal(size=(6, width)), "b": rng.normal(size=(7, width))}
    x = rng.normal(size=(examples, rows, 6))
    of_examples = lambda params, x: sums_of(ad.per_example_grad(network)(params, x))  # noqa: E731
    found, expected = stage(of_examples, FACTORED)(params, x), of_examples(params, x)
    for one, other in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-11, atol=1e-13)


def lengths(of_examples: Any, model: nn.Module, *shape: int) -> set[tuple[int, ...]]:
    """The shapes of what a factored Program computes for 5 examples of this shape."""
    params, _ = model.init(shape)
    program = stage(of_examples, FACTORED).program(params, np.zeros((5, *shape), np.float32))
    return {v.type.shape for e in program.equations for v in e.outputs}


def of_one(model: nn.Module) -> Any:
    return lambda params, x: ops.mean(ops.square(model(params, ops.reshape(x, (1, *x.shape)))))


def test_no_gradient_of_an_example_is_computed_where_rows_are_few() -> None:
    model = nn.Sequential(nn.Linear(30), nn.Tanh(), nn.Linear(20))
    found = lengths(lambda params, x: sums_of(ad.per_example_grad(of_one(model))(params, x)), model, 40)
    assert {(30, 40), (20, 30)} <= found
    assert found.isdisjoint({(5, 30, 40), (5, 20, 30)})


@pytest.mark.parametrize(
    "other", [lambda g: g, lambda g: ops.exp(g), lambda g: ops.sum(g, axis=1)], ids=["result", "exp", "rows"]
)
def test_gradients_that_are_needed_elsewhere_are_computed(other: Any) -> None:
    model = nn.Linear(20)

    def of_examples(params: Any, x: Any) -> Any:
        gradients = ad.per_example_grad(of_one(model))(params, x)
        return sums_of(gradients), other(gradients["weight"])

    assert (5, 20, 30) in lengths(of_examples, model, 30)


def test_gradients_that_are_smaller_than_gram_matrices_are_computed() -> None:
    model = nn.Linear(4)
    found = lengths(lambda params, x: sums_of(ad.per_example_grad(of_one(model))(params, x)), model, 9, 3)
    assert (5, 4, 3) in found


MODELS = {
    "convolution of many pixels": (nn.Conv2d(3, kernel_size=3, padding=1), (2, 9, 8)),
    "convolution of few pixels": (nn.Conv2d(24, kernel_size=3, stride=2, padding=1), (16, 4, 4)),
    "dilated convolution of few pixels": (nn.Conv2d(24, kernel_size=(2, 3), padding=(1, 2), dilation=2), (16, 4, 3)),
    "grouped convolution": (nn.Conv2d(24, kernel_size=3, groups=2), (16, 4, 4)),
    "pooled convolution": (nn.Sequential(nn.Conv2d(8, kernel_size=3), nn.ReLU(), nn.MaxPool2d(2)), (4, 12, 12)),
    "winograd": (nn.Conv2d(16, kernel_size=3, padding=1), (16, 10, 9)),
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", MODELS)
def test_norms_of_convolutions_are_those_of_the_gradients(name: str) -> None:
    model, shape = MODELS[name]
    params, _ = model.init(shape)
    x = np.random.default_rng(0).normal(size=(9, *shape)).astype(np.float32)
    of_examples = lambda params, x: sums_of(ad.per_example_grad(of_one(model))(params, x))  # noqa: E731
    found, expected = stage(of_examples, (*FACTORED, fuse))(params, x), of_examples(params, x)
    for one, other in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-5 * np.abs(other.numpy()).max())


def test_examples_are_computed_as_those_of_a_batch() -> None:
    model, shape = MODELS["pooled convolution"]
    params, _ = model.init(shape)
    norms = lambda params, x: sums_of(ad.per_example_grad(of_one(model))(params, x))[1]  # noqa: E731
    program = stage(norms, (*FACTORED, fuse)).program(params, np.zeros((9, *shape), np.float32))
    names = [e.name for e in everywhere(program)]
    assert "conv2d_weight_grad_by_image_pooled" in names  # no reshape is between pooling, mask and gradient


def test_no_gradient_of_a_kernel_or_table_is_computed_where_pixels_or_tokens_are_few() -> None:
    norms = lambda model: lambda params, x: sums_of(ad.per_example_grad(of_one(model))(params, x))[1]  # noqa: E731
    model, shape = MODELS["convolution of few pixels"]
    assert (5, 24, 16, 3, 3) not in lengths(norms(model), model, *shape)
    table = nn.Sequential(nn.Embedding(50, embedding_dim=6), nn.Linear(4))
    found = lengths(norms(table), table, 5)
    assert (5, 5, 5) in found
    assert found.isdisjoint({(5, 50, 6), (250, 6)})


@settings(max_examples=8)
@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=4), st.integers(0, 99))
def test_norms_of_tables_are_those_of_the_gradients(tokens: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, weights = rng.normal(size=(30, 3)), rng.normal(size=(4, 3))
    of_row = lambda table, tokens: ops.sum(ops.embedding(tokens, table) ** 3 * weights)  # noqa: E731
    norms = lambda table, tokens: sums_of(ad.per_example_grad(of_row)(table, tokens))[1]  # noqa: E731
    found, expected = stage(norms, FACTORED)(table, np.array(tokens)), norms(table, np.array(tokens))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-11)
