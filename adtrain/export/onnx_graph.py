"""Builds an ONNX graph. The package `onnx` is only needed, and imported, by `Graph.encode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from adtrain.core.errors import AdtrainError
from adtrain.version import __version__

OPSET, IR_VERSION = 17, 8
"""The first operator set with LayerNormalization (2022), and its file format. Newer runtimes read both."""

MAX_BYTES = 2**31 - 2**24
"""The limit for weights. A protocol buffer holds less than 2 GiB, including the graph and the metadata."""


class Node(NamedTuple):
    """An operation with one output, which has the node's name."""

    op: str
    inputs: tuple[str, ...]
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
        weights: the trained arrays that layers can use, by name.
        nodes: by name, in execution order.
        arrays: the arrays that the nodes use, by name. They are written to the file.
    """

    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return its name: `name`, or `name_1`, ... if it is taken. Its output has the same name."""
        unique, number = name, 1
        while unique in self.nodes:
            unique, number = f"{name}_{number}", number + 1
        self.nodes[unique] = Node(op, inputs, attributes)
        return unique

    def encode(
        self, inputs: Mapping[str, ValueType], outputs: Mapping[str, ValueType], about: Mapping[str, str]
    ) -> bytes:
        """The content of an ONNX file with `about` as its metadata: the same bytes for the same graph.

        Raises AdtrainError where the package onnx is missing, or the arrays exceed the size of a file.
        """
        onnx = _require_onnx()
        if (size := sum(x.nbytes for x in self.arrays.values())) > MAX_BYTES:
            raise AdtrainError(f"the weights are {size:,} bytes, an ONNX file holds at most {MAX_BYTES:,}")
        helper = onnx.helper
        nodes = [
            helper.make_node(node.op, node.inputs, [name], name=name, **node.attributes)
            for name, node in self.nodes.items()
        ]

        def declared(values: Mapping[str, ValueType]) -> list[Any]:
            element = helper.np_dtype_to_tensor_dtype
            return [
                helper.make_tensor_value_info(name, element(np.dtype(x.dtype)), ["N", *x.shape])
                for name, x in values.items()
            ]

        arrays = [onnx.numpy_helper.from_array(x, name) for name, x in self.arrays.items()]
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


class LayerWriter(NamedTuple):
    """Adds the nodes and arrays of one layer to a graph. Their names begin with the layer's `path`, as in PyTorch."""

    graph: Graph
    path: tuple[str, ...] = ()

    def child(self, name: str) -> LayerWriter:
        """The writer for the child module `name`."""
        return LayerWriter(self.graph, (*self.path, name))

    def op(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        return self.graph.add(f"{'.'.join(self.path)}/{op}", op, *inputs, **attributes)

    def weight(self, name: str) -> str:
        """Add the layer's trained array `name`, converted to float32, and return its name in the graph."""
        full_name = ".".join((*self.path, name))
        self.graph.arrays[full_name] = self.graph.weights[full_name].astype(np.float32)
        return full_name

    def constant(self, name: str, value: ArrayLike, of_floats: DTypeLike = np.float32) -> str:
        """Add a constant array, integers as int64 and others as `of_floats`, and return its name in the graph."""
        array, full_name = np.asarray(value), f"{'.'.join(self.path)}/{name}"
        self.graph.arrays[full_name] = array.astype(np.int64 if array.dtype.kind == "i" else of_floats)
        return full_name

    def reshape(self, name: str, x: str, shape: Sequence[int]) -> str:
        """Give each sample of `x` another shape, which becomes the constant `name`."""
        return self.op("Reshape", x, self.constant(name, [0, *shape]))  # 0 keeps the size of the batch axis


def _require_onnx() -> Any:
    """Import the package onnx. Raises AdtrainError where it is missing."""
    try:
        import onnx
    except ImportError:
        raise AdtrainError("writing ONNX needs the package onnx: pip install 'adtrain[export]'") from None
    return onnx
