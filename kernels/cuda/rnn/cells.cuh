// One step of a recurrent cell, and its pullback, for one row and hidden unit; formulas: adtrain/ops/recurrent.py.
#pragma once
#include "common/common.cuh"

#define GATES (LSTM ? 4 : GRU ? 3 : 1)

// Sigmoid and tanh. Those of float have no branches, as those of CUDA have, so that the instructions of several units overlap.
__device__ __forceinline__ double sigmoid(double x) { return 1 / (1 + exp(-x)); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }

// 1 / x for x from 1 to infinity, to the last bit but one.
__device__ __forceinline__ float reciprocal(float x) {
#if __CUDA_ARCH__ > 0
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1 / x;
#endif
}
__device__ __forceinline__ float sigmoid(float x) {
    const float d = 1 + exp(x < -80 ? 80.0f : -x), y = reciprocal(d);
    return fma(y, fma(-d, y, 1.0f), y); // a step of Newton's method
}
// exp(2 x) for x from 0; the error is at most 2^-22 (1 + x) of the result.
__device__ __forceinline__ float exp_of_twice(float x) {
#if __CUDA_ARCH__ > 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 2.8853900817779268f)); // 2 log2(e)
    return y;
#else
    return exp(2 * x);
#endif
}
// By a polynomial near 0, where 1 - 2 / (exp(2 x) + 1) would lose bits; the error is below 2^-21 of the result.
__device__ __forceinline__ float tanh_of(float x) {
    const float size = fabsf(x), s = x * x;
    float p = -0.0062414613f;
    p = fma(p, s, 0.021050362f);
    p = fma(p, s, -0.053847633f);
    p = fma(p, s, 0.13332547f);
    p = fma(p, s, -0.33333316f);
    const float large = copysign(fma(-2.0f, reciprocal(exp_of_twice(size) + 1), 1.0f), x);
    return size < 0.55f ? fma(x * s, p, x) : large;
}

// What a step computes: the new states, and what the gradient needs again.
struct Step {
    T h, cell, kept[4];
};

// in: the input products; s: weight_hh h + bias_hh; h and cell: the states before.
__device__ __forceinline__ Step step_of(const T (&in)[GATES], const T *s, T h, T cell) {
#if LSTM
    const T i = sigmoid(in[0] + s[0]), f = sigmoid(in[1] + s[1]), g = tanh_of(in[2] + s[2]), o = sigmoid(in[3] + s[3]);
    const T next = f * cell + i * g;
    return {o * tanh_of(next), next, {i, f, g, o}};
#elif GRU
    const T r = sigmoid(in[0] + s[0]), z = sigmoid(in[1] + s[1]), n = tanh_of(in[2] + r * s[2]);
    return {n + z * (h - n), 0, {r, z, n, s[2]}};
#elif RELU
    const T a = in[0] + s[0];
    return {a <= 0 ? (T)0 : a};
#else
    return {tanh_of(in[0] + s[0])};
#endif
}

// What the pullback of a step reads. state: y, or c of an LSTM; last: c before the step; hidden: h before it.
struct Given {
    T ct, kept[4], state, last, hidden;
};

// The cotangents that it computes: of s; of the input of a GRU's candidate; of the states before the step. That of h is without
// the part that goes through s.
struct StepGrad {
    T by_sum[GATES], by_candidate, h, cell;
};

// ct and cell: the cotangents of the states after the step.
__device__ __forceinline__ StepGrad step_grad_of(const Given &given, T ct, T cell) {
#if LSTM
    const T i = given.kept[0], f = given.kept[1], g = given.kept[2], o = given.kept[3], t = tanh_of(given.state);
    const T d = cell + ct * o * (1 - t * t);
    return {{d * g * i * (1 - i), d * given.last * f * (1 - f), d * i * (1 - g * g), ct * t * o * (1 - o)}, 0, 0, d * f};
#elif GRU
    const T r = given.kept[0], z = given.kept[1], n = given.kept[2], d = ct * (1 - z) * (1 - n * n);
    return {{d * given.kept[3] * r * (1 - r), ct * (given.hidden - n) * z * (1 - z), d * r}, d, ct * z};
#elif RELU
    return {{given.state > 0 ? ct : (T)0}};
#else
    return {{ct * (1 - given.state * given.state)}};
#endif
}
