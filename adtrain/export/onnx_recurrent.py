"""The translation of recurrent layers to ONNX nodes; see `onnx_layers`."""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain import nn
from adtrain.export.onnx_graph import LayerWriter

ONNX_GATES = {nn.RNN: (0,), nn.LSTM: (0, 3, 1, 2), nn.GRU: (1, 0, 2)}
"""The positions of ONNX's gates in PyTorch's order."""


def recurrent(writer: LayerWriter, layer: nn.RNN | nn.LSTM | nn.GRU, x: str, shape: nn.Shape) -> str:
    """A node for each layer. ONNX's sequences are (length, batch, features), its results (length, directions, ...)."""
    options: dict[str, Any] = {"hidden_size": layer.hidden_size}
    if layer.bidirectional:
        options["direction"] = "bidirectional"
    if isinstance(layer, nn.RNN):
        options["activations"] = [layer.nonlinearity.capitalize()] * (layer.width // layer.hidden_size)
    if isinstance(layer, nn.GRU):
        options["linear_before_reset"] = 1
    for number in range(layer.num_layers):
        by_direction = [[_onnx_gates(writer, layer, name) for name in names] for names in layer.names(number)]
        weight_ih, weight_hh, *biases = (np.stack(arrays) for arrays in zip(*by_direction, strict=True))
        arrays = {"weight_ih": weight_ih, "weight_hh": weight_hh}
        if biases:
            arrays["bias"] = np.concatenate(biases, 1)
        constants = [writer.constant(f"{name}_l{number}", each) for name, each in arrays.items()]
        steps_first = writer.op("Transpose", x, perm=[1, 0, 2])
        y = writer.op(type(layer).__name__, steps_first, *constants, **options)
        y = writer.op("Transpose", y, perm=[2, 0, 1, 3])
        x = writer.reshape(f"shape_l{number}", y, (shape[0], layer.width))
    if layer.output == "all":
        return x
    last = writer.op("Gather", x, writer.constant("last", shape[0] - 1), axis=1)
    if not layer.bidirectional:
        return last
    first = writer.op("Gather", x, writer.constant("first", 0), axis=1)
    directions = [
        writer.op("Slice", y, *(writer.constant(f"{y}_{n}", [i]) for n, i in (("from", at), ("to", to), ("axis", 1))))
        for y, at, to in ((last, 0, layer.hidden_size), (first, layer.hidden_size, layer.width))
    ]
    return writer.op("Concat", *directions, axis=1)


def _onnx_gates(writer: LayerWriter, layer: nn.RNN | nn.LSTM | nn.GRU, name: str) -> np.ndarray:
    """The array `name` of a layer with its gates in ONNX's order."""
    order = ONNX_GATES[type(layer)]
    gates = np.split(writer.graph.weights[".".join((*writer.path, name))], len(order))
    return np.concatenate([gates[i] for i in order])
