// Philox4x32-10 (J. Salmon et al., SC 2011): number i of a stream depends on (seed, step, stream, i) only.
#include "common/common.cuh"

// y[states, count] from rng[states, 4]. The key is the seed, the counter (block, stream, step low, step high). A block
// gives four numbers.
KERNEL random_uniform(const uint32_t *states_rng, T *states_y, int64_t states, int64_t count, int64_t stream) {
    wait_for_inputs();
    const int64_t blocks = (count + 3) / 4;
    for (int64_t i = grid_index(); i < states * blocks; i += grid_size()) {
        const int64_t state = states == 1 ? 0 : i / blocks, block = i - state * blocks;
        const uint32_t *rng = states_rng + 4 * state;
        T *y = states_y + state * count;
        uint32_t c0 = (uint32_t)block, c1 = (uint32_t)stream, c2 = rng[2], c3 = rng[3], k0 = rng[0], k1 = rng[1];
        #pragma unroll
        for (int round = 0; round < 10; round++) {
            const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
            const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
            c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        const uint32_t words[4] = {c0, c1, c2, c3};
        Vector<T, 4> numbers;
        #pragma unroll
        for (int k = 0; k < 4; k++) numbers.lane[k] = (T)(words[k] >> 8) * (T)(1.0 / (1 << 24));
        if (block * 4 + 4 <= count && state * count % 4 == 0)  // a vector's address is a multiple of its size
            store(y, block * 4, numbers);
        else
            #pragma unroll
            for (int k = 0; k < 4; k++)
                if (block * 4 + k < count) y[block * 4 + k] = numbers.lane[k];
    }
}
