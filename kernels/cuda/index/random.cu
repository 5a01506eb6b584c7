// Uniform random numbers in [0, 1), four of each Philox block.
#include "common/common.cuh"

// y[states, count] from rng[states, 4].
KERNEL random_uniform(const uint32_t *rng, T *y, int64_t states, int64_t count, int64_t stream) {
    wait_for_inputs();
    const int64_t blocks = (count + 3) / 4;  // of each state
    for (int64_t i = grid_index(); i < states * blocks; i += grid_size()) {
        const int64_t state = states == 1 ? 0 : i / blocks, block = i - state * blocks;
        T *to = y + state * count;
        uint32_t words[4];
        philox(rng + 4 * state, (uint32_t)stream, (uint32_t)block, words);
        Vector<T, 4> numbers;
        #pragma unroll
        for (int k = 0; k < 4; k++) numbers.lane[k] = (T)(words[k] >> 8) * (T)(1.0 / (1 << 24));
        if (block * 4 + 4 <= count && state * count % 4 == 0)  // a vector's address is a multiple of its size
            store(to, block * 4, numbers);
        else
            #pragma unroll
            for (int k = 0; k < 4; k++)
                if (block * 4 + k < count) to[block * 4 + k] = numbers.lane[k];
    }
}
