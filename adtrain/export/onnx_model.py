"""A trained network as an ONNX file, from images before normalisation to logits and probabilities, or to numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from adtrain import config, ops
from adtrain.config.records import plain
from adtrain.core.array import Value
from adtrain.data.statistics import PIXEL_MAX
from adtrain.export.onnx_graph import Graph, LayerWriter, ValueType
from adtrain.export.onnx_layers import translate
from adtrain.export.torch_weights import named_arrays
from adtrain.training import TrainedModel
from adtrain.training.network import clip_probabilities
from adtrain.training.tasks import Multilabel, Regression
from adtrain.version import __version__

IMAGES, LOGITS, PROBABILITIES, VALUES = "images", "logits", "probabilities", "values"
FLOAT = 1
"""The number of float32 in onnx.TensorProto.DataType."""


class Signature(NamedTuple):
    """The types of a file's inputs and outputs, by name."""

    inputs: dict[str, ValueType]
    outputs: dict[str, ValueType]


def signature(trained: TrainedModel) -> Signature:
    """The signature of a trained network's file. Images have the type of the training; values are in original units."""
    images = ValueType("uint8" if trained.network.scale == PIXEL_MAX else "float32", trained.image_shape)
    outputs = ValueType("float32", trained.network.model.output_shape(trained.network.input_shape))
    names = (VALUES,) if isinstance(trained.network.task, Regression) else (LOGITS, PROBABILITIES)
    return Signature({IMAGES: images}, dict.fromkeys(names, outputs))


def encode(trained: TrainedModel) -> bytes:
    """The content of an ONNX file that computes in float32, validated by onnx; float64 weights are rounded.

    Its metadata are the names of classes and targets as JSON lists, the config as YAML, and adtrain's version; for rows
    of a table also the encoder of their columns as JSON.
    Raises AdtrainError as `Graph.encode` does.
    """
    graph, network = Graph(named_arrays(trained)), trained.network
    logits = translate(LayerWriter(graph), network.model, _normalized(graph, trained), network.input_shape)
    if isinstance(network.task, Regression):
        _values(graph, network.task, logits)
    else:
        graph.add(LOGITS, "Identity", logits)
        _PROBABILITIES[ops.sigmoid if isinstance(network.task, Multilabel) else network.task.predictions](graph)
    about = {
        "classes": json.dumps(trained.classes),
        "targets": json.dumps(trained.targets),
        "config": config.dump(trained.config),
        "adtrain_version": __version__,
    }
    if trained.encoder is not None:
        about["encoder"] = json.dumps(plain(trained.encoder))
    return graph.encode(*signature(trained), about)


def _normalized(graph: Graph, trained: TrainedModel) -> str:
    """`Network.inputs` as nodes; the name of the output."""
    writer, network = LayerWriter(graph, ("input",)), trained.network
    factor, summand = network.normalization()
    pixels = writer.op("Cast", IMAGES, to=FLOAT)
    scaled = writer.op("Mul", pixels, writer.constant("scale", factor))
    normalized = writer.op("Add", scaled, writer.constant("shift", summand))
    return writer.op("Reshape", normalized, writer.constant("shape", [0, *network.input_shape]))


def _values(graph: Graph, task: Regression, outputs: str) -> str:
    """`Regression.predictions` as nodes."""
    if not task.normalized:
        return graph.add(VALUES, "Identity", outputs)
    writer = LayerWriter(graph, (VALUES,))
    scaled = writer.op("Mul", outputs, writer.constant("std", task.std))
    return graph.add(VALUES, "Add", scaled, writer.constant("mean", task.mean))


def _clip(graph: Graph) -> str:
    writer = LayerWriter(graph, (PROBABILITIES,))
    return graph.add(PROBABILITIES, "Clip", LOGITS, writer.constant("low", 0.0), writer.constant("high", 1.0))


_PROBABILITIES: dict[Callable[[Value], Value], Callable[[Graph], str]] = {
    ops.softmax: lambda graph: graph.add(PROBABILITIES, "Softmax", LOGITS, axis=-1),
    ops.sigmoid: lambda graph: graph.add(PROBABILITIES, "Sigmoid", LOGITS),
    clip_probabilities: _clip,
}
"""The functions that a task's `predictions` can be, as nodes."""
