"""Tensor maps, encoded by the driver API on the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from cuda.bindings import driver

from adtrain.backends.cuda.runtime.errors import checked
from adtrain.core.kernel import TensorMap

TENSOR_MAP_WORDS = 16
"""The 64-bit words of a tensor map."""
UINT32, UINT64 = driver.cuuint32_t, driver.cuuint64_t
ELEMENTS = {
    2: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    4: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
}
"""The type of an element, by its bytes. Copies round float32 to tf32."""
SWIZZLES = {
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
    64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
}
"""The swizzle, by the bytes of a row of a box."""


def encoded(described: TensorMap, address: int) -> Sequence[int]:
    """The TENSOR_MAP_WORDS words of a tensor map, of an array at `address`.

    Raises:
        DeviceError: the driver refuses the map.
    """
    itemsize = described.dtype.itemsize
    strides = [itemsize * n for n in accumulate(described.lengths[:-1], mul)]
    rank = len(described.lengths)
    options = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        SWIZZLES[described.box[0] * itemsize],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    array = ELEMENTS[itemsize], rank, address, _lengths(described.lengths), _lengths(strides)
    if described.im2col is None:
        ones = _numbers([1] * rank)
        made = checked(driver.cuTensorMapEncodeTiled(*array, _numbers(described.box), ones, *options))
    else:
        lower, upper, stride = described.im2col
        box = [*lower], [*upper], *described.box
        made = checked(driver.cuTensorMapEncodeIm2col(*array, *box, _numbers((1, *stride, 1)), *options))
    return [int(word) for word in made.opaque]


def _lengths(values: Sequence[int]) -> list[driver.cuuint64_t]:
    return [UINT64(n) for n in values]


def _numbers(values: Sequence[int]) -> list[driver.cuuint32_t]:
    return [UINT32(n) for n in values]
