// float32 numbers rounded to a shorter format with the same exponents, as operands of products are that need not be exact:
// `ops/rounding.py` on the GPU.
#pragma once
#include "common/common.cuh"

// Bits of mantissa that operands are rounded to, to nearest, ties to even; 23: they stay as they are.
#ifndef MANTISSA
#define MANTISSA 23
#endif
__device__ __forceinline__ float rounded(float x) {
    constexpr int DROPPED = 23 - MANTISSA;
    if constexpr (DROPPED == 0) return x;
    const uint32_t bits = __float_as_uint(x), half = (1u << DROPPED) / 2, odd = bits >> DROPPED & 1;
    return x == x ? __uint_as_float((bits + (half - 1) + odd) >> DROPPED << DROPPED) : x;
}
