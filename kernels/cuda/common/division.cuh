// floor_divide, floor_remainder and integer_power, as in Python and NumPy, for every type.
//
// Integers are computed in 64 bits, which hold the elements of all integer types. The result wraps around when the caller
// stores it in a narrower type. The quotient and the remainder by 0 are 0.
#pragma once

template <typename E> constexpr bool IS_FLOAT = false;
template <> constexpr bool IS_FLOAT<float> = true;
template <> constexpr bool IS_FLOAT<double> = true;

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
