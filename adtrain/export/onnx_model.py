"""A trained network as an ONNX file, from images before normalisation to logits and probabilities, or to numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from adtrain import __version__, config
from adtrain.config.records import plain
from adtrain.core.errors import AdtrainError
from adtrain.core.program import Variable
from adtrain.data import Split
from adtrain.export import evaluation
from adtrain.export.evaluation import Comparison, Evaluation, image_dtype
from adtrain.export.onnx_nodes import Graph, Lengths, Nodes
from adtrain.training import TrainedModel
from adtrain.training.tasks import Regression

LOGITS, PROBABILITIES, VALUES = "logits", "probabilities", "values"
BATCHES = 61, 67
"""Numbers of images for which the network is traced. A length that differs is a multiple of the number of images."""

OPSET, IR_VERSION = 17, 8
"""The first operator set with LayerNormalization (2022), and its file format. Newer runtimes read both."""

MAX_BYTES = 2**31 - 2**24
"""The limit for weights. A protocol buffer holds less than 2 GiB, including the graph and the metadata."""


class ValueType(NamedTuple):
    """An input's or output's dtype, and its shape without the batch axis, which is dynamic."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, ('N', *self.shape)))}]"


class Signature(NamedTuple):
    """The types of a file's inputs and outputs, by name."""

    inputs: dict[str, ValueType]
    outputs: dict[str, ValueType]


def signature(trained: TrainedModel) -> Signature:
    """The signature of a trained network's file. Its input is named for what the data consist of, such as "images" or
    "rows": uint8 or float32 as in the training. Values are in original units. Both are float64 where float32 would lose
    differences between numbers."""
    network = trained.network
    inputs = {trained.config.data.examples: ValueType(image_dtype(trained).name, trained.image_shape)}
    values = "float64" if network.task.needs_float64 else "float32"
    outputs = ValueType(values, network.model.output_shape(network.input_shape))
    names = (VALUES,) if isinstance(network.task, Regression) else (LOGITS, PROBABILITIES)
    return Signature(inputs, dict.fromkeys(names, outputs))


def encode(trained: TrainedModel) -> bytes:
    """The content of an ONNX file that computes in float32, validated by onnx; float64 weights are rounded.

    Its metadata are the names of classes and targets as JSON lists, the config as YAML, and adtrain's version; for rows
    of a table also the encoder of their columns as JSON, and for tokens the content of `tokenizer.json`.
    Raises AdtrainError as `Nodes.write` and `encode_graph` do.
    """
    evaluations = [evaluation.evaluation(trained, batch) for batch in BATCHES]
    graph, about = Graph(), signature(trained)
    found = Nodes(graph, evaluations[0], lengths_of(evaluations), next(iter(about.inputs))).write()
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
    return encode_graph(graph, about, metadata)


def lengths_of(evaluations: Sequence[Evaluation]) -> dict[Variable, Lengths]:
    """The lengths of the values of the first of two evaluations, of BATCHES images.

    Raises AdtrainError where a length is not fixed and no multiple of that number, and where the two compute otherwise.
    """
    first, second = (x.program for x in evaluations)
    pairs = list(zip((*first.inputs, *first.constants), (*second.inputs, *second.constants), strict=False))
    same = len(first.equations) == len(second.equations) and len(first.constants) == len(second.constants)
    for e, other in zip(first.equations, second.equations, strict=False):
        same = same and e.name == other.name and e.params.get("value") == other.params.get("value")
        pairs += zip(e.outputs, other.outputs, strict=False)
    constants = zip(first.constants.values(), second.constants.values(), strict=False)
    same = same and all(np.array_equal(a.numpy(), b.numpy(), equal_nan=a.dtype.kind == "f") for a, b in constants)
    found: dict[Variable, Lengths] = {}
    for a, b in pairs:
        lengths = []
        for n, m in zip(a.type.shape, b.type.shape, strict=False):
            multiple = n % BATCHES[0] == 0 and n // BATCHES[0] * BATCHES[1] == m
            same = same and (n == m or multiple)
            lengths.append(n if n == m else -(n // BATCHES[0]))
        same = same and len(a.type.shape) == len(b.type.shape)
        found[a] = tuple(lengths)
    if not same:
        raise AdtrainError(
            "the network computes otherwise for another number of images; an ONNX file takes any: "
            "use the length of axis 0 for shapes of values with images only"
        )
    return found


def encode_graph(graph: Graph, about: Signature, metadata: Mapping[str, str]) -> bytes:
    """The content of an ONNX file: the same bytes for the same graph.

    Raises AdtrainError where the package onnx is missing, or the arrays exceed the size of a file.
    """
    try:
        import onnx
    except ImportError:
        raise AdtrainError("writing ONNX needs the package onnx: pip install 'adtrain[export]'") from None
    used = graph.used(about.outputs)
    stored = {name: x for name, x in graph.arrays.items() if name in used}
    if (size := sum(x.nbytes for x in stored.values())) > MAX_BYTES:
        raise AdtrainError(f"the weights are {size:,} bytes, an ONNX file holds at most {MAX_BYTES:,}")
    helper = onnx.helper
    nodes = [
        helper.make_node(node.op, node.inputs, node.outputs, name=name, **node.attributes)
        for name, node in graph.nodes.items()
        if not used.isdisjoint(node.outputs)
    ]

    def declared(values: Mapping[str, ValueType]) -> list[Any]:
        element = helper.np_dtype_to_tensor_dtype
        return [
            helper.make_tensor_value_info(name, element(np.dtype(x.dtype)), ["N", *x.shape])
            for name, x in values.items()
        ]

    arrays = [onnx.numpy_helper.from_array(x, name) for name, x in stored.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "adtrain", declared(about.inputs), declared(about.outputs), arrays),
        producer_name="adtrain",
        producer_version=__version__,
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    helper.set_model_props(model, metadata)
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


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
    runtime, about = session(content), signature(trained)
    (given,), names = about.inputs, list(about.outputs)
    return evaluation.compare(lambda batch: runtime.run(names, {given: batch}), names, trained, examples)


def session(content: bytes) -> Any:
    """An onnxruntime.InferenceSession on the CPU for the content of an ONNX file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only: missing GPUs would be warnings
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
