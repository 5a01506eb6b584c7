"""A trained network as an ONNX file, from images before normalisation to logits and probabilities, or to numbers."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from adtrain import config
from adtrain.config.records import plain
from adtrain.data import Split
from adtrain.export import evaluation
from adtrain.export.evaluation import Comparison, image_dtype
from adtrain.export.onnx_graph import Graph, ValueType
from adtrain.export.onnx_nodes import Nodes, lengths_of
from adtrain.training import TrainedModel
from adtrain.training.tasks import Regression
from adtrain.version import __version__

IMAGES, LOGITS, PROBABILITIES, VALUES = "images", "logits", "probabilities", "values"
BATCHES = 61, 67
"""Numbers of images for which the network is traced. A length that differs is a multiple of the number of images."""


class Signature(NamedTuple):
    """The types of a file's inputs and outputs, by name."""

    inputs: dict[str, ValueType]
    outputs: dict[str, ValueType]


def signature(trained: TrainedModel) -> Signature:
    """The signature of a trained network's file. Images are uint8 or float32 as in the training; values are in original
    units. Both are float64 where float32 would lose differences between numbers."""
    network = trained.network
    images = ValueType(image_dtype(trained).name, trained.image_shape)
    values = "float64" if network.task.needs_float64 else "float32"
    outputs = ValueType(values, network.model.output_shape(network.input_shape))
    names = (VALUES,) if isinstance(network.task, Regression) else (LOGITS, PROBABILITIES)
    return Signature({IMAGES: images}, dict.fromkeys(names, outputs))


def encode(trained: TrainedModel) -> bytes:
    """The content of an ONNX file that computes in float32, validated by onnx; float64 weights are rounded.

    Its metadata are the names of classes and targets as JSON lists, the config as YAML, and adtrain's version; for rows
    of a table also the encoder of their columns as JSON, and for tokens the content of `tokenizer.json`.
    Raises AdtrainError as `Nodes.write` and `Graph.encode` do.
    """
    evaluations = [evaluation.evaluation(trained, batch) for batch in BATCHES]
    graph, about = Graph(), signature(trained)
    found = Nodes(graph, evaluations[0], lengths_of(evaluations, BATCHES), IMAGES).write()
    for name, output in zip(about.outputs, found[-len(about.outputs) :], strict=True):
        graph.add(name, "Identity", output)
    metadata = {
        "classes": json.dumps(trained.classes),
        "targets": json.dumps(trained.targets),
        "config": config.dump(trained.config),
        "adtrain_version": __version__,
    }
    if trained.encoder is not None:
        metadata["encoder"] = json.dumps(plain(trained.encoder))
    if trained.tokenizer is not None:
        metadata["tokenizer"] = trained.tokenizer.content
    return graph.encode(*about, metadata)


def runtime_version() -> str | None:
    """The version of onnxruntime; None if it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    return str(onnxruntime.__version__)


def compare(content: bytes, trained: TrainedModel, examples: Split) -> Comparison:
    """Compare the ONNX file `content`, run by onnxruntime, with the network on all images.

    Raises AdtrainError where an output of either is NaN or infinite.
    """
    runtime, names = session(content), list(signature(trained).outputs)
    return evaluation.compare(lambda batch: runtime.run(names, {IMAGES: batch}), names, trained, examples)


def session(content: bytes) -> Any:
    """An onnxruntime.InferenceSession on the CPU for the content of an ONNX file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only: missing GPUs would be warnings
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
