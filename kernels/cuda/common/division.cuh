// floor_divide, floor_remainder and integer_power, as in Python and NumPy, for every type.
//
// Integers are computed in 64 bits, which hold the elements of all integer types; the variable that the caller stores the
// result in wraps it around. The quotient and the remainder by 0 are 0.
#pragma once

template <typename E> constexpr bool IS_FLOAT = (E)0.5 != (E)0;

template <typename E> __device__ __forceinline__ E floor_divide(E a, E b) {
    if constexpr (IS_FLOAT<E>) {
        const E rest = fmod(a, b); // with the sign of a, exact
        const bool other_sign = rest != 0 && (rest < 0) != (b < 0);
        const E quotient = (a - rest) / b - (E)other_sign, below = floor(quotient); // a whole number up to rounding
        const E whole = quotient - below > (E)0.5 ? below + 1 : below;
        return b == 0 ? a / b : quotient == 0 ? copysign((E)0, a / b) : whole;
    } else {
        const int64_t x = (int64_t)a, y = (int64_t)b;
        if (y == 0 || y == -1) return (E)((uint64_t)x * (uint64_t)y); // the lowest number wraps around
        return (E)(x / y - (x % y != 0 && (x < 0) != (y < 0)));
    }
}

template <typename E> __device__ __forceinline__ E floor_remainder(E a, E b) {
    if constexpr (IS_FLOAT<E>) {
        const E rest = fmod(a, b);
        const bool other_sign = (rest < 0) != (b < 0);
        return rest == 0 ? copysign((E)0, b) : other_sign ? rest + b : rest;
    } else {
        const int64_t x = (int64_t)a, y = (int64_t)b;
        if (y == 0 || y == -1) return 0;
        const int64_t rest = x % y;
        return (E)(rest + (rest != 0 && (rest < 0) != (y < 0) ? y : 0));
    }
}

// Powers by squaring. A negative exponent gives the reciprocal without its fraction: 0, except for 1 and -1.
__device__ __forceinline__ int64_t integer_power(int64_t base, int64_t exponent) {
    if (exponent < 0) return base == 1 || (base == -1 && exponent % 2 == 0) ? 1 : base == -1 ? -1 : 0;
    uint64_t factor = (uint64_t)base, power = 1;
    for (; exponent > 0; exponent /= 2, factor *= factor)
        if (exponent % 2 == 1) power *= factor;
    return (int64_t)power;
}
