"""Code generators for GPUs. The modules that are imported here define the forms of fused equations."""

from __future__ import annotations

from adtrain.backends.cuda.codegen import (
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
