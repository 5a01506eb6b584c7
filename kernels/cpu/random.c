/* Uniform random numbers in [0, 1), four of each Philox block. */

#include "philox.h"

/* y[states, count] from rng[states, 4]. The upper 24 bits of each word, so that float and double represent the same
   number. */
void FN(random_uniform_team)(const Team *team, const uint32_t *rng, T *y, int64_t states, int64_t count,
                             int64_t stream) {
    const int64_t batches = (count + 4 * BATCH - 1) / (4 * BATCH); /* of each state */
    int64_t begin, end;
    my_share(team, states * batches, &begin, &end);
    for (int64_t batch = begin; batch < end; batch++) {
        const int64_t state = batch / batches, start = batch % batches * 4 * BATCH;
        uint32_t words[4 * BATCH];
        philox((uint32_t)(start / 4), rng + 4 * state, (uint32_t)stream, words);
        const int64_t n = min_i64(4 * BATCH, count - start);
        T *to = y + state * count + start;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) to[i] = (T)(int32_t)(words[i] >> 8) * (T)0x1p-24;
    }
}
