"""Forms: the kinds of kernels that compute several equations on a GPU, and what each may join.

The modules that are imported here define them.
"""

from __future__ import annotations

from adtrain.backends.cuda.forms import (
    back_to_back,
    column_sum,
    grouped_products,
    horizontal,
    layer_backward,
    map_reduce,
    one_block,
    peer_exchanges,
    resident_steps,
    row_fused,
    row_products,
    streamed_layer,
    tiled_product,
)

__all__ = [
    "back_to_back",
    "column_sum",
    "grouped_products",
    "horizontal",
    "layer_backward",
    "map_reduce",
    "one_block",
    "peer_exchanges",
    "resident_steps",
    "row_fused",
    "row_products",
    "streamed_layer",
    "tiled_product",
]
