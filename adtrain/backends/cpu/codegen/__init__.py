"""Generates the C source of Programs."""

from adtrain.backends.cpu.codegen.program import Generated, generate, supported, workspace

__all__ = ["Generated", "generate", "supported", "workspace"]
