"""An ONNX graph under construction. The package `onnx`, which writes it, is imported when one is encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

import adtrain
from adtrain.core.errors import AdtrainError

OPSET, IR_VERSION = 17, 8
"""Of 2022: the first operator set with LayerNormalization, and the file format that goes with it. Whatever reads newer
ones reads these."""

MAX_BYTES = 2**31 - 2**24
"""Of weights: a protocol buffer holds less than 2 GiB, and there must be room for the graph and the metadata."""


class Node(NamedTuple):
    """An operation with one output, which has the node's name."""

    op: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, Any]


class ValueType(NamedTuple):
    """An input's or output's dtype, and its shape without the batch, whose size is left open."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, ('N', *self.shape)))}]"


@dataclass
class Graph:
    """Nodes in the order they run, the trained arrays that they may read, and those that they do, all by name."""

    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; `name` is its output's, or begins it where a node has that name already. Returns the name."""
        unique, number = name, 1
        while unique in self.nodes:
            unique, number = f"{name}_{number}", number + 1
        self.nodes[unique] = Node(op, inputs, attributes)
        return unique

    def encode(
        self, inputs: Mapping[str, ValueType], outputs: Mapping[str, ValueType], about: Mapping[str, str]
    ) -> bytes:
        """The content of an ONNX file with `about` as its metadata: the same bytes for the same graph.

        Raises AdtrainError where the package onnx is missing, or the arrays are more than a file can hold.
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
            producer_version=adtrain.__version__,
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET)],
        )
        helper.set_model_props(model, about)
        onnx.checker.check_model(model, full_check=True)
        content: bytes = model.SerializeToString(deterministic=True)
        return content


class Place(NamedTuple):
    """Where in a graph a layer is written. Names begin with the layer's `path`, as those of PyTorch's parameters do."""

    graph: Graph
    path: tuple[str, ...] = ()

    def at(self, name: str) -> Place:
        """The place of the child `name`."""
        return Place(self.graph, (*self.path, name))

    def op(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; the name of its output."""
        return self.graph.add(f"{'.'.join(self.path)}/{op}", op, *inputs, **attributes)

    def weight(self, name: str) -> str:
        """The name of the layer's trained array `name`, there as float32 whatever it was trained in."""
        full_name = ".".join((*self.path, name))
        self.graph.arrays[full_name] = self.graph.weights[full_name].astype(np.float32)
        return full_name

    def constant(self, name: str, value: ArrayLike) -> str:
        """The name of an array that belongs to the layer's definition: integers as int64, others as float32."""
        array, full_name = np.asarray(value), f"{'.'.join(self.path)}/{name}"
        self.graph.arrays[full_name] = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
        return full_name


def _require_onnx() -> Any:
    """The package onnx. AdtrainError, with the command that installs it, where it is missing."""
    try:
        import onnx
    except ImportError:
        raise AdtrainError("writing ONNX needs the package onnx: pip install 'adtrain[export]'") from None
    return onnx
