/* floor_divide, floor_remainder and integer_power, as in Python and NumPy, for every type.

   Integers are computed in 64 bits, which hold the elements of all integer types; the variable that the caller stores the
   result in wraps it around. The quotient and the remainder by 0 are 0. Division by -1 is a product: the processor's
   division of the lowest number by -1 is a fault. */

#pragma once

#include <stdbool.h>
#include <stdint.h>

static inline int64_t floor_divide_int64(int64_t a, int64_t b) {
    if (b == 0 || b == -1)
        return a * b;
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

static inline int64_t floor_remainder_int64(int64_t a, int64_t b) {
    if (b == 0 || b == -1)
        return 0;
    const int64_t rest = a % b;
    return rest + (rest != 0 && (rest < 0) != (b < 0) ? b : 0);
}

/* Powers by squaring. A negative exponent gives the reciprocal without its fraction: 0, except for 1 and -1. */
static inline int64_t integer_power(int64_t base, int64_t exponent) {
    if (exponent < 0)
        return base == 1 || (base == -1 && exponent % 2 == 0) ? 1 : base == -1 ? -1 : 0;
    int64_t power = 1;
    for (; exponent > 0; exponent /= 2, base *= base)
        if (exponent % 2 == 1) power *= base;
    return power;
}

/* `rest`, with the sign of a, is exact. The remainder has the sign of b, also where it is 0. The quotient (a - rest) / b is
   a whole number up to rounding; `whole` is the nearest one. */
#define DEFINE_FLOAT_DIVISION(REAL, SUFFIX, FMOD, FLOOR, COPY_SIGN)                                  \
    static inline REAL floor_remainder_##SUFFIX(REAL a, REAL b) {                                    \
        const REAL rest = FMOD(a, b);                                                                \
        const bool other_sign = (rest < 0) != (b < 0);                                               \
        return rest == 0 ? COPY_SIGN(0, b) : other_sign ? rest + b : rest;                           \
    }                                                                                                \
    static inline REAL floor_divide_##SUFFIX(REAL a, REAL b) {                                       \
        const REAL rest = FMOD(a, b);                                                                \
        const bool other_sign = rest != 0 && (rest < 0) != (b < 0);                                  \
        const REAL quotient = (a - rest) / b - (other_sign ? 1 : 0), below = FLOOR(quotient);        \
        const REAL whole = quotient - below > (REAL)0.5 ? below + 1 : below;                         \
        return b == 0 ? a / b : quotient == 0 ? COPY_SIGN(0, a / b) : whole;                         \
    }

DEFINE_FLOAT_DIVISION(float, float32, __builtin_fmodf, __builtin_floorf, __builtin_copysignf)
DEFINE_FLOAT_DIVISION(double, float64, __builtin_fmod, __builtin_floor, __builtin_copysign)

#define floor_divide(a, b) \
    _Generic((a), float: floor_divide_float32, double: floor_divide_float64, default: floor_divide_int64)(a, b)
#define floor_remainder(a, b) \
    _Generic((a), float: floor_remainder_float32, double: floor_remainder_float64, default: floor_remainder_int64)(a, b)
