"""Export of a trained run: C (`c`), an ONNX file (`onnx_model`), or weights, also for PyTorch (`torch_weights`)."""
