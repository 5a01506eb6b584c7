"""Builds an ONNX graph. The package `onnx` is only needed, and imported, by `Graph.encode`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from adtrain.core.errors import AdtrainError
from adtrain.version import __version__

OPSET, IR_VERSION = 17, 8
"""The first operator set with LayerNormalization (2022), and its file format. Newer runtimes read both."""

MAX_BYTES = 2**31 - 2**24
"""The limit for weights. A protocol buffer holds less than 2 GiB, including the graph and the metadata."""


class Node(NamedTuple):
    """An operation. Its first output has the node's name."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


class ValueType(NamedTuple):
    """An input's or output's dtype, and its shape without the batch axis, which is dynamic."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, ('N', *self.shape)))}]"


@dataclass
class Graph:
    """An ONNX graph under construction.

    Attributes:
        nodes: by name, in execution order.
        arrays: constant arrays by name. Those that nodes use are written to the file.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, op: str, *inputs: str, others: Sequence[str] = (), **attributes: Any) -> str:
        """Add a node and return its name: `name`, or `name_1`, ... if it is taken. Its output has the same name.

        `others` are the ends of the names of more outputs; "" leaves one out.
        """
        unique = self._unique(name)
        outputs = (unique, *(f"{unique}/{end}" if end else "" for end in others))
        self.nodes[unique] = Node(op, inputs, outputs, attributes)
        return unique

    def constant(self, name: str, value: ArrayLike) -> str:
        """Add a constant array and return its name: `name`, or `name_1`, ... if it is taken.

        An equal array of that name is used again.
        """
        array = np.asarray(value)
        same = self.arrays.get(name)
        if same is None or same.dtype != array.dtype or not np.array_equal(same, array):
            name = self._unique(name)
            self.arrays[name] = array
        return name

    def _unique(self, name: str) -> str:
        unique, number = name, 1
        while unique in self.nodes or unique in self.arrays:
            unique, number = f"{name}_{number}", number + 1
        return unique

    def _used(self, results: Iterable[str]) -> set[str]:
        """The names that the results depend on."""
        needed = set(results)
        for node in reversed(self.nodes.values()):
            if not needed.isdisjoint(node.outputs):
                needed.update(node.inputs)
        return needed

    def encode(
        self, inputs: Mapping[str, ValueType], outputs: Mapping[str, ValueType], about: Mapping[str, str]
    ) -> bytes:
        """The content of an ONNX file with `about` as its metadata: the same bytes for the same graph.

        Raises AdtrainError where the package onnx is missing, or the arrays exceed the size of a file.
        """
        try:
            import onnx
        except ImportError:
            raise AdtrainError("writing ONNX needs the package onnx: pip install 'adtrain[export]'") from None
        used = self._used(outputs)
        stored = {name: x for name, x in self.arrays.items() if name in used}
        if (size := sum(x.nbytes for x in stored.values())) > MAX_BYTES:
            raise AdtrainError(f"the weights are {size:,} bytes, an ONNX file holds at most {MAX_BYTES:,}")
        helper = onnx.helper
        nodes = [
            helper.make_node(node.op, node.inputs, node.outputs, name=name, **node.attributes)
            for name, node in self.nodes.items()
            if not used.isdisjoint(node.outputs)
        ]

        def declared(values: Mapping[str, ValueType]) -> list[Any]:
            element = helper.np_dtype_to_tensor_dtype
            return [
                helper.make_tensor_value_info(name, element(np.dtype(x.dtype)), ["N", *x.shape])
                for name, x in values.items()
            ]

        arrays = [onnx.numpy_helper.from_array(x, name) for name, x in stored.items()]
        graph = helper.make_graph(nodes, "adtrain", declared(inputs), declared(outputs), arrays)
        model = helper.make_model(
            graph,
            producer_name="adtrain",
            producer_version=__version__,
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET)],
        )
        helper.set_model_props(model, about)
        onnx.checker.check_model(model, full_check=True)
        content: bytes = model.SerializeToString(deterministic=True)
        return content
