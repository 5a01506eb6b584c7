/* exp, log, log1p, expm1, tanh, erf and others for float and double, by their names in <math.h>: exp(x) is exp_float32
   or exp_float64. (The file is not called math.h because this folder precedes the system's.)

   The first six (erf for float only) have no branches, tables or calls, so that a loop over them becomes vector
   instructions; selections at the ends of the range become blends. The others are the compiler's: sqrt, fabs, floor,
   ceil, trunc and rint are instructions; sin, cos, pow, atan2 and hypot call the C library. The code relies on IEEE
   arithmetic (no -ffast-math).

   Largest errors, in units in the last place (tests/test_cpu_math.py): exp 1.0, log and log1p 0.9, expm1 2.1, tanh
   2.5, erf of float 0.9, or 1.1 without fused multiply-adds.
   Ranges are reduced as by W. J. Cody and W. Waite, Software Manual for the Elementary Functions, 1980: n ln 2 is
   subtracted in two parts; the product of n and the first is exact. All polynomials are minimax (Remez exchange). */

#pragma once

#include <stdint.h>
#include <string.h>

#ifndef INFINITY
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#endif

/* a b + c, rounded once on processors that have an instruction for it, and twice on others. */
#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__aarch64__)
static inline float fma_float32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double fma_float64(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
static inline float fma_float32(float a, float b, float c) { return a * b + c; }
static inline double fma_float64(double a, double b, double c) { return a * b + c; }
#endif
#define fma(a, b, c) _Generic((a), float: fma_float32, default: fma_float64)(a, b, c)

/* The value of c[0] + c[1] x + ... as a polynomial of degree 2 or more, by Horner's rule. */
#define POLY2(x, c0, c1, c2) fma(x, fma(x, c2, c1), c0)
#define POLY4(x, c0, c1, c2, c3, c4) POLY2(x, c0, c1, POLY2(x, c2, c3, c4))
#define POLY5(x, c0, c1, c2, c3, c4, c5) POLY2(x, c0, c1, fma(x, POLY2(x, c3, c4, c5), c2))
#define POLY6(x, c0, c1, c2, c3, c4, c5, c6) POLY2(x, c0, c1, POLY4(x, c2, c3, c4, c5, c6))
#define POLY8(x, c0, c1, c2, c3, c4, c5, c6, c7, c8) POLY2(x, c0, c1, POLY6(x, c2, c3, c4, c5, c6, c7, c8))
#define POLY9(x, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9) \
    POLY4(x, c0, c1, c2, c3, POLY5(x, c4, c5, c6, c7, c8, c9))

/* (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2: relative error of e^r - 1 below 2^-26 and 2^-55. */
static inline float exp_tail_float32(float r) {
    return POLY4(r, 0.5f, 0.166665435f, 0.0416662805f, 0.00836661179f, 0.00139464799f);
}

static inline double exp_tail_float64(double r) {
    return POLY9(r, 0.5000000000000006, 0.16666666666666685, 0.04166666666657332, 0.008333333333314487,
                 0.0013888888932484637, 0.00019841269903262082, 2.4801504311305974e-05, 2.755722774275984e-06,
                 2.762638261314062e-07, 2.51145412797036e-08);
}

/* (log((1 + s) / (1 - s)) - 2 s) / s^3 as a function of z = s^2, for (1 + s) / (1 - s) from sqrt(1/2) to sqrt(2):
   relative error below 2^-29 and 2^-58. */
static inline float log_tail_float32(float z) { return POLY2(z, 0.666667759f, 0.399775445f, 0.29871732f); }

static inline double log_tail_float64(double z) {
    return POLY6(z, 0.6666666666666734, 0.39999999999416164, 0.2857142874214747, 0.22222198591311218,
                 0.18183563645008416, 0.15314062539776, 0.14795875812695763);
}

#define OF(name) name##_float32
#define REAL float
#define BITS uint32_t
#define MANTISSA 23                /* bits of the significand that are stored */
#define BIAS 127                   /* of the exponent */
#define ROUND 0x1.8p23f            /* added and taken away again: the nearest integer */
#define SMALLEST_NORMAL 0x1p-126f
#define LARGEST 0x1.fffffep127f
#define EXP_LOW (-104.0f)          /* e^x is 0 from here on, */
#define EXP_HIGH 89.0f             /* infinite from here on, */
#define EXPM1_LOW (-18.0f)         /* and e^x - 1 is -1 from here on */
#define TANH_HIGH 10.0f            /* tanh is 1 from here on */
#define LOG2_E 1.44269504f
#define LN2_HIGH 0x1.62e4p-1f      /* 15 bits */
#define LN2_LOW 1.42860677e-6f
#define SQRT_HALF_BITS 0x3504f3u   /* the stored significand of sqrt(1/2) */
#define ABSOLUTE __builtin_fabsf
#define COPY_SIGN __builtin_copysignf
#include "elementary_body.h"

#define OF(name) name##_float64
#define REAL double
#define BITS uint64_t
#define MANTISSA 52
#define BIAS 1023
#define ROUND 0x1.8p52
#define SMALLEST_NORMAL 0x1p-1022
#define LARGEST 0x1.fffffffffffffp1023
#define EXP_LOW (-746.0)
#define EXP_HIGH 710.0
#define EXPM1_LOW (-38.0)
#define TANH_HIGH 20.0
#define LOG2_E 1.4426950408889634
#define LN2_HIGH 0x1.62e42fee00000p-1 /* 32 bits */
#define LN2_LOW 1.9082149292705877e-10
#define SQRT_HALF_BITS 0x6a09e667f3bcdu
#define ABSOLUTE __builtin_fabs
#define COPY_SIGN __builtin_copysign
#include "elementary_body.h"

/* erf(x) = x + x p(x^2) below ERF_MIDDLE, and from there on 1 - e^(-x^2) q(|x| - 1.5), where q(y - 1.5) is
   e^(y^2) erfc(y) up to y = 4. Further on e^(-x^2) q is below half a unit in the last place of 1. A derivative that
   computes exp(-(x * x)) as well shares it. */
#define ERF_MIDDLE 0.9f

static inline float erf_float32(float x) {
    const float z = x * x, y = __builtin_fabsf(x), t = (y > 4 ? 4 : y) - 1.5f;
    const float p = POLY6(z, 0.128379166f, -0.376126349f, 0.112837151f, -0.0268605091f,
                          0.00520385895f, -0.000817563967f, 8.51310469e-05f);
    const float q = POLY8(t, 0.321585387f, -0.163622588f, 0.0761541575f, -0.0329340957f,
                          0.0133441808f, -0.00513707194f, 0.00198599626f, -0.0007021153f, 0.000134691334f);
    const float large = __builtin_copysignf(fma(-exp_float32(-z), q, 1), x);
    return y < ERF_MIDDLE ? fma(x, p, x) : large;
}

/* The normal distribution function and its density, for gelu. The smaller tail is e^(-x^2 / 2) q(|x|), where q is a
   polynomial up to 5 and constant from there on. gelu's derivative uses the same exponential. The absolute error is below
   9e-8 for float. */
static inline float normal_pdf_float32(float x) { return exp_float32(x * x * -0.5f) * 0.39894228f; }
static inline double normal_pdf_float64(double x) { return exp_float64(x * x * -0.5) * 0.3989422804014327; }

static inline float normal_cdf_float32(float x) {
    const float size = __builtin_fabsf(x), y = size > 5 ? 5 : size;
    const float q = POLY9(y, 0.249977887f, -0.132827923f, 0.0619738623f, -0.0255390741f, 0.00906078238f,
                          -0.00262103672f, 0.000574403792f, -8.7071734e-05f, 7.9842943e-06f, -3.2963487e-07f);
    const float tail = exp_float32(x * x * -0.5f) * POLY2(y, 0.5f, -0.398941159f, q);
    return x < 0 ? tail : 1 - tail;
}

static inline double normal_cdf_float64(double x) { return 0.5 * __builtin_erfc(x * -0.7071067811865476); }

#define normal_cdf(x) _Generic((x), float: normal_cdf_float32, default: normal_cdf_float64)(x)
#define normal_pdf(x) _Generic((x), float: normal_pdf_float32, default: normal_pdf_float64)(x)
#define exp(x) _Generic((x), float: exp_float32, default: exp_float64)(x)
#define log(x) _Generic((x), float: log_float32, default: log_float64)(x)
#define log1p(x) _Generic((x), float: log1p_float32, default: log1p_float64)(x)
#define expm1(x) _Generic((x), float: expm1_float32, default: expm1_float64)(x)
#define tanh(x) _Generic((x), float: tanh_float32, default: tanh_float64)(x)
#define erf(x) _Generic((x), float: erf_float32, default: __builtin_erf)(x)
#define sqrt(x) _Generic((x), float: __builtin_sqrtf, default: __builtin_sqrt)(x)
#define fabs(x) _Generic((x), float: __builtin_fabsf, default: __builtin_fabs)(x)
#define sin(x) _Generic((x), float: __builtin_sinf, default: __builtin_sin)(x)
#define cos(x) _Generic((x), float: __builtin_cosf, default: __builtin_cos)(x)
#define pow(x, y) _Generic((x), float: __builtin_powf, default: __builtin_pow)(x, y)
#define atan2(y, x) _Generic((x), float: __builtin_atan2f, default: __builtin_atan2)(y, x)
#define hypot(x, y) _Generic((x), float: __builtin_hypotf, default: __builtin_hypot)(x, y)
#define floor(x) _Generic((x), float: __builtin_floorf, default: __builtin_floor)(x)
#define ceil(x) _Generic((x), float: __builtin_ceilf, default: __builtin_ceil)(x)
#define trunc(x) _Generic((x), float: __builtin_truncf, default: __builtin_trunc)(x)
#define rint(x) _Generic((x), float: __builtin_rintf, default: __builtin_rint)(x)
