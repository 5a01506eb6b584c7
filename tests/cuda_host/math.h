// What kernels use of the C library's <math.h>, in which other declarations take a fifth of the time of each compilation. Functions of
// double and of float have the same names.
#pragma once

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define isnan __builtin_isnan
#define isfinite __builtin_isfinite

#define OF_ONE(name)                                                                                               \
    extern "C" double name(double) noexcept;                                                                       \
    extern "C" float name##f(float) noexcept;                                                                      \
    static float name(float x) { return name##f(x); }
OF_ONE(acos) OF_ONE(asin) OF_ONE(atan) OF_ONE(cbrt) OF_ONE(ceil) OF_ONE(cos) OF_ONE(cosh) OF_ONE(erf)
OF_ONE(erfc) OF_ONE(exp) OF_ONE(exp2) OF_ONE(expm1) OF_ONE(fabs) OF_ONE(floor) OF_ONE(log) OF_ONE(log1p)
OF_ONE(log2) OF_ONE(rint) OF_ONE(round) OF_ONE(sin) OF_ONE(sinh) OF_ONE(sqrt) OF_ONE(tan) OF_ONE(tanh)
OF_ONE(trunc)
#define OF_TWO(name)                                                                                               \
    extern "C" double name(double, double) noexcept;                                                               \
    extern "C" float name##f(float, float) noexcept;                                                               \
    static float name(float x, float y) { return name##f(x, y); }
OF_TWO(atan2) OF_TWO(copysign) OF_TWO(fmax) OF_TWO(fmin) OF_TWO(fmod) OF_TWO(pow)

extern "C" {
double fma(double, double, double) noexcept;
float fmaf(float, float, float) noexcept;
double frexp(double, int *) noexcept;
int ilogb(double) noexcept;
double ldexp(double, int) noexcept;
}
static float fma(float x, float y, float z) { return fmaf(x, y, z); }
