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
"""The gradient of a recurrent primitive -> (a, b, variant). In place of output b the variant returns its product with
output a, which is transposed: the gradient of weight_hh."""
