// The position of the first largest element along an axis; NaN counts as larger than everything, as NumPy has it.
#include "group.cuh"

struct Best {
    T value;
    int64_t at;

    __device__ void take(T other, int64_t place)
    {
        const bool larger = other > value || (other != other && value == value);
        const bool equal = other == value || (other != other && value != value);
        if (larger || (equal && place < at))
            value = other, at = place;
    }
};

// Neighbouring threads take neighbouring lines.
KERNEL argmax_thread(const T *x, int64_t *y, int64_t outer, int64_t length, int64_t inner)
{
    wait_for_inputs();
    for (int64_t i = grid_index(); i < outer * inner; i += grid_size()) {
        const T *from = x + i / inner * length * inner + i % inner;
        Best best = {from[0], 0};
        for (int64_t j = 1; j < length; j++)
            best.take(from[j * inner], j);
        y[i] = best.at;
    }
}

// A warp for each line of neighbouring elements.
KERNEL argmax_warp(const T *x, int64_t *y, int64_t outer, int64_t length, int64_t)
{
    wait_for_inputs();
    for (int64_t i = grid_index() / WARP; i < outer; i += grid_size() / WARP) {
        const T *from = x + i * length;
        Best best = {from[0], 0};
        for (int64_t j = threadIdx.x % WARP; j < length; j += WARP)
            best.take(from[j], j);
#pragma unroll
        for (int mask = WARP / 2; mask > 0; mask /= 2) {
            const T value = exchanged(best.value, mask);
            best.take(value, exchanged(best.at, mask));
        }
        if (threadIdx.x % WARP == 0)
            y[i] = best.at;
    }
}
