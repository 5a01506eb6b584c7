"""Tables of primitives that can replace another primitive at less cost. `ops` fills them; passes read them."""

from __future__ import annotations

from adtrain.core.primitive import Primitive

WITH_WEIGHT_GRADIENTS: dict[Primitive, tuple[int, Primitive]] = {}
"""The gradient of a recurrent primitive -> (n, variant), where n is the number of biases. In place of output n the
variant returns its product with output n - 1, which is transposed: the gradient of weight_hh. In place of the next n
outputs it returns their sums over the batch: the gradients of the biases."""
