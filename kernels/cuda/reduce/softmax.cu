// softmax and log_softmax along an axis of stride `inner`, for lines that generated kernels do not take. A line is the
// elements that one sum normalises. A block has ACROSS lines. The THREADS / ACROSS threads of a line take its elements in
// turn, once for the sum and once for the results.
//
// The maximum is subtracted before exp, so that nothing overflows. x has elements of type S, which may be bfloat16.
//
// Macros: THREADS, ACROSS, IN_FLIGHT (loads of a thread in flight). LOGARITHM: log_softmax.
#define OPERATION 4
#include "reduce/accumulators.cuh"

typedef StoredAs<U>::type S;

constexpr int DOWN = THREADS / ACROSS; // threads of a line

KERNEL __launch_bounds__(THREADS) softmax(const S *x, T *y, int64_t lines, int64_t length, int64_t inner) {
    wait_for_inputs();
    __shared__ State found[DOWN][ACROSS];
    // Neighbouring threads have neighbouring elements in memory.
    const int own = inner == 1 ? threadIdx.x / DOWN : threadIdx.x % ACROSS;
    const int first = inner == 1 ? threadIdx.x % DOWN : threadIdx.x / ACROSS;
    const int64_t line = (int64_t)blockIdx.x * ACROSS + own, start = line / inner * length * inner + line % inner;
    const int64_t end = line < lines ? length : 0;
    State state = State::empty();
    for (int64_t i = first; i < end; i += IN_FLIGHT * DOWN) {
        T v[IN_FLIGHT];
        #pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            v[k] = i + k * DOWN < end ? (T)x[start + (i + k * DOWN) * inner] : -(T)INFINITY;
        state.take(v, 0);
    }
    found[first][own] = state;
    for (int half = DOWN / 2; half > 0; half /= 2) {
        __syncthreads();
        if (first < half) found[first][own] = Merge::of(found[first][own], found[first + half][own]);
    }
    __syncthreads();
    state = found[0][own];
    // Infinite or NaN: no result is a number.
    const T total = isfinite(state.top) ? state.total : (T)NAN, factor = LOGARITHM ? log(total) : 1 / total;
    for (int64_t i = first; i < end; i += IN_FLIGHT * DOWN) {
        T v[IN_FLIGHT];
        #pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (i + k * DOWN < end) v[k] = (T)x[start + (i + k * DOWN) * inner] - state.top;
        #pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (i + k * DOWN < end) y[start + (i + k * DOWN) * inner] = LOGARITHM ? v[k] - factor : exp(v[k]) * factor;
    }
}
