// Uniform random numbers in [0, 1), four of each Philox block.
#include "common/philox.cuh"

KERNEL random_uniform(const uint32_t *rng, T *y, int64_t count, int64_t stream) {
    wait_for_inputs();
    for (int64_t block = grid_index(); block < (count + 3) / 4; block += grid_size()) {
        uint32_t words[4];
        philox(rng, (uint32_t)stream, (uint32_t)block, words);
        Vector<T, 4> numbers;
        #pragma unroll
        for (int k = 0; k < 4; k++) numbers.lane[k] = (T)(words[k] >> 8) * (T)(1.0 / (1 << 24));
        if (block * 4 + 4 <= count)
            store(y, block * 4, numbers);
        else
            #pragma unroll
            for (int k = 0; k < 3; k++)
                if (block * 4 + k < count) y[block * 4 + k] = numbers.lane[k];
    }
}
