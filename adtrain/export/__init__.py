"""Export of a trained run: an ONNX file, weights for PyTorch, or C (`c`).

trained = model_file.load(run)
content = export.onnx_model.encode(trained)
"""

from __future__ import annotations

from adtrain.export import onnx_model, torch_weights

__all__ = ["onnx_model", "torch_weights"]
