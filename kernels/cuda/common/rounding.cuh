// Rounds float32 operands to the mantissa of tf32 or bfloat16, as `core/precision.py` does on the CPU.
#pragma once
#include "common/common.cuh"

// Mantissa bits of an operand; 23 for no rounding. Rounding is to nearest, ties to even.
#ifndef MANTISSA
#define MANTISSA 23
#endif
__device__ __forceinline__ float rounded(float x) {
    constexpr int DROPPED = 23 - MANTISSA;
    if constexpr (DROPPED == 0) return x;
#if __CUDA_ARCH__ >= 900
    if constexpr (MANTISSA == 10) {
        uint32_t in_tf32;
        asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(in_tf32) : "f"(x));
        return __uint_as_float(in_tf32);
    }
#endif
    const uint32_t bits = __float_as_uint(x), half = (1u << DROPPED) / 2, odd = bits >> DROPPED & 1;
    return x == x ? __uint_as_float((bits + (half - 1) + odd) >> DROPPED << DROPPED) : x;
}
