"""The C functions that compute each primitive on the CPU. Importing this package registers them."""

from adtrain.lowering.cpu import conv, moves, products  # noqa: F401
