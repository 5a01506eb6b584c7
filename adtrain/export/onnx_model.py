"""A trained network as an ONNX file: images as the data set has them go in, outputs and probabilities come out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import adtrain
from adtrain import config, ops
from adtrain.core.array import Value
from adtrain.data.statistics import PIXEL_MAX
from adtrain.export.onnx_graph import Graph, Place, ValueType
from adtrain.export.onnx_layers import translate
from adtrain.export.torch_weights import named_arrays
from adtrain.training import TrainedModel
from adtrain.training.network import within_bounds

IMAGES, LOGITS, PROBABILITIES = "images", "logits", "probabilities"
FLOAT = 1
"""float32 in onnx.TensorProto.DataType."""


class Signature(NamedTuple):
    """The inputs and outputs of a file, by name."""

    inputs: dict[str, ValueType]
    outputs: dict[str, ValueType]


def signature(trained: TrainedModel) -> Signature:
    """What the file of a trained network takes, uint8 pixels or float32 numbers, and gives."""
    images = ValueType("uint8" if trained.network.scale == PIXEL_MAX else "float32", trained.image_shape)
    outputs = ValueType("float32", trained.network.model.output_shape(trained.network.input_shape))
    return Signature({IMAGES: images}, {LOGITS: outputs, PROBABILITIES: outputs})


def encode(trained: TrainedModel) -> bytes:
    """The content of an ONNX file that computes in float32, checked by onnx; float64 weights are rounded.

    Its metadata are the classes' names as a JSON list, the config as YAML, and adtrain's version.
    Raises AdtrainError as `Graph.encode` does.
    """
    graph, network = Graph(named_arrays(trained)), trained.network
    logits = translate(Place(graph), network.model, _normalized(graph, trained), network.input_shape)
    graph.add(LOGITS, "Identity", logits)
    _PROBABILITIES[network.probabilities](graph)
    about = {
        "classes": json.dumps(trained.classes),
        "config": config.dump(trained.config),
        "adtrain_version": adtrain.__version__,
    }
    return graph.encode(*signature(trained), about)


def _normalized(graph: Graph, trained: TrainedModel) -> str:
    """`Network.inputs` as nodes."""
    at, network = Place(graph, ("input",)), trained.network
    mean, std = (np.array(x).reshape(-1, 1, 1) for x in (network.mean, network.std))
    pixels = at.op("Cast", IMAGES, to=FLOAT)
    scaled = at.op("Mul", pixels, at.constant("scale", 1 / (network.scale * std)))
    normalized = at.op("Add", scaled, at.constant("shift", -mean / std))
    return at.op("Reshape", normalized, at.constant("shape", [0, *network.input_shape]))


def _clip(graph: Graph) -> str:
    at = Place(graph, (PROBABILITIES,))
    return graph.add(PROBABILITIES, "Clip", LOGITS, at.constant("low", 0.0), at.constant("high", 1.0))


_PROBABILITIES: dict[Callable[[Value], Value], Callable[[Graph], str]] = {
    ops.softmax: lambda graph: graph.add(PROBABILITIES, "Softmax", LOGITS, axis=-1),
    ops.sigmoid: lambda graph: graph.add(PROBABILITIES, "Sigmoid", LOGITS),
    within_bounds: _clip,
}
"""What `Network.probabilities` may be, as nodes."""
