// The instructions of common/mma_sync.cuh on the CPU. A product has one rounding.
#pragma once
#include "common/common.cuh"

enum Half { FLOAT16, BFLOAT16_BITS };

template <Half FORMAT> static uint32_t pack_pair(float low, float high) {
    return FORMAT == BFLOAT16_BITS ? rounded_pair(low, high) : pack_float16(low, high);
}

static unsigned shared_address(const void *at) { return (unsigned)__cvta_generic_to_shared(at); }

template <bool TRANSPOSED, int COUNT> static void load_matrices(uint32_t (&words)[COUNT], unsigned address) {
    const int warp = current / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    exchanged[warp][threadIdx.x % 32][0] = address;
    __syncwarp();
    for (int i = 0; i < COUNT; i++) {
        uint16_t pair[2];
        for (int h = 0; h < 2; h++) {
            const int row = TRANSPOSED ? 2 * c + h : g, column = TRANSPOSED ? g : 2 * c + h;
            const unsigned from = exchanged[warp][8 * i + row][0];
            if (from % 16) __builtin_abort();
            memcpy(&pair[h], shared_bytes + from + 2 * column, 2);
        }
        memcpy(&words[i], pair, 4);
    }
    __syncwarp();
}

static void store_matrices(char *row, const uint32_t *words) {
    const int lane = threadIdx.x % WARP;
    for (int i = 0; i < 4; i++) {
        char *to = __shfl_sync(FULL_MASK, row, 8 * i + lane / 4);
        memcpy(to + lane % 4 * 4, words + i, 4);
    }
}

static uint32_t transposed_matrix(uint32_t words) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    uint32_t found = 0;
    for (int h = 0; h < 2; h++)
        found |= (__shfl_sync(FULL_MASK, words, 4 * (2 * c + h) + g / 2) >> g % 2 * 16 & 0xffff) << 16 * h;
    return found;
}

template <Half FORMAT> static void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    multiply_add(c[0], c[1], c[2], c[3], words, FORMAT == FLOAT16 ? unpack_float16 : unpack_bfloat16);
}

static uint32_t tf32_bits(float x) {
    const uint32_t bits = __float_as_uint(x);
    return x == x ? (bits + 0x1000) & 0xffffe000 : bits;
}

static void multiply_add_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    static uint32_t words[FIBERS / 32][32][6];
    uint32_t(&of_warp)[32][6] = words[current / 32];
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    memcpy(of_warp[threadIdx.x % 32], own, sizeof own);
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        double sum = c[i];
        for (int k = 0; k < 8; k++)
            sum += (double)__uint_as_float(of_warp[4 * g + k % 4][i / 2 + k / 4 * 2])
                * __uint_as_float(of_warp[4 * (2 * t + i % 2) + k % 4][4 + k / 4]);
        c[i] = (float)sum;
    }
    __syncwarp();
}
