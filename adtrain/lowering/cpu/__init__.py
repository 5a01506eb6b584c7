"""The C functions that compute each primitive on the CPU. Importing this package registers them."""

from adtrain.lowering.cpu import conv, memory_bound, products  # noqa: F401
