"""`adtrain.save` and `adtrain.load` of trees of arrays."""

from __future__ import annotations

import pickle
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from training_runs import prepare

import adtrain as ad
from adtrain import nn, optim, training
from adtrain.api import model
from adtrain.core import tree
from adtrain.core.types import DTYPES
from adtrain.training import RunFolder, tensor_file

pytestmark = pytest.mark.unfused

KINDS = st.sampled_from(sorted(DTYPES, key=str))
LEAVES = KINDS.flatmap(lambda kind: arrays.arrays(kind, arrays.array_shapes(min_dims=0)))
KEYS = st.integers() | st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1)
TREES = st.recursive(
    LEAVES | st.none(),
    lambda x: st.lists(x, max_size=3) | st.tuples(x, x) | st.dictionaries(KEYS, x, max_size=3),
    max_leaves=6,
)


def same(x: Any, y: Any) -> bool:
    """Whether two trees have the same structure, types and bytes."""

    def content(leaf: Any) -> tuple[Any, ...]:
        found = np.asarray(leaf)
        return found.dtype, found.shape, found.tobytes()

    same_leaves = list(map(content, tree.leaves(x))) == list(map(content, tree.leaves(y)))
    return same_leaves and tree.flatten(x)[1] == tree.flatten(y)[1]


@settings(max_examples=25)  # each one writes a file to the disk
@given(TREES)
def test_a_tree_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, given: Any) -> None:
    path, names = tmp_path_factory.getbasetemp() / "tree.safetensors", tree.paths(given)
    if len(set(names)) < len(names):  # such as the keys 1 and "1" of one dict
        with pytest.raises(ad.AdtrainError, match="found two arrays of this name"):
            ad.save(path, given)
        return
    ad.save(path, given)
    assert same(ad.load(path), given)
    assert same(ad.load(path, like=given), given)


def test_classes_in_a_tree_are_read_by_a_tree_of_the_same_structure(tmp_path: Path) -> None:
    params, state = nn.Sequential(nn.Linear(3), nn.BatchNorm1d()).init(4)
    given = {"state": training.TrainState(params, state, optim.Adam(1e-3).init(params))}
    ad.save(tmp_path / "x", given)
    with pytest.raises(ad.AdtrainError, match="x: found a TrainState, which only its class can build; give a tree of"):
        ad.load(tmp_path / "x")
    assert same(ad.load(tmp_path / "x", like=given), given)
    with pytest.raises(ad.AdtrainError, match="x: does not fit the tree in like=: missing "):
        ad.load(tmp_path / "x", like=params)


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickles_are_refused_and_not_run(tmp_path: Path) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "x.pkl").write_bytes(pickle.dumps({"w": Trap(tmp_path / "touched")}, protocol))
        with pytest.raises(ad.AdtrainError, match=r"x.pkl: cannot be read as safetensors \("):
            ad.load(tmp_path / "x.pkl")
    np.save(tmp_path / "x.npy", np.array([Trap(tmp_path / "touched")]), allow_pickle=True)
    with pytest.raises(ad.AdtrainError, match=r"x.npy: cannot be read as safetensors \("):
        ad.load(tmp_path / "x.npy")
    assert not (tmp_path / "touched").exists()


def is_structure(found: Any) -> bool:
    """Whether this is the structure of a tree of the arrays `a` and `b`."""
    match found:
        case "a" | "b" | ["NoneType", []]:
            return True
        case ["dict" | "tuple", [*pairs]]:
            return all(
                isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], (str, int)) and is_structure(pair[1])
                for pair in pairs
            )
    return False


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["a", "b", "dict", "tuple", "NoneType", "X()"]),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["a", "dict"]), x, max_size=2),
))  # fmt: skip
def test_a_tampered_structure_is_a_tree_or_an_error_of_one_line(
    tmp_path_factory: pytest.TempPathFactory, structure: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "tampered.safetensors"
    tensors = {name: np.zeros(2, np.float32) for name in "ab"}
    path.write_bytes(tensor_file.encode(tensors, model.TreeMetadata(model.KIND, structure)))
    with nullcontext() if is_structure(structure) else pytest.raises(ad.AdtrainError) as error:
        ad.load(path)
    if error is not None:
        assert re.fullmatch(re.escape(f"{path}: ") + "[^\n]+", str(error.value))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 0.1}, r"save: lr: found a float, expected an array: ad.array\(x\)"),
        ({"a.b": np.ones(1), "a": {"b": np.ones(1)}}, "save: a.b: found two arrays of this name, or a reserved one"),
        ({"__metadata__": np.ones(1)}, "save: __metadata__: found two arrays of this name, or a reserved one"),
        ({"a": np.ones(1, np.float16)}, "save: a: found float16, expected one of float32, "),
        ({(1, 2): np.ones(1)}, r"save: found the key \(1, 2\), expected strings and integers as keys"),
    ],
)
def test_a_tree_that_cannot_be_stored_is_refused(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(ad.AdtrainError, match=f"^{message}"):
        ad.save(tmp_path / "x", given)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_run_and_no_tree_is_refused(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "training.epochs=1")
    folder = RunFolder.create(experiment, tmp_path / "run")
    training.run_in_folder(folder, experiment)
    wrong = {
        "none": "none: found nothing, expected the folder of a run, or a file that adtrain.save wrote",
        "data": "data: found no config.yaml, expected the folder of a run of adtrain train",
        "tiny.yaml": r"tiny.yaml: cannot be read as safetensors \(",
        "run/model.safetensors": "model.safetensors: is a file of a run, expected one of adtrain.save",
        "run/last.safetensors": "last.safetensors: is a file of a run, expected one of adtrain.save",
    }
    for name, message in wrong.items():
        with pytest.raises(ad.AdtrainError, match=message):
            ad.load(tmp_path / name)
    paths: dict[Any, str] = {"": "found an empty path", 3: "found an object of type int, expected a path"}
    for path, message in paths.items():
        with pytest.raises(ad.AdtrainError, match=f"save: path: {message}"):
            ad.save(path, np.ones(1))
        with pytest.raises(ad.AdtrainError, match=f"load: path: {message}"):
            ad.load(path)
    with pytest.raises(ad.AdtrainError, match=r"run: found the folder of a run, expected a file of adtrain.save"):
        ad.load(tmp_path / "run", like={})
    assert ad.load(tmp_path / "run").image_shape == (1, 6, 6)
