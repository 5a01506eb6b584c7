"""The language: arrays, primitives, trace levels, differentiation. No NumPy maths and no device code."""
