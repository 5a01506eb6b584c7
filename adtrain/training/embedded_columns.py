"""The embeddings that take the data of a network, and checks that they fit the columns of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from adtrain import nn
from adtrain.data.errors import printable
from adtrain.data.part import Column

T = TypeVar("T")


def embeddings(module: nn.Module, columns: Sequence[T]) -> Iterator[tuple[nn.Embedding, Sequence[T]]]:
    """Each embedding in a module with the columns that it gets, of the `columns` that the module gets.

    Embeddings behind other layers than `select` and containers are left out: their input has no columns.
    """
    if isinstance(module, nn.Sequential):
        for layer in module.layers:
            yield from embeddings(layer, columns)
            if not isinstance(layer, nn.Select):
                return
            columns = [columns[i] for i in layer.indices]
    elif isinstance(module, (nn.Concat, nn.Add)):
        for branch in module.branches:
            yield from embeddings(branch, columns)
    elif isinstance(module, nn.Embedding):
        yield module, columns


def problems(module: nn.Module, columns: Sequence[Column]) -> Iterator[str]:
    """One line for each embedding in a module that cannot take its columns, of the `columns` that the module gets."""
    for embedding, found in embeddings(module, columns):
        for column in found:
            name, size = printable(column.title), embedding.num_embeddings
            if column.categories is None:
                yield f"column {name} has numbers, expected categories before an embedding; select picks columns"
            elif size <= len(column.categories):
                count = len(column.categories)
                what = f"column {name} has {count} categories, and 0 stands for others"
                yield f"found num_embeddings {size}, expected at least {count + 1}: {what}"
