// Weight gradient and, with BIAS, bias gradient of a direct convolution: images x (N, C, H, W) and gradients g (N, O,
// OH, OW) to (O, C / groups, KH, KW) and (O). Read conv/direct.cuh first.
//
// A warp sums FILTERS filters with one channel, for all taps, over one split of the outputs. A lane loads g of WIDE_C
// neighbouring outputs for each filter through slots in shared memory, STAGES steps ahead. It loads their windows once for
// all filters. Finally lanes are added in pairs, and then splits in order.
#include "common/common.cuh"
#include "conv/direct.cuh"
#include "common/collectives.cuh"

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
    IF(BIAS, T *bias,) int64_t batch, int64_t splits, char *scratch) {
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

    T *out = (T *)scratch + split;
    #pragma unroll
    for (int i = 0; i < SUMS; i += WARP) {
        const T total = total_of_lane(sums, i);
        const int filter = first + (i + lane) / (TAPS + BIAS), tap = (i + lane) % (TAPS + BIAS);
        if (i + lane >= SUMS || filter >= GROUP_FILTERS) continue;
        const int row = group * GROUP_FILTERS + filter, inner = channel % GROUP_CHANNELS;
        if (tap < TAPS)
            out[((row * GROUP_CHANNELS + inner) * TAPS + tap) * splits] = total;
        else if (inner == 0)
            out[(WEIGHTS + row) * splits] = total;
    }
}

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
