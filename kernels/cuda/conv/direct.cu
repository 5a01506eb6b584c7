// Direct convolution, for a small number of channels. It is bound by memory traffic, so it has no panels in shared memory;
// sums are in registers.
//
// The kernels: conv_direct; if WEIGHT_GRAD, weight_grad_direct and, SPLIT, then sum_weight_grad_direct. Other macros: CONV_GROUPS,
// kernel KH x KW, stride SH x SW, padding PH x PW (may be negative), dilation DH x DW, IN_* and OUT_* for the shapes of
// images and outputs. FILTERS: filters of a thread. WIDE_C: its neighbouring outputs. FLIPPED: of conv_direct. BIAS: of the
// others.
#include "common/collectives.cuh"
#include "common/epilogue.cuh"
#include "common/rounding.cuh"

constexpr int TAPS = KH * KW, AREA = OUT_ROWS * OUT_COLUMNS, IN_AREA = IN_ROWS * IN_COLUMNS;
constexpr int GROUP_CHANNELS = IN_CHANNELS / CONV_GROUPS, GROUP_FILTERS = OUT_CHANNELS / CONV_GROUPS;
constexpr int FILTER_BLOCKS = (GROUP_FILTERS + FILTERS - 1) / FILTERS; // threads that share a group's filters

// Whether windows reach into the padding.
constexpr bool PADDED_Y = PH > 0 || (OUT_ROWS - 1) * SH - PH + (KH - 1) * DH >= IN_ROWS;
constexpr bool PADDED_X = PW > 0 || (OUT_COLUMNS - 1) * SW - PW + (KW - 1) * DW >= IN_COLUMNS;
constexpr int SPAN = (WIDE_C - 1) * SW + (KW - 1) * DW + 1; // columns of the windows of WIDE_C neighbouring outputs

// The corner of an output's window.
struct Corner {
    int y, x;
    __device__ __forceinline__ explicit Corner(int pixel)
        : y(pixel / OUT_COLUMNS * SH - PH), x(pixel % OUT_COLUMNS * SW - PW) {}
    __device__ __forceinline__ int at() const { return y * IN_COLUMNS + x; }

    // One row of the windows of WIDE_C neighbouring outputs, rounded (MANTISSA); 0 in the padding and where not `real`.
    __device__ __forceinline__ void row(int tap_y, const T *window, bool real, T (&values)[SPAN]) const {
        const bool inside = real && (!PADDED_Y || (unsigned)(y + tap_y * DH) < IN_ROWS);
        const T *from = window + tap_y * DH * IN_COLUMNS;
        #pragma unroll
        for (int i = 0; i < SPAN; i++)
            values[i] = inside && (!PADDED_X || (unsigned)(x + i) < IN_COLUMNS) ? rounded(from[i]) : (T)0;
    }
};

#if !WEIGHT_GRAD
// y = x * w by direct convolution: images (N, C, H, W), weights (O, C / groups, KH, KW), output (N, O, OH, OW). FLIPPED:
// the weights are (C, O / groups, KH, KW), with their taps in reverse order. The input gradient of a stride-1 convolution
// is such a convolution of the output gradient.
//
// A thread sums FILTERS filters for WIDE_C neighbouring outputs; shared memory holds the block's weights.

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
#else // WEIGHT_GRAD
// Weight gradient and, with BIAS, bias gradient of a direct convolution: images x (N, C, H, W) and gradients g (N, O,
// OH, OW) to (O, C / groups, KH, KW) and (O).
//
// A warp sums FILTERS filters with one channel, for all taps, over one split of the outputs. A lane loads g of WIDE_C
// neighbouring outputs for each filter through slots in shared memory, STAGES steps ahead. It loads their windows once for
// all filters. Finally lanes are added in pairs, and then, SPLIT, the splits in order.

constexpr int THREADS = 256, STAGES = 3, STEP = WARP * WIDE_C; // outputs of a warp at a time
constexpr int WARPS_PER_STEP = IN_CHANNELS * FILTER_BLOCKS; // warps that load the same outputs
constexpr int SUMS = FILTERS * (TAPS + BIAS), WEIGHTS = OUT_CHANNELS * GROUP_CHANNELS * TAPS;

// Sums 32 numbers over the lanes of a warp, by pairs of lanes 16, 8, 4, 2, 1 apart. Lane i gets the sum of number first + i.
__device__ __forceinline__ T total_of_lane(const T (&sums)[SUMS], int first) {
    T held[WARP];
    #pragma unroll
    for (int i = 0; i < WARP; i++) held[i] = first + i < SUMS ? sums[first + i] : (T)0;
    #pragma unroll
    for (int half = WARP / 2; half > 0; half /= 2) {
        const bool upper = threadIdx.x & half;
        #pragma unroll
        for (int i = 0; i < WARP / 2; i++) {
            if (i >= half) continue;
            const T low = held[i], high = held[i + half]; // a computed index would move them to local memory
            held[i] = (upper ? high : low) + shuffle_xor(upper ? low : high, half);
        }
    }
    return held[0];
}

KERNEL __launch_bounds__(THREADS, 2) weight_grad_direct(const T *__restrict__ x, const T *__restrict__ g, T *w,
    IF(BIAS, T *bias,) int64_t batch, int64_t splits IF(SPLIT, , char *scratch)) {
    wait_for_inputs();
    typedef Vector<T, WIDE_C> Neighbours;
    __shared__ Neighbours slots[STAGES][FILTERS][THREADS];
    const int warp = (blockIdx.x * THREADS + threadIdx.x) / WARP, lane = threadIdx.x % WARP;
    const int unit = warp % WARPS_PER_STEP, split = warp / WARPS_PER_STEP;
    if (split >= splits) return;
    const int share = unit / IN_CHANNELS, channel = unit % IN_CHANNELS, group = channel / GROUP_CHANNELS;
    const int first = share * FILTERS, count = batch * AREA; // first: filter in the group
    const int64_t steps = (count + STEP - 1) / STEP;
    const int begin = steps * split / splits, end = steps * (split + 1) / splits;
    const T *gradients = g + (group * GROUP_FILTERS + first) * AREA, *images = x + channel * IN_AREA;

    const auto prefetch = [&](int step) {
        const int output = step * STEP + lane * WIDE_C, image = output / AREA;
        const T *from = gradients + image * (OUT_CHANNELS * AREA) + output % AREA;
        #pragma unroll
        for (int f = 0; f < FILTERS; f++) {
            const bool ours = GROUP_FILTERS % FILTERS == 0 || first + f < GROUP_FILTERS;
            const bool real = step < end && output < count && ours;
            cp_async<sizeof(Neighbours)>(slots[step % STAGES][f][threadIdx.x].lane, from + f * AREA, real);
        }
        cp_async_commit_group();
    };
    #pragma unroll
    for (int i = 0; i < STAGES - 1; i++) prefetch(begin + i);

    T sums[SUMS] = {}; // of each filter: its taps, then the bias
    for (int step = begin; step < end; step++) {
        cp_async_wait_group<STAGES - 2>();
        prefetch(step + STAGES - 1); // into the slots of the previous step
        const int output = step * STEP + lane * WIDE_C, image = output / AREA;
        const Corner corner(output % AREA);
        const T *window = images + image * (IN_CHANNELS * IN_AREA) + corner.at();
        Neighbours gradient[FILTERS];
        #pragma unroll
        for (int f = 0; f < FILTERS; f++) gradient[f] = slots[step % STAGES][f][threadIdx.x];
        #pragma unroll
        for (int tap_y = 0; tap_y < KH; tap_y++) {
            T values[SPAN];
            corner.row(tap_y, window, output < count, values);
            #pragma unroll
            for (int f = 0; f < FILTERS; f++)
                #pragma unroll
                for (int tap_x = 0; tap_x < KW; tap_x++)
                    #pragma unroll
                    for (int k = 0; k < WIDE_C; k++) {
                        T &sum = sums[f * (TAPS + BIAS) + tap_y * KW + tap_x];
                        sum += values[k * SW + tap_x * DW] * rounded(gradient[f].lane[k]);
                    }
        }
        if (BIAS)
            #pragma unroll
            for (int f = 0; f < FILTERS; f++)
                #pragma unroll
                for (int k = 0; k < WIDE_C; k++) sums[f * (TAPS + BIAS) + TAPS] += gradient[f].lane[k];
    }
    cp_async_wait_group<0>();

#if SPLIT // the sums of an element are neighbours
    w = (T *)scratch + split;
    IF(BIAS, bias = w + WEIGHTS * splits;)
#endif
    #pragma unroll
    for (int i = 0; i < SUMS; i += WARP) {
        const T total = total_of_lane(sums, i);
        const int filter = first + (i + lane) / (TAPS + BIAS), tap = (i + lane) % (TAPS + BIAS);
        if (i + lane >= SUMS || filter >= GROUP_FILTERS) continue;
        const int row = group * GROUP_FILTERS + filter, inner = channel % GROUP_CHANNELS;
        if (tap < TAPS)
            w[((row * GROUP_CHANNELS + inner) * TAPS + tap) * splits] = total;
        IF(BIAS, else if (inner == 0) bias[row * splits] = total;)
    }
}

#if SPLIT
// The sums over splits: a warp for each result.
KERNEL sum_weight_grad_direct(const T *, const T *, T *w,
    IF(BIAS, T *bias,) int64_t splits, char *scratch) {
    wait_for_inputs();
    for (int i = grid_index() / WARP; i < WEIGHTS + BIAS * OUT_CHANNELS; i += grid_size() / WARP) {
        T sum = 0;
        #pragma unroll 8 // loads in flight
        for (int split = threadIdx.x % WARP; split < splits; split += WARP)
            sum += ((const T *)scratch)[i * splits + split];
        sum = over_lanes<Sum, WARP>(sum);
        if (threadIdx.x % WARP > 0) continue;
        if (i < WEIGHTS) w[i] = sum;
#if BIAS
        else bias[i - WEIGHTS] = sum;
#endif
    }
}
#endif
#endif
