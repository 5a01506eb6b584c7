// kernels/cuda/sm90/stmatrix.cuh on the CPU.
#pragma once
#include "common/common.cuh"

static void store_matrices(char *row, const uint32_t *words) {
    const int lane = threadIdx.x % WARP;
    for (int i = 0; i < 4; i++) {
        char *to = __shfl_sync(FULL_MASK, row, 8 * i + lane / 4);
        memcpy(to + lane % 4 * 4, words + i, 4);
    }
}
