// float32 operands in other formats: rounded to the mantissa of tf32 or bfloat16, as `core/precision.py` does on the CPU, or as
// one or two scaled 16-bit terms (fp16x2: Ootomo and Yokota, 2022).
#pragma once
#include "common/common.cuh"
#include "common/mma_sync.cuh"

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

// The scale 2^k that brings `largest` to [2^14, 2^15), and 2^-k. NaN for infinity and NaN.
struct Scale {
    float factor, inverse;
    __device__ __forceinline__ explicit Scale(float largest) {
        const uint32_t exponent = __float_as_uint(largest) >> 23, field = 268 - max(exponent, 15u);
        factor = exponent < 255 ? __uint_as_float(field << 23) : NAN;
        inverse = exponent < 255 ? __uint_as_float((254 - field) << 23) : NAN;
    }
};

// The terms of two neighbouring elements, the largest first. Only float16 has two.
template <Half FORMAT, int COUNT> __device__ __forceinline__ void split_terms(float low, float high, uint32_t (&terms)[COUNT]) {
    terms[0] = pack_pair<FORMAT>(low, high);
    if constexpr (COUNT == 2) {
        float low_term, high_term;
        unpack_float16(terms[0], low_term, high_term);
        terms[1] = pack_pair<FORMAT>(low - low_term, high - high_term);
    }
}
