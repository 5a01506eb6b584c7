"""Tables of primitives that can replace another primitive at less cost. `ops` fills them; passes read them."""

from __future__ import annotations

from adtrain.core.primitive import Primitive

POOLED_GRADIENT: dict[Primitive, tuple[int, Primitive]] = {}
"""A gradient of a convolution -> (position, variant). The argument at ``position`` is the gradient of the convolution's
output. In its place the variant takes the gradient of the max pooling that follows, and the positions of the maxima."""

WITH_BIAS_GRADIENT: dict[Primitive, tuple[int, Primitive]] = {}
"""A gradient of a convolution -> (position, variant). The variant also returns the sum of that argument for each
channel: the gradient of the bias."""

WITH_WEIGHT_GRADIENT: dict[Primitive, tuple[int, int, Primitive]] = {}
"""The gradient of a recurrent primitive -> (a, b, variant). The variant returns the product of the outputs at positions a
and b, the first one transposed, in place of the second: the gradient of weight_hh."""
