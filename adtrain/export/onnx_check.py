"""Compares the outputs of an exported ONNX file with those of the original network."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from adtrain import nn
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import stage
from adtrain.data import Split
from adtrain.export.onnx_model import IMAGES, signature
from adtrain.passes import ALL
from adtrain.training import TrainedModel
from adtrain.training.evaluation import BATCH_SIZE
from adtrain.training.tasks import Multilabel, Regression, Task

VALUE_TOLERANCE = 1e-3


class Comparison(NamedTuple):
    """Numbers of `images` and of those with a `different` class or label, and the largest differences of each output.

    Differences are absolute. Predicted numbers count as different beyond a relative tolerance of VALUE_TOLERANCE.
    """

    images: int
    different: int
    outputs: dict[str, float]


def runtime_version() -> str | None:
    """The version of onnxruntime; None if it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    return str(onnxruntime.__version__)


def compare(content: bytes, trained: TrainedModel, examples: Split) -> Comparison:
    """Run the ONNX file `content` by onnxruntime and the network by adtrain, both on the CPU, on all images.

    Raises AdtrainError where an output of either is NaN or infinite.
    """
    runtime, network = session(content), trained.network

    names = list(signature(trained).outputs)

    def forward(params: nn.Params, statistics: nn.State, batch: Value) -> tuple[Value, ...]:
        outputs, _ = network.outputs(params, statistics, batch, nn.Mode(training=False))
        return (outputs, network.task.predictions(outputs))[-len(names) :]

    ours = stage(forward, ALL)
    different, largest = 0, np.zeros(len(names))
    for start in range(0, len(examples), BATCH_SIZE):
        batch = np.ascontiguousarray(examples.images[start : start + BATCH_SIZE])
        expected = [x.numpy() for x in ours(trained.params, trained.statistics, array(batch))]
        found = runtime.run(names, {IMAGES: batch})
        if not all(np.isfinite(x).all() for x in (*found, *expected)):
            raise AdtrainError("the model's outputs are NaN or infinite: its weights overflowed in training")
        different += int(_different(network.task, found[0], expected[0]).sum())
        gaps = [np.abs(x - y).max() for x, y in zip(found, expected, strict=True)]
        largest = np.maximum(largest, gaps)
    return Comparison(len(examples), different, dict(zip(names, largest.tolist(), strict=True)))


def _different(task: Task, found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Whether the predictions for each image differ: bool (N,)."""
    if isinstance(task, Regression):
        scale = np.maximum(np.abs(expected), np.array(task.std))
        return (np.abs(found - expected) > VALUE_TOLERANCE * scale).any(axis=1)
    if isinstance(task, Multilabel):
        return ((found > 0) != (expected > 0)).any(axis=1)
    different: np.ndarray = found.argmax(axis=1) != expected.argmax(axis=1)
    return different


def session(content: bytes) -> Any:
    """An onnxruntime.InferenceSession on the CPU for the content of an ONNX file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only: missing GPUs would be warnings
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
