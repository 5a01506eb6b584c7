"""Trees: the order of keys, dataclasses, registered classes, and the functions that take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adtrain as ad
from adtrain import nn, ops, optim
from adtrain.core.static_key import Template
from adtrain.data.split import Rows


@dataclass(frozen=True)
class Layer:
    weight: Any
    bias: Any

    def __post_init__(self) -> None:
        assert isinstance(self.weight, (ad.Value, np.ndarray, float, int))


@dataclass
class Empty:
    pass


class Pair(NamedTuple):
    first: Any
    second: Any


class Named:
    """Arrays by name, as no dict."""

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays


ad.tree.register(
    Named,
    lambda x: (tuple(x.arrays.values()), tuple(x.arrays)),
    lambda names, arrays: Named(**dict(zip(names, arrays, strict=True))),
)

ARRAYS = {"a": np.ones(2, np.float32), "b": np.arange(3, dtype=np.float32)}


def shuffled(tree: Any, rng: np.random.Generator) -> Any:
    """The same tree with the keys of all dicts in another order."""
    if isinstance(tree, dict):
        return {key: shuffled(tree[key], rng) for key in rng.permutation(list(tree))}
    return type(tree)(shuffled(x, rng) for x in tree) if isinstance(tree, (list, tuple)) else tree


trees = st.recursive(
    st.floats(-8, 8),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner) | st.lists(inner) | st.tuples(inner, inner),
)


@given(trees, st.integers(0, 99))
def test_trees_with_keys_in_another_order_are_mapped_together(tree: Any, seed: int) -> None:
    other = shuffled(tree, np.random.default_rng(seed))
    assert ad.tree.map(lambda x, y: (x, y)[1], tree, other) == tree
    assert set(ad.tree.leaves(ad.tree.map(lambda x, y: x - y, tree, other))) <= {0.0}


@pytest.mark.parametrize(
    ("tree", "other"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "c": 2}),
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"a": [1], "b": 2}, {"b": 2, "a": (1,)}),
        ({"a": 1, "b": None}, {"b": 1, "a": None}),
        (Layer(1, 2), Pair(1, 2)),
        (Named(a=1), Named(b=1)),
        ([1, 2], [1]),
    ],
)
def test_trees_of_another_structure_are_refused(tree: Any, other: Any) -> None:
    with pytest.raises(ad.ShapeError, match="found trees of different structure"):
        ad.tree.map(lambda x, y: x, tree, other)


@pytest.mark.parametrize(
    "tree",
    [{"x": Layer(1.0, 2.0)}, Named(a=1.0, b=Layer(2.0, [3.0])), Pair(None, {"a": 1.0}), Empty()],
    ids=lambda x: type(x).__name__,
)
def test_a_tree_is_taken_apart_and_put_together(tree: Any) -> None:
    leaves, structure = ad.tree.flatten(tree)
    assert leaves == [1.0, 2.0, 3.0][: len(leaves)]
    again = ad.tree.unflatten(structure, leaves)
    assert type(again) is type(tree)
    assert ad.tree.flatten(again) == (leaves, structure)
    template = Template(structure)
    assert template.flatten(tree) == leaves
    assert ad.tree.flatten(template.unflatten(leaves)) == (leaves, structure)
    assert template.flatten([1.0]) is None
    assert len(ad.tree.paths(tree)) == len(leaves)


def test_paths_have_field_names() -> None:
    assert ad.tree.paths({"x": Layer(1, [2]), "y": Pair(3, 4)}) == ["x.weight", "x.bias.0", "y.first", "y.second"]


def test_layers_and_optimizers_are_leaves() -> None:
    for x in (nn.Linear(3), nn.Sequential(nn.ReLU()), optim.Adam()):
        assert ad.tree.leaves([x]) == [x]


def test_a_dataclass_that_stands_for_an_array_is_a_leaf() -> None:
    rows = Rows(np.arange(6.0).reshape(3, 2), np.array([2, 0]))
    assert ad.tree.leaves([rows]) == [rows]
    assert ad.tree.map(ad.array, [rows])[0].numpy().tolist() == [[4, 5], [0, 1]]


def of_kinds(arrays: dict[str, Any]) -> Iterator[Any]:
    yield Layer(arrays["a"], arrays["b"])
    yield Named(**arrays)
    yield {"x": Layer(arrays["a"], None), "y": arrays["b"]}


@pytest.mark.parametrize("kind", range(3))
def test_gradients_and_jitted_functions_take_dataclasses_and_registered_classes(kind: int) -> None:
    x = list(of_kinds(ARRAYS))[kind]

    def loss(x: Any) -> Any:
        return sum((ops.square(leaf).sum() for leaf in ad.tree.leaves(x)), start=ops.zeros(()))

    for f in (ad.grad(loss), ad.jit(ad.grad(loss)), ad.grad(ad.jit(loss))):
        for _ in range(2):
            found = f(x)
            assert type(found) is type(x)
            for a, b in zip(ad.tree.leaves(found), ARRAYS.values(), strict=True):
                np.testing.assert_allclose(a, 2 * b)


def test_the_order_of_keys_matters_to_no_transformation() -> None:
    x, swapped = dict(ARRAYS), dict(reversed(ARRAYS.items()))

    def f(x: Any) -> Any:
        return ops.square(x["a"]).sum() * x["b"].sum()

    for direction in (x, swapped):
        assert ad.jvp(f, (x,), (direction,))[1].item() == ad.jvp(f, (x,), (x,))[1].item()
        product = ad.hvp(f, (x,), (direction,))
        np.testing.assert_array_equal(product["a"], ad.hvp(f, (x,), (x,))["a"])
    _, pullback = ad.vjp(lambda x: {"u": x["a"] * 2, "v": x["b"] * 3}, x)
    (found,) = pullback({"v": np.ones(3, np.float32), "u": np.ones(2, np.float32)})
    assert found["a"].numpy().tolist() == [2, 2]
    jitted = ad.jit(f)
    assert jitted(x).item() == jitted(swapped).item() == 6
    optimizer = optim.SGD(0.5)
    params = ad.tree.map(ad.array, x)
    updated, _ = optimizer.update(params, ad.tree.map(ad.array, swapped), optimizer.init(params))
    assert updated["b"].numpy().tolist() == [0, 0.5, 1]


def test_a_class_is_registered_once() -> None:
    for kind in (Named, dict):
        with pytest.raises(ad.AdtrainError, match=f"^tree.register: {kind.__name__} is a tree already$"):
            ad.tree.register(kind, lambda x: ((), None), lambda data, children: None)
