"""Tables of primitives that compute another primitive's result in a cheaper way. Passes use them; `ops` fills them."""

from __future__ import annotations

from adtrain.core.primitive import Primitive

POOLED_GRADIENT: dict[Primitive, tuple[int, Primitive]] = {}
"""Primitive: which argument is the gradient of a convolution's output, and the variant that takes in its place the
gradient behind a max pooling and the positions of the maxima."""

WITH_BIAS_GRADIENT: dict[Primitive, tuple[int, Primitive]] = {}
"""Primitive: which argument is that gradient, and the variant that also returns its sum for each channel."""
