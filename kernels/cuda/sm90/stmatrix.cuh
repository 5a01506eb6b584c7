// Stores of accumulators to shared memory. PTX ISA, "stmatrix".
#pragma once
#include "common/common.cuh"

// Stores four 8 x 8 matrices of 16-bit elements. A lane has two neighbours of each: row lane / 4, columns lane % 4 * 2
// and the next. Lane 8 i + r has the address of row r of matrix i, 16 bytes.
__device__ __forceinline__ void store_matrices(char *row, const uint32_t *words) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     (unsigned)__cvta_generic_to_shared(row)),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
        : "memory");
}
