// float32 rounded to fewer bits of mantissa, for operands in tf32 and bfloat16: `ops/rounding.py` on the GPU.
#pragma once
#include "common/common.cuh"

// Bits of mantissa that operands keep. Rounding is to nearest, ties to even; 23 keeps all.
#ifndef MANTISSA
#define MANTISSA 23
#endif
__device__ __forceinline__ float rounded(float x) {
    constexpr int DROPPED = 23 - MANTISSA;
    if constexpr (DROPPED == 0) return x;
    const uint32_t bits = __float_as_uint(x), half = (1u << DROPPED) / 2, odd = bits >> DROPPED & 1;
    return x == x ? __uint_as_float((bits + (half - 1) + odd) >> DROPPED << DROPPED) : x;
}
