// standardize: mean 0 and variance 1 over r0 and r1 of an array of shape (k0, r0, k1, r1).
//
// The first element is subtracted from the others before they are added, so that numbers that are all alike become 0.
// A row that fits into the registers of its threads is read once (standardize_team). Otherwise there are three launches: the
// moments of parts, the moments of each output, and the result.
#include "common/divisor.cuh"
#include "common/collectives.cuh"

#ifndef TEAM
#define TEAM 32
#endif
#ifndef ITEMS
#define ITEMS 1
#endif
#ifndef WIDTH
#define WIDTH 1
#endif
#define THREADS 256

// Count, mean, and sum of squared deviations of a set of numbers.
struct Moments {
    T count, mean, squares;
};

static __device__ __forceinline__ Moments shuffle_xor(const Moments &m, int mask) {
    return {shuffle_xor(m.count, mask), shuffle_xor(m.mean, mask), shuffle_xor(m.squares, mask)};
}

// The moments of the union of two sets (T. Chan, G. Golub, R. LeVeque, 1983).
struct MergeMoments {
    static __device__ __forceinline__ Moments of(const Moments &a, const Moments &b) {
        const T count = a.count + b.count, share = count > 0 ? b.count / count : (T)0, apart = b.mean - a.mean;
        return {count, a.mean + apart * share, a.squares + b.squares + apart * apart * a.count * share};
    }
};

// Rows of up to TEAM * ITEMS * WIDTH elements, a multiple of WIDTH: each of TEAM threads holds ITEMS vectors.
constexpr int UNIT = TEAM > WARP ? TEAM : WARP;

KERNEL __launch_bounds__(TEAM > WARP ? TEAM : 512)
standardize_team(const T *x, T *y, T *means, T *variances, int64_t rows, int64_t length, double eps) {
    wait_for_inputs();
    const int64_t stride = grid_size() / TEAM;
    const int me = threadIdx.x % TEAM * WIDTH;
    int64_t row = grid_index() / TEAM;
    for (int64_t first = grid_index() / UNIT * (UNIT / TEAM); first < rows; first += stride, row += stride) {
        const int64_t start = row * length;
        const T origin = row < rows ? x[start] : (T)0;
        Vector<T, WIDTH> mine[ITEMS];
        T sum = 0, squares = 0;
        #pragma unroll
        for (int k = 0; k < ITEMS; k++)
            if (me + k * TEAM * WIDTH < length && row < rows)
                mine[k] = load<T, WIDTH>(x + start + me + k * TEAM * WIDTH);
            else
                mine[k] = {};
        #pragma unroll
        for (int k = 0; k < ITEMS; k++)
            #pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                mine[k].lane[i] -= origin;
                sum += me + k * TEAM * WIDTH < length ? mine[k].lane[i] : (T)0;
            }
        const T mean = over_team<Sum, TEAM>(sum) / (T)length;
        #pragma unroll
        for (int k = 0; k < ITEMS; k++)
            #pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                mine[k].lane[i] -= mean;
                squares += me + k * TEAM * WIDTH < length ? mine[k].lane[i] * mine[k].lane[i] : (T)0;
            }
        const T variance = over_team<Sum, TEAM>(squares) / (T)length;
        const T inverse = 1 / sqrt(variance + (T)eps);
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            #pragma unroll
            for (int i = 0; i < WIDTH; i++) mine[k].lane[i] *= inverse;
            if (me + k * TEAM * WIDTH < length && row < rows) store(y, start + me + k * TEAM * WIDTH, mine[k]);
        }
        if (me == 0 && row < rows) {
            means[row] = origin + mean;
            variances[row] = variance;
        }
    }
}

// The moments of vectors first, first + step, ... < count. A vector has W elements; vector i is at x + i * distance. LOADS
// vectors are processed at a time: their mean, then the deviations from it, so that no digits cancel.
template <int W>
static __device__ __forceinline__ Moments of_run(const T *x, int64_t first, int64_t count, int64_t step, int64_t distance,
                                                 Moments found) {
    constexpr int LOADS = 64 / sizeof(T) / W > 8 ? 8 : 64 / sizeof(T) / W;
    for (int64_t r = first; r < count; r += LOADS * step) {
        Vector<T, W> v[LOADS];
        T sum = 0, squares = 0;
        int real = 0;
        #pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (r + k * step < count) v[k] = load<T, W>(x + (r + k * step) * distance), real = k + 1;
        #pragma unroll
        for (int k = 0; k < LOADS; k++)
            #pragma unroll
            for (int i = 0; i < W; i++) sum += k < real ? v[k].lane[i] - v[0].lane[0] : (T)0;
        const T mean = v[0].lane[0] + sum / (T)(real * W);
        #pragma unroll
        for (int k = 0; k < LOADS; k++)
            #pragma unroll
            for (int i = 0; i < W; i++) squares += k < real ? (v[k].lane[i] - mean) * (v[k].lane[i] - mean) : (T)0;
        found = MergeMoments::of(found, {(T)(real * W), mean, squares});
    }
    return found;
}

// The moments of parts, to scratch[o * parts + part]. A block has `across` neighbouring outputs of one index of k0. With one
// output each warp reads runs of r1 elements by vectors, or the block reads them where there are fewer runs than warps. With
// WARP outputs a thread reads elements of stride k1.
KERNEL __launch_bounds__(THREADS, 2)
standardize_parts(const T *x, T *, T *, T *, int64_t k0, int64_t r0, int64_t k1, int64_t r1, int64_t across, int64_t parts,
                  int64_t chunk, char *scratch) {
    wait_for_inputs();
    __shared__ Moments of_warp[THREADS / WARP][WARP];
    const int64_t tiles = (k1 + across - 1) / across, tile = blockIdx.x / parts, part = blockIdx.x % parts;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t outer = tile / tiles, begin = part * chunk, end = min(begin + chunk, r0);
    Moments found = {0, 0, 0};
    if (across == 1) {
        const int64_t column = tile % tiles;
        const int team = chunk < THREADS / WARP ? THREADS : WARP; // of a run
        for (int64_t i = begin + threadIdx.x / team; i < end; i += THREADS / team)
            found = of_run<WIDTH>(x + ((outer * r0 + i) * k1 + column) * r1, threadIdx.x % team, r1 / WIDTH, team, WIDTH,
                                  found);
        found = over_block<MergeMoments>(found);
        if (threadIdx.x == 0) ((Moments *)scratch)[blockIdx.x] = found;
        return;
    }
    const int64_t column = tile % tiles * WARP + lane;
    if (column < k1 && begin < end)
        found = of_run<1>(x + (outer * r0 + begin) * k1 + column, warp, end - begin, THREADS / WARP, k1, found);
    of_warp[warp][lane] = found;
    __syncthreads();
    if (warp == 0 && column < k1) {
        for (int w = 1; w < THREADS / WARP; w++) found = MergeMoments::of(found, of_warp[w][lane]);
        ((Moments *)scratch)[(outer * k1 + column) * parts + part] = found;
    }
}

// A warp per output combines the moments of its parts.
KERNEL standardize_combine(const T *, T *, T *means, T *variances, int64_t outputs, int64_t parts, char *scratch) {
    wait_for_inputs();
    for (int64_t o = grid_index() / WARP; o < outputs; o += grid_size() / WARP) {
        Moments found = {0, 0, 0};
        for (int64_t p = threadIdx.x % WARP; p < parts; p += WARP)
            found = MergeMoments::of(found, ((const Moments *)scratch)[o * parts + p]);
        found = over_lanes<MergeMoments, WARP>(found);
        if (threadIdx.x % WARP == 0) {
            means[o] = found.mean;
            variances[o] = found.squares / found.count;
        }
    }
}

// The result, WIDTH neighbouring elements at a time: of one output where r1 > 1, otherwise of WIDTH outputs.
template <typename I>
static __device__ __forceinline__ void standardize_elements(const T *x, T *y, const T *means, const T *variances, int64_t count,
                                               int64_t r0, int64_t k1, int64_t r1, T eps) {
    const Divisor<I> by_r1(r1 > 1 ? r1 / WIDTH : 1), by_k1(r1 > 1 ? k1 : k1 / WIDTH), by_r0(r0);
    for (int64_t g = grid_index(); g < count / WIDTH; g += grid_size()) {
        I rest = (I)g, column = by_r1(rest);
        rest = column;
        I row = by_k1(rest); // rest: the column
        column = rest;
        rest = row;
        const int64_t output = by_r0(rest) * k1 + (int64_t)column * (r1 > 1 ? 1 : WIDTH);
        Vector<T, WIDTH> v = load<T, WIDTH>(x + g * WIDTH);
        #pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            const int64_t o = output + (r1 > 1 ? 0 : k);
            v.lane[k] = (v.lane[k] - means[o]) * (1 / sqrt(variances[o] + eps));
        }
        store(y, g * WIDTH, v);
    }
}

KERNEL standardize_apply(const T *x, T *y, T *means, T *variances, int64_t k0, int64_t r0, int64_t k1, int64_t r1,
                         double eps, char *) {
    wait_for_inputs();
    const int64_t count = k0 * r0 * k1 * r1;
    if (count < (int64_t)1 << 31)
        standardize_elements<uint32_t>(x, y, means, variances, count, r0, k1, r1, (T)eps);
    else
        standardize_elements<int64_t>(x, y, means, variances, count, r0, k1, r1, (T)eps);
}
