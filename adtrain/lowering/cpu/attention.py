"""Attention and its gradient: `attention.c`."""

from __future__ import annotations

from typing import Any

from adtrain.core.kernel import CKernel, register
from adtrain.lowering.cpu.shapes import in_full
from adtrain.lowering.shapes import attention_lengths, optional_arguments

BLOCK, LARGEST_VECTOR, STRUCT = 64, 64, 4096
"""Keys of a block of scores, of which the queries are at most half; bytes of the largest vector register; bytes for the
pointers to the blocks."""
DEFINITIONS = {"KEYS": BLOCK, "LARGEST_VECTOR": LARGEST_VECTOR, "STRUCT_BYTES": STRUCT}
"""Macros of `attention.c`."""


def _numbers(*types: Any, **params: Any) -> tuple[int | float, ...]:
    """NUMBERS in `attention.c`."""
    in_full("attention", params["precision"])
    options = params["causal"], params["scale"], params["dropout"], params["stream"]
    return *attention_lengths(*types, **params), *options


def _scratch(*types: Any, **params: Any) -> int:
    """Bytes for each thread: its Scratch, four blocks of scores of at most half as many queries as keys, and six packed
    blocks."""
    itemsize = types[0].dtype.itemsize
    packed = 6 * BLOCK * (attention_lengths(*types, **params).width + 2 * LARGEST_VECTOR // itemsize)
    return STRUCT + itemsize * (2 * BLOCK * BLOCK + packed)


for _name in ("attention", "attention_grad", "self_attention", "self_attention_grad"):
    register(
        _name,
        "cpu",
        CKernel(
            "attention.c",
            lambda *types, name=_name, **params: "_".join([name, *optional_arguments(*types)]),
            _numbers,
            team=True,
            scratch=_scratch,
            definitions=DEFINITIONS,
        ),
    )
