// softmax and log_softmax of columns: along an axis of stride `inner`. Neighbouring threads have neighbouring columns.
#include "reduce/softmax.cuh"

#ifndef WIDTH
#define WIDTH 1
#endif

// A thread per column of LENGTH elements.
KERNEL softmax_columns(const T *x, T *y, int64_t outer, int64_t inner) {
    wait_for_inputs();
    const bool fits_32_bits = outer * inner < (int64_t)1 << 31; // division is several times faster in 32 bits
    for (int64_t i = grid_index(); i < outer * inner; i += grid_size()) {
        const int64_t o = fits_32_bits ? (uint32_t)i / (uint32_t)inner : i / inner, start = o * LENGTH * inner + i - o * inner;
        by_thread(x + start, y + start, inner);
    }
}

#define COLUMN_THREADS 512
// A block per WARP columns, WIDTH of them per thread. Rows of threads take the elements round robin, once for the sum
// and once for the results.
KERNEL __launch_bounds__(COLUMN_THREADS, 1)
softmax_long_columns(const T *x, T *y, int64_t outer, int64_t length, int64_t inner) {
    wait_for_inputs();
    constexpr int ACROSS = WARP / WIDTH, THREAD_ROWS = COLUMN_THREADS / ACROSS, LOADS = 4;
    __shared__ State found[THREAD_ROWS][WARP];
    const int lane = threadIdx.x % ACROSS * WIDTH, thread_row = threadIdx.x / ACROSS;
    const int64_t column = (int64_t)blockIdx.x * WARP + lane, start = column / inner * length * inner + column % inner;
    const bool in_range = column < outer * inner;
    State state[WIDTH];
    #pragma unroll
    for (int i = 0; i < WIDTH; i++) state[i] = State::empty();
    if (in_range)
        for (int64_t j = thread_row; j < length; j += LOADS * THREAD_ROWS) {
            Vector<T, WIDTH> v[LOADS];
            #pragma unroll
            for (int k = 0; k < LOADS; k++)
                if (j + k * THREAD_ROWS < length)
                    v[k] = load<T, WIDTH>(x + start + (j + k * THREAD_ROWS) * inner);
                else
                    #pragma unroll
                    for (int i = 0; i < WIDTH; i++) v[k].lane[i] = -(T)INFINITY;
            #pragma unroll
            for (int i = 0; i < WIDTH; i++) state[i].take({v[0].lane[i], v[1].lane[i], v[2].lane[i], v[3].lane[i]}, 0);
        }
    #pragma unroll
    for (int i = 0; i < WIDTH; i++) found[thread_row][lane + i] = state[i];
    // A tree: the first half of the rows of threads merges the second. States of neighbouring rows are WARP apart.
    State *states = found[0];
    for (int half = THREAD_ROWS / 2; half > 0; half /= 2) {
        __syncthreads();
        for (int at = threadIdx.x; at < half * WARP; at += COLUMN_THREADS)
            states[at] = Merge::of(states[at], states[half * WARP + at]);
    }
    __syncthreads();
    if (!in_range) return;
    T top[WIDTH];
    Total total[WIDTH];
    #pragma unroll
    for (int i = 0; i < WIDTH; i++) top[i] = found[0][lane + i].top, total[i] = Total(found[0][lane + i].total);
    for (int64_t j = thread_row; j < length; j += LOADS * THREAD_ROWS) {
        Vector<T, WIDTH> v[LOADS];
        #pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (j + k * THREAD_ROWS < length) v[k] = load<T, WIDTH>(x + start + (j + k * THREAD_ROWS) * inner);
        #pragma unroll
        for (int k = 0; k < LOADS; k++) {
            #pragma unroll
            for (int i = 0; i < WIDTH; i++) v[k].lane[i] = total[i].result(unnormalized(v[k].lane[i], top[i]));
            if (j + k * THREAD_ROWS < length) store(y, start + (j + k * THREAD_ROWS) * inner, v[k]);
        }
    }
}
