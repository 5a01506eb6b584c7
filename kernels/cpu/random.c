/* Uniform random numbers in [0, 1), four of each Philox block. */

#include "philox.h"

/* The upper 24 bits of each word, so that float and double represent the same number. */
void FN(random_uniform_team)(const Team *team, const uint32_t *rng, T *y, int64_t count, int64_t stream) {
    int64_t begin, end;
    my_cache_lines(team, count, &begin, &end); /* begins at a multiple of 64 = 4 * BATCH numbers */
    for (int64_t start = begin; start < end; start += 4 * BATCH) {
        uint32_t words[4 * BATCH];
        philox((uint32_t)(start / 4), rng, (uint32_t)stream, words);
        const int64_t n = min_i64(4 * BATCH, end - start);
#pragma omp simd
        for (int64_t i = 0; i < n; i++) y[start + i] = (T)(int32_t)(words[i] >> 8) * (T)0x1p-24;
    }
}
