"""CUDA C++ of fused equations."""
