// A narrow operand of mma.sync.m16n8k16 in global memory: the columns of a matrix of bfloat16 that has few of them.
#pragma once
#include "common/mma_sync.cuh"

// For lane (g, c) the pair of numbers at k = at(2c) and the next k, in column `first` + g; 0 from `k` on. WIDTH: the columns of the
// matrix, whose elements are K-major, or [k][WIDTH]. at() maps the rows of a matrix of 8 x 8 to different k.
template <int WIDTH, bool K_MAJOR, class Index, class At> __device__ __forceinline__ uint32_t narrow_pair(
    const uint16_t *matrix, int first, Index k, const At &at) {
    const int g = threadIdx.x % WARP / 4, c = threadIdx.x % 4;
    const Index row = at(K_MAJOR ? 2 * c : g);
    const uint16_t *const from = matrix + (K_MAJOR ? (first + g) * k + row : row * WIDTH + first + 2 * c);
    const uint32_t pair = row < k ? *(const uint32_t *)from : 0;
    return K_MAJOR ? pair : transposed_matrix(pair);
}
