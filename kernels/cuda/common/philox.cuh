// Philox4x32-10 (J. Salmon et al., SC 2011): number i of a stream depends on (seed, step, stream, i) only.
#pragma once
#include "common/common.cuh"

// Four numbers of 32 bits. The key is the seed, the counter (block, stream, step low, step high).
__device__ __forceinline__ void philox(const uint32_t *rng, uint32_t stream, uint32_t block, uint32_t (&words)[4]) {
    uint32_t c0 = block, c1 = stream, c2 = rng[2], c3 = rng[3], k0 = rng[0], k1 = rng[1];
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}
