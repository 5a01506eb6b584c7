"""Checks that the embeddings of a network fit the columns of a table whose categories are numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adtrain import nn
from adtrain.data.columns import Column, printable


def problems(module: nn.Module, columns: Sequence[Column]) -> Iterator[str]:
    """One line for each embedding that cannot take the columns of its input; `columns` are those of the module's.

    Embeddings behind other layers than `select` and containers are not checked: their input has no columns.
    """
    if isinstance(module, nn.Sequential):
        for layer in module.layers:
            yield from problems(layer, columns)
            if not isinstance(layer, nn.Select):
                return
            columns = [columns[i] for i in layer.indices]
    elif isinstance(module, (nn.Concat, nn.Add)):
        for branch in module.branches:
            yield from problems(branch, columns)
    elif isinstance(module, nn.Embedding):
        for column in columns:
            name, size = printable(column.title), module.num_embeddings
            if column.categories is None:
                yield f"column {name} has numbers, expected categories before an embedding; select picks columns"
            elif size <= len(column.categories):
                count = len(column.categories)
                what = f"column {name} has {count} categories, and 0 stands for others"
                yield f"found num_embeddings {size}, expected at least {count + 1}: {what}"
