/* Philox4x32-10 (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): block i of four numbers is a
   function of i, so that threads and vector lanes are independent. */

#pragma once

#include "common.h"

enum {
    ROUNDS = 10,
    BATCH = 16 /* blocks computed together */
};

/* Blocks first to first + BATCH: words[4 i + k] is word k of block first + i. */
static void philox(uint32_t first, const uint32_t rng[4], uint32_t stream, uint32_t *words) {
#pragma omp simd
    for (uint32_t i = 0; i < BATCH; i++) {
        uint32_t c0 = first + i, c1 = stream, c2 = rng[2], c3 = rng[3], k0 = rng[0], k1 = rng[1];
#pragma GCC unroll 10
        for (int round = 0; round < ROUNDS; round++) {
            const uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
            c1 = (uint32_t)p1;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
            c3 = (uint32_t)p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        words[4 * i] = c0;
        words[4 * i + 1] = c1;
        words[4 * i + 2] = c2;
        words[4 * i + 3] = c3;
    }
}
