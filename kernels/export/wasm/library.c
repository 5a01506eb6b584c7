/* The functions of the C library that exported C calls, for WebAssembly. Those of <math.h> are the CPU backend's. */

#include "elementary.h"
#include "math.h"
#include "string.h"

float expf(float x) {
    return exp_float32(x);
}

float expm1f(float x) {
    return expm1_float32(x);
}

float logf(float x) {
    return log_float32(x);
}

float log1pf(float x) {
    return log1p_float32(x);
}

float tanhf(float x) {
    return tanh_float32(x);
}

float erff(float x) {
    return erf_float32(x);
}

/* With -mbulk-memory each is one instruction. */
void *memcpy(void *restrict to, const void *restrict from, size_t bytes) {
    return __builtin_memcpy(to, from, bytes);
}

void *memset(void *to, int byte, size_t bytes) {
    return __builtin_memset(to, byte, bytes);
}
