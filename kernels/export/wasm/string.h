/* What exported C uses of <string.h>, for WebAssembly: see library.c. */

#pragma once

#include <stddef.h>

void *memcpy(void *restrict to, const void *restrict from, size_t bytes);
void *memset(void *to, int byte, size_t bytes);
