/* What exported C uses of <math.h>, for WebAssembly, which has no C library: see library.c. */

#pragma once

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define fabsf __builtin_fabsf
#define sqrtf __builtin_sqrtf

float expf(float);
float expm1f(float);
float logf(float);
float log1pf(float);
float tanhf(float);
float erff(float);
