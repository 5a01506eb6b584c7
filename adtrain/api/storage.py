"""Files of trees of arrays, in the format safetensors: names, types and numbers, no code."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adtrain.api.model import Model, as_path
from adtrain.config.problems import shortened
from adtrain.core import tree
from adtrain.core.array import Array, array, type_with_article
from adtrain.core.backend import usable_device
from adtrain.core.errors import AdtrainError, with_article
from adtrain.core.tree import TreeDef
from adtrain.files import write_atomic
from adtrain.training import model_file, tensor_file
from adtrain.training.checkpoint import Kind
from adtrain.training.tensor_file import TensorFile

KIND = "tree"
ROOT = "array"
"""The name of the array of a tree that is one array."""

CONTAINERS: dict[str, Any] = {"dict": dict, "list": list, "tuple": tuple, "NoneType": type(None)}
"""The classes that `load` builds by itself."""


@dataclass(frozen=True)
class TreeMetadata:
    """The structure of a stored tree.

    A leaf is the name of its array. Everything else is a class's name and a list of (key, structure) pairs; None has no
    pairs.
    """

    kind: str
    structure: Any


def save(path: str | os.PathLike[str], arrays: Any) -> None:
    """Write a tree of arrays into a file, in the format safetensors. The same tree gives the same bytes.

    The file holds the old or the new content at any time, never a part.

    Raises:
        AdtrainError: a leaf is not an array, or two leaves have the same name, or the file cannot be written.
    """
    target, tensors = as_path(path, "save: path"), {}
    for name, leaf in _named(arrays, "save").items():
        x = leaf.numpy() if isinstance(leaf, Array) else np.asarray(leaf)
        if x.dtype.name not in tensor_file.NAMES:
            raise AdtrainError(f"save: {name}: found {x.dtype}, expected one of {', '.join(tensor_file.NAMES)}")
        tensors[name] = x.astype(x.dtype.newbyteorder("="), copy=False)
    about = TreeMetadata(KIND, _structure(tree.flatten(arrays)[1], iter(tensors)))
    write_atomic(target, tensor_file.encode(tensors, about))


def load(path: str | os.PathLike[str], *, like: Any = None, device: str = "cpu") -> Any:
    """Read what was trained or saved: the `Model` in a run's folder, or the tree in a file that `save` wrote.

    Args:
        path: the folder or the file.
        like: of a file, a tree of arrays with the same names, shapes and dtypes. It is needed for trees with named
            tuples, dataclasses or registered classes in them; dicts, lists, tuples and None need none.
        device: where the arrays are put: "cpu", "gpu", or "auto".

    Raises:
        AdtrainError: there is no such run or file, or it is damaged or of another format, such as a pickle.
    """
    source, device = as_path(path, "load: path"), usable_device(device)
    if source.is_dir():
        if like is not None:
            raise AdtrainError(f"{source}: found the folder of a run, expected a file of adtrain.save to read by like=")
        return Model(model_file.load(source, device), device)
    if not source.exists():
        raise AdtrainError(f"{source}: found nothing, expected the folder of a run, or a file that adtrain.save wrote")
    file = TensorFile(source)
    if file.metadata(Kind).kind != KIND:
        raise AdtrainError(f"{source}: is a file of a run, expected one of adtrain.save; a run is loaded by its folder")
    if like is not None:
        numbers = file.read(_named(like, "load: like"), "the tree in like=", finite=False)
        return tree.unflatten(tree.flatten(like)[1], [array(x, device=device) for x in numbers.values()])
    numbers = file.arrays(list(file.types()), finite=False)
    structure = file.metadata(TreeMetadata).structure
    return _tree(structure, {name: array(x, device=device) for name, x in numbers.items()}, source)


def _named(arrays: Any, what: str) -> dict[str, Any]:
    """The leaves of a tree by their names. Raises AdtrainError where one is not an array, or two have the same name."""
    found: dict[str, Any] = {}
    for path, leaf in zip(tree.paths(arrays), tree.leaves(arrays), strict=True):
        name = path or ROOT
        if not isinstance(leaf, (Array, np.ndarray, np.generic)):
            raise AdtrainError(f"{what}: {name}: found {type_with_article(leaf)}, expected an array: ad.array(x)")
        if name in found or name == "__metadata__":
            raise AdtrainError(f"{what}: {name}: found two arrays of this name, or a reserved one; rename a key")
        found[name] = leaf
    return found


def _structure(treedef: TreeDef, names: Iterator[str]) -> Any:
    if treedef.kind is None:
        return next(names)
    keys = treedef.keys or range(len(treedef.children))
    for key in keys:
        if type(key) not in (str, int):
            raise AdtrainError(f"save: found the key {key!r}, expected strings and integers as keys")
    pairs = [[key, _structure(child, names)] for key, child in zip(keys, treedef.children, strict=True)]
    return [treedef.kind.__name__ if treedef.kind in CONTAINERS.values() else f"{treedef.kind.__name__}()", pairs]


def _tree(structure: Any, arrays: Mapping[str, Array], path: Path) -> Any:
    """The tree of a structure, which comes from a file and can be anything. Raises AdtrainError."""
    match structure:
        case str() if structure in arrays:
            return arrays[structure]
        case ["NoneType", []]:
            return None
        case ["dict" | "list" | "tuple" as kind, [*pairs]] if all(_is_pair(pair) for pair in pairs):
            children = {key: _tree(child, arrays, path) for key, child in pairs}
            return children if kind == "dict" else CONTAINERS[kind](children.values())
        case [str() as kind, [*_]] if kind.endswith("()"):
            found = f"{path}: found {with_article(shortened(kind.removesuffix('()')))}, which only its class can build"
            raise AdtrainError(f"{found}; give a tree of the same structure: adtrain.load(path, like=tree)")
    raise AdtrainError(f"{path}: is damaged: its structure does not fit its arrays")


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], (str, int))
