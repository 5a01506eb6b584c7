"""Export of a trained run: C (`c`), an ONNX file (`onnx_model`), a page (`page`), or weights (`architectures`)."""
