// The normal distribution function and its density, for gelu.
#pragma once

#include "common/exp2_approximate.cuh"

// e^(-x^2 / 2)
__device__ __forceinline__ float normal_exp(float x) { return exp2_approximate(x * x * -0.72134752f); }

__device__ __forceinline__ float normal_pdf(float x) { return normal_exp(x) * 0.39894228f; }
__device__ __forceinline__ double normal_pdf(double x) { return exp(x * x * -0.5) * 0.3989422804014327; }

// The smaller tail is e^(-x^2 / 2) q(|x|), where q is a polynomial up to 5 and constant from there on. kernels/cpu/elementary.h
// has the same coefficients. There are no branches, and gelu's derivative uses the same exponential. The absolute error is below
// 2e-7.
__device__ __forceinline__ float normal_cdf(float x) {
    constexpr float Q[] = {0.249977887f,   -0.132827923f,   0.0619738623f,   -0.0255390741f,  0.00906078238f,
                           -0.00262103672f, 0.000574403792f, -8.7071734e-05f, 7.9842943e-06f, -3.2963487e-07f};
    const float y = fminf(fabsf(x), 5);
    float q = Q[9];
    #pragma unroll
    for (int i = 8; i >= 0; i--) q = fmaf(q, y, Q[i]);
    const float tail = normal_exp(x) * fmaf(fmaf(q, y, -0.398941159f), y, 0.5f);
    return x < 0 ? tail : 1 - tail;
}
__device__ __forceinline__ double normal_cdf(double x) { return 0.5 * erfc(x * -0.7071067811865476); }
