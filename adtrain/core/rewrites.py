"""Tables of primitives that can replace another primitive at less cost. `ops` fills them; passes read them."""

from __future__ import annotations

from adtrain.core.primitive import Primitive

POOLED_GRADIENT: dict[Primitive, tuple[int, Primitive]] = {}
"""A gradient of a convolution -> (position, variant). The argument at ``position`` is the gradient of the convolution's
output. In its place the variant takes the gradient of the max pooling that follows, and the positions of the maxima."""

WITH_BIAS_GRADIENT: dict[Primitive, tuple[int, Primitive]] = {}
"""A gradient of a convolution -> (position, variant). The variant also returns the sum of that argument for each
channel: the gradient of the bias."""

WITH_WEIGHT_GRADIENTS: dict[Primitive, tuple[int, Primitive]] = {}
"""The gradient of a recurrent primitive -> (n, variant), where n is the number of biases. In place of output n the
variant returns its product with output n - 1, which is transposed: the gradient of weight_hh. In place of the next n
outputs it returns their sums over the batch: the gradients of the biases."""
