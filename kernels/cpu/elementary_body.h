/* The functions of elementary.h for one type: included there once for REAL float and once for REAL double. */

static inline BITS OF(bits)(REAL x) {
    BITS bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline REAL OF(from_bits)(BITS bits) {
    REAL x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The lowest bits of n + ROUND + c are the integer n + c. With c = BIAS, a shift moves them to the exponent and
   drops the others, so the result is 2^n. */

/* e^x = 2^n e^r. 2^n is applied as two factors, since it may overflow or underflow by itself: n + 2 BIAS is divided into
   two exponents. The ends of the range are selected last: if x were clamped first, gcc 12 would compute and blend
   several cases. */
static inline REAL OF(exp)(REAL x) {
    const REAL shifted = fma(x, LOG2_E, ROUND + 2 * BIAS), n = shifted - (ROUND + 2 * BIAS);
    const REAL r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x));
    const REAL y = fma(r, fma(r, OF(exp_tail)(r), 1), 1);
    const BITS sum = OF(bits)(shifted), half = sum >> 1;
    const REAL power = y * OF(from_bits)(half << MANTISSA) * OF(from_bits)((sum - half) << MANTISSA);
    const REAL low = x < EXP_LOW ? 0 : power;
    return x > EXP_HIGH ? INFINITY : low;
}

/* (e^x - 1) / 2 for x from EXPM1_LOW to EXP_HIGH: 2^(n - 1) (e^r - 1) + (2^(n - 1) - 1 / 2). 2^n may overflow. */
static inline REAL OF(half_expm1)(REAL x) {
    const REAL shifted = fma(x, LOG2_E, ROUND + (BIAS - 1)), n = shifted - (ROUND + (BIAS - 1));
    const REAL r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x));
    const REAL y = fma(r * r, OF(exp_tail)(r), r), scale = OF(from_bits)(OF(bits)(shifted) << MANTISSA);
    return fma(scale, y, scale - (REAL)0.5);
}

static inline REAL OF(expm1)(REAL x) {
    const REAL y = x == 0 ? x : 2 * OF(half_expm1)(x); /* -0 stays -0 */
    const REAL low = x < EXPM1_LOW ? -1 : y;
    return x > EXP_HIGH ? INFINITY : low;
}

/* log of x = 2^n (1 + f), with 1 + f from sqrt(1/2) to sqrt(2), plus `rest`, which is small: with s = f / (2 + f)
   log(1 + f) = 2 s + s^3 tail(s^2), written so that f, the largest term, is added last (as in K. C. Ng's fdlibm). */
static inline REAL OF(log_parts)(REAL x, REAL rest) {
    const REAL shift = x < SMALLEST_NORMAL ? (REAL)MANTISSA : 0;
    const REAL scaled = x < SMALLEST_NORMAL ? x * ((BITS)1 << MANTISSA) : x;
    const BITS bits = OF(bits)(scaled), exponent = (bits - SQRT_HALF_BITS) >> MANTISSA;
    /* The exponent as the lowest bits of 2^MANTISSA is the sum of both, without a conversion from integer. */
    const REAL two = (REAL)((BITS)1 << MANTISSA);
    const REAL n = OF(from_bits)(exponent | OF(bits)(two)) - two - (BIAS - 1) - shift;
    const REAL f = OF(from_bits)(bits - ((exponent - (BIAS - 1)) << MANTISSA)) - 1;
    const REAL s = f / (2 + f), z = s * s, half = (REAL)0.5 * f * f;
    const REAL sum = fma(s, fma(z, OF(log_tail)(z), half), fma(n, LN2_LOW, rest));
    return fma(n, LN2_HIGH, f - (half - sum));
}

/* `y` for positive finite x, else the logarithm's limit: -infinity, NaN or infinity. */
static inline REAL OF(log_ends)(REAL x, REAL y) {
    const REAL low = x == 0 ? -INFINITY : NAN;
    const REAL high = x <= LARGEST ? y : x;
    return x > 0 ? high : low;
}

static inline REAL OF(log)(REAL x) { return OF(log_ends)(x, OF(log_parts)(x, 0)); }

/* log(u) + (1 + x - u) / u with u = 1 + x as rounded: the second term is the part of x that rounding dropped. */
static inline REAL OF(log1p)(REAL x) {
    const REAL u = 1 + x, lost = x < 1 ? x - (u - 1) : 1 - (u - x);
    return x == 0 ? x : OF(log_ends)(u, OF(log_parts)(u, lost / u));
}

/* tanh |x| = h / (h + 1) with h = (e^(2 |x|) - 1) / 2. */
static inline REAL OF(tanh)(REAL x) {
    const REAL y = ABSOLUTE(x), h = OF(half_expm1)(2 * (y > TANH_HIGH ? TANH_HIGH : y));
    return COPY_SIGN(h / (h + 1), x);
}

#undef OF
#undef REAL
#undef BITS
#undef MANTISSA
#undef BIAS
#undef ROUND
#undef SMALLEST_NORMAL
#undef LARGEST
#undef EXP_LOW
#undef EXP_HIGH
#undef EXPM1_LOW
#undef TANH_HIGH
#undef LOG2_E
#undef LN2_HIGH
#undef LN2_LOW
#undef SQRT_HALF_BITS
#undef ABSOLUTE
#undef COPY_SIGN
