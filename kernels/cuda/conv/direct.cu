// y = x * w by direct convolution: images (N, C, H, W), weights (O, C / groups, KH, KW), output (N, O, OH, OW). Read
// conv/direct.cuh first. FLIPPED: the weights are (C, O / groups, KH, KW), with their taps in reverse order. The input
// gradient of a stride-1 convolution is such a convolution of the output gradient.
//
// A thread sums FILTERS filters for WIDE_C neighbouring outputs; shared memory holds the block's weights.
#include "conv/direct.cuh"

constexpr int THREADS = 128, ELEMENTS = GROUP_CHANNELS * TAPS;
// Weights that a thread loads at once; weights of an element, padded to a multiple of that.
constexpr int WEIGHT_VECTOR = FILTERS == 1 ? 1 : FILTERS % 4 == 1 || FILTERS % 4 == 2 ? 2 : 4;
constexpr int WEIGHT_ROW = (FILTERS + WEIGHT_VECTOR - 1) / WEIGHT_VECTOR * WEIGHT_VECTOR;

// Loads the weights of FILTERS filters from `first` on, rounded: [channel][tap][filter].
__device__ __forceinline__ void load_weights(T (&to)[ELEMENTS][WEIGHT_ROW], const T *w, int group, int first) {
    #pragma unroll 4 // loads in flight
    for (int i = threadIdx.x; i < ELEMENTS * FILTERS; i += THREADS) {
        const int filter = i / ELEMENTS, element = i % ELEMENTS, channel = element / TAPS, tap = element % TAPS;
        const int row = first + filter;
        const int from = FLIPPED ? ((group * GROUP_CHANNELS + channel) * GROUP_FILTERS + row) * TAPS + TAPS - 1 - tap
                                : (group * GROUP_FILTERS + row) * ELEMENTS + element;
        to[element][filter] = row < GROUP_FILTERS ? rounded(w[from]) : (T)0;
    }
    __syncthreads();
}

// Adds the products of one row of the windows.
__device__ __forceinline__ void multiply(
    T (&sums)[FILTERS][WIDE_C], const T (&values)[SPAN], const T (*weights)[WEIGHT_ROW]) {
    #pragma unroll
    for (int tap = 0; tap < KW; tap++) {
        #pragma unroll
        for (int f = 0; f < WEIGHT_ROW; f += WEIGHT_VECTOR) {
            const Vector<T, WEIGHT_VECTOR> weight = load<T, WEIGHT_VECTOR>(weights[tap] + f);
            #pragma unroll
            for (int i = 0; i < WEIGHT_VECTOR && f + i < FILTERS; i++)
                #pragma unroll
                for (int k = 0; k < WIDE_C; k++) sums[f + i][k] += weight.lane[i] * values[k * SW + tap * DW];
        }
    }
}

KERNEL __launch_bounds__(THREADS, 4) conv_direct(const T *__restrict__ x, const T *__restrict__ w,
    const Epilogue epilogue, int64_t batch) {
    wait_for_inputs();
    __align__(16) __shared__ T weights[ELEMENTS][WEIGHT_ROW];
    const int group = blockIdx.y / FILTER_BLOCKS, first = blockIdx.y % FILTER_BLOCKS * FILTERS;
    load_weights(weights, w, group, first);
    const int count = batch * AREA;
    for (int output = (blockIdx.x * THREADS + threadIdx.x) * WIDE_C; output < count;
         output += gridDim.x * THREADS * WIDE_C) {
        const int image = output / AREA, pixel = output % AREA;
        const Corner corner(pixel);
        const T *window = x + (image * IN_CHANNELS + group * GROUP_CHANNELS) * IN_AREA + corner.at();
        T sums[FILTERS][WIDE_C] = {};
        asm volatile("" ::: "memory"); // keeps the compiler from holding all weights in registers between outputs
        #pragma unroll 1
        for (int channel = 0; channel < GROUP_CHANNELS; channel++, window += IN_AREA) {
            #pragma unroll
            for (int tap_y = 0; tap_y < KH; tap_y++) {
                T values[SPAN];
                corner.row(tap_y, window, true, values);
                multiply(sums, values, weights + channel * TAPS + tap_y * KW);
            }
        }
        const auto row = [&](int f) { return group * GROUP_FILTERS + first + f; };
        const auto real = [&](int f) { return GROUP_FILTERS % FILTERS == 0 || first + f < GROUP_FILTERS; };
        const auto index = [&](int f) { return (int64_t)(image * OUT_CHANNELS + row(f)) * AREA + pixel; };
        Epilogue::Aux<WIDE_C> aux[FILTERS];
        #pragma unroll
        for (int f = 0; f < FILTERS; f++)
            if (real(f)) aux[f] = epilogue.load_aux<WIDE_C>(image, row(f), pixel, index(f));
        #pragma unroll
        for (int f = 0; f < FILTERS; f++)
            if (real(f)) epilogue.write(aux[f], index(f), sums[f]);
    }
}
