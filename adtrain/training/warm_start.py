"""Warm start: initialise a new training with the weights of another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adtrain import nn
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.errors import AdtrainError
from adtrain.core.types import ArrayType
from adtrain.data.table_encoder import TableEncoder
from adtrain.training import tensor_file
from adtrain.training.tensor_file import OPTIMIZER, TensorFile

MODEL = "model.safetensors"


@dataclass(frozen=True)
class Names:
    """What the outputs and the inputs of a network mean, in the metadata of a model file or checkpoint."""

    classes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    encoder: TableEncoder | None = None

    @property
    def outputs(self) -> Sequence[str]:
        return self.classes or self.targets

    @property
    def inputs(self) -> Sequence[str]:
        return () if self.encoder is None else self.encoder.features


def names_of(path: Path) -> Names:
    """The names in `path`, as `weights` takes it; empty ones where it has none. Raises AdtrainError as `weights`."""
    return _file(path).metadata(Names)


def _file(path: Path) -> TensorFile:
    return TensorFile(path / MODEL if path.is_dir() else path)


def weights(path: Path, params: nn.Params, statistics: nn.State, partial: bool) -> tuple[nn.Params, nn.State]:
    """Replace `params` and `statistics` by the arrays in `path`: a run's folder, a model file or a checkpoint.

    With `partial`, an array stays as it is if the file has none of its name, shape and dtype.
    Raises AdtrainError where the file cannot be read, or does not fit (with `partial`: no array fits); lists the
    differences.
    """
    file = _file(path)
    expected: dict[str, Any] = tensor_file.named(params, statistics)
    wanted, types = expected, file.types()
    if partial:
        wanted = {name: x for name, x in expected.items() if types.get(name) == str(ArrayType(x.shape, x.dtype))}
    if not wanted:
        raise AdtrainError(f"{file.path}: found no array with the name, shape and dtype of one in the config's network")
    arrays = file.read(wanted, "the config's network", others="" if partial else OPTIMIZER)
    found = {**expected, **{name: array(x) for name, x in arrays.items()}}
    trees: tuple[nn.Params, nn.State] = tree.unflatten(tree.flatten((params, statistics))[1], list(found.values()))
    return trees
