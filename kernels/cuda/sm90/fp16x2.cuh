// Two float16 numbers in a 32-bit word.
#pragma once
#include "common/common.cuh"

// Rounds to nearest even; `low` is in the lower half.
__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ void unpack_half2(uint32_t word, float &low, float &high) {
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(low), "=f"(high) : "r"(word));
}
