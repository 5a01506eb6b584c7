"""A trained network as an ONNX file, from images before normalisation to logits and probabilities, or to numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

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
FLOAT, DOUBLE = 1, 11
"""The numbers of float32 and float64 in onnx.TensorProto.DataType."""


class Signature(NamedTuple):
    """The types of a file's inputs and outputs, by name."""

    inputs: dict[str, ValueType]
    outputs: dict[str, ValueType]


def signature(trained: TrainedModel) -> Signature:
    """The signature of a trained network's file. Images are uint8 or float32 as in the training; values are in original
    units. Both are float64 where float32 would lose differences between numbers."""
    network = trained.network
    numbers = "float64" if any(network.offset) else "float32"
    images = ValueType("uint8" if network.scale == PIXEL_MAX else numbers, trained.image_shape)
    values = "float64" if network.task.needs_float64 else "float32"
    outputs = ValueType(values, network.model.output_shape(network.input_shape))
    names = (VALUES,) if isinstance(network.task, Regression) else (LOGITS, PROBABILITIES)
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
    given = IMAGES
    if any(network.offset):
        offset = np.reshape(network.offset, (-1, 1, 1))
        given = writer.op("Sub", IMAGES, writer.constant("offset", offset, np.float64))
    pixels = writer.op("Cast", given, to=FLOAT)
    scaled = writer.op("Mul", pixels, writer.constant("scale", factor))
    normalized = writer.op("Add", scaled, writer.constant("shift", summand))
    return writer.op("Reshape", normalized, writer.constant("shape", [0, *network.input_shape]))


def _values(graph: Graph, task: Regression, outputs: str) -> str:
    """`Regression.predictions` as nodes."""
    if not task.normalized:
        return graph.add(VALUES, "Identity", outputs)
    writer, dtype = LayerWriter(graph, (VALUES,)), np.float64 if task.needs_float64 else np.float32
    if task.needs_float64:
        outputs = writer.op("Cast", outputs, to=DOUBLE)
    scaled = writer.op("Mul", outputs, writer.constant("std", task.std, dtype))
    return graph.add(VALUES, "Add", scaled, writer.constant("mean", task.mean, dtype))


def _clip(graph: Graph) -> str:
    writer = LayerWriter(graph, (PROBABILITIES,))
    return graph.add(PROBABILITIES, "Clip", LOGITS, writer.constant("low", 0.0), writer.constant("high", 1.0))


_PROBABILITIES: dict[Callable[[Value], Value], Callable[[Graph], str]] = {
    ops.softmax: lambda graph: graph.add(PROBABILITIES, "Softmax", LOGITS, axis=-1),
    ops.sigmoid: lambda graph: graph.add(PROBABILITIES, "Sigmoid", LOGITS),
    clip_probabilities: _clip,
}
"""The functions that a task's `predictions` can be, as nodes."""
