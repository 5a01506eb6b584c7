/* floor_divide, floor_remainder and integer_power, as in Python and NumPy, for every type.

   Integers are computed in 64 bits, which hold the elements of all integer types. The result wraps around when the
   caller stores it in a narrower type. The quotient and the remainder by 0 are 0. Division by -1 is a multiplication:
   the processor's division of the smallest integer by -1 faults. */

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
    const int64_t remainder = a % b;
    return remainder + (remainder != 0 && (remainder < 0) != (b < 0) ? b : 0);
}

/* Powers by repeated squaring. A negative exponent gives the reciprocal without its fraction: 0, unless the base is 1
   or -1. */
static inline int64_t integer_power(int64_t base, int64_t exponent) {
    if (exponent < 0)
        return base == 1 || (base == -1 && exponent % 2 == 0) ? 1 : base == -1 ? -1 : 0;
    int64_t power = 1;
    for (; exponent > 0; exponent /= 2, base *= base)
        if (exponent % 2 == 1) power *= base;
    return power;
}

/* fmod is exact and has the sign of a; floor_remainder has the sign of b, also if it is 0. The quotient (a - fmod) / b
   is a whole number up to rounding; `whole` is the nearest one. */
#define DEFINE_FLOAT_DIVISION(REAL, SUFFIX, FMOD, FLOOR, COPY_SIGN)                                         \
    static inline REAL floor_remainder_##SUFFIX(REAL a, REAL b) {                                           \
        const REAL remainder = FMOD(a, b);                                                                  \
        const bool other_sign = (remainder < 0) != (b < 0);                                                 \
        return remainder == 0 ? COPY_SIGN(0, b) : other_sign ? remainder + b : remainder;                   \
    }                                                                                                       \
    static inline REAL floor_divide_##SUFFIX(REAL a, REAL b) {                                              \
        const REAL remainder = FMOD(a, b);                                                                  \
        const bool other_sign = remainder != 0 && (remainder < 0) != (b < 0);                               \
        const REAL quotient = (a - remainder) / b - (other_sign ? 1 : 0), below = FLOOR(quotient);          \
        const REAL whole = quotient - below > (REAL)0.5 ? below + 1 : below;                                \
        return b == 0 ? a / b : quotient == 0 ? COPY_SIGN(0, a / b) : whole;                                \
    }

DEFINE_FLOAT_DIVISION(float, float32, __builtin_fmodf, __builtin_floorf, __builtin_copysignf)
DEFINE_FLOAT_DIVISION(double, float64, __builtin_fmod, __builtin_floor, __builtin_copysign)

#define floor_divide(a, b) \
    _Generic((a), float: floor_divide_float32, double: floor_divide_float64, default: floor_divide_int64)(a, b)
#define floor_remainder(a, b) \
    _Generic((a), float: floor_remainder_float32, double: floor_remainder_float64, default: floor_remainder_int64)(a, b)
