// Arithmetic that CUDA has no function for: integer division, powers, the normal distribution.
#pragma once
#include "common/exp2_approximate.cuh"

template <typename E> constexpr bool IS_FLOAT = false;
template <> constexpr bool IS_FLOAT<float> = true;
template <> constexpr bool IS_FLOAT<double> = true;

// floor_divide, floor_remainder and integer_power, as in Python and NumPy, for every type.
//
// Integers are computed in 64 bits, which hold the elements of all integer types. The result wraps around when the caller
// stores it in a narrower type. The quotient and the remainder by 0 are 0.
template <typename E> __device__ __forceinline__ E floor_divide(E a, E b) {
    if constexpr (IS_FLOAT<E>) {
        const E remainder = fmod(a, b); // exact, with the sign of a
        const bool other_sign = remainder != 0 && (remainder < 0) != (b < 0);
        const E quotient = (a - remainder) / b - (E)other_sign, below = floor(quotient); // a whole number up to rounding
        const E whole = quotient - below > (E)0.5 ? below + 1 : below;
        return b == 0 ? a / b : quotient == 0 ? copysign((E)0, a / b) : whole;
    } else {
        const int64_t x = (int64_t)a, y = (int64_t)b;
        if (y == 0 || y == -1) return (E)((uint64_t)x * (uint64_t)y); // the smallest integer wraps around
        return (E)(x / y - (x % y != 0 && (x < 0) != (y < 0)));
    }
}

template <typename E> __device__ __forceinline__ E floor_remainder(E a, E b) {
    if constexpr (IS_FLOAT<E>) {
        const E remainder = fmod(a, b);
        const bool other_sign = (remainder < 0) != (b < 0);
        return remainder == 0 ? copysign((E)0, b) : other_sign ? remainder + b : remainder;
    } else {
        const int64_t x = (int64_t)a, y = (int64_t)b;
        if (y == 0 || y == -1) return 0;
        const int64_t remainder = x % y;
        return (E)(remainder + (remainder != 0 && (remainder < 0) != (y < 0) ? y : 0));
    }
}

// Powers by repeated squaring. A negative exponent gives the reciprocal without its fraction: 0, unless base is 1 or -1.
__device__ __forceinline__ int64_t integer_power(int64_t base, int64_t exponent) {
    if (exponent < 0) return base == 1 || (base == -1 && exponent % 2 == 0) ? 1 : base == -1 ? -1 : 0;
    uint64_t factor = (uint64_t)base, power = 1;
    for (; exponent > 0; exponent /= 2, factor *= factor)
        if (exponent % 2 == 1) power *= factor;
    return (int64_t)power;
}

// Division by a constant divisor: a multiplication and at most one correction.
// I: uint32_t, for numbers below 2^32, or int64_t, which divides as usual.
template <typename I> struct Divisor {
    I number;

    __device__ __forceinline__ explicit Divisor(int64_t number) : number((I)number) {}
    // Returns n / number; n becomes the remainder.
    __device__ __forceinline__ I operator()(I &n) const {
        const I quotient = n / number;
        n -= quotient * number;
        return quotient;
    }
};

template <> struct Divisor<uint32_t> {
    uint32_t number, reciprocal;

    __device__ __forceinline__ explicit Divisor(int64_t n) : number((uint32_t)n), reciprocal(0xffffffffu / number) {}
    __device__ __forceinline__ uint32_t operator()(uint32_t &n) const {
        // reciprocal / 2^32 is below 1 / number by at most 2^-32: this is the quotient or one less
        uint32_t quotient = __umulhi(n, reciprocal);
        n -= quotient * number;
        if (n >= number) n -= number, quotient++;
        return quotient;
    }
};

// e^x, with a relative error below 2^-22 + |x| 2^-23: for results that are rounded to bfloat16.
__device__ __forceinline__ float exp_approximate(float x) { return exp2_approximate(x * 1.44269504f); }

// The normal distribution function and its density, for gelu.
//
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
