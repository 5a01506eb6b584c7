// Division by a constant divisor: a multiplication and at most one correction.
#pragma once
#include "common/common.cuh"

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
