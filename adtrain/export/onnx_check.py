"""Compares the outputs of an exported ONNX file with those of the original network."""

from __future__ import annotations

from typing import Any

from adtrain.data import Split
from adtrain.export import comparison
from adtrain.export.comparison import Comparison
from adtrain.export.onnx_model import IMAGES, signature
from adtrain.training import TrainedModel


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
    return comparison.compare(lambda batch: runtime.run(names, {IMAGES: batch}), names, trained, examples)


def session(content: bytes) -> Any:
    """An onnxruntime.InferenceSession on the CPU for the content of an ONNX file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only: missing GPUs would be warnings
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
