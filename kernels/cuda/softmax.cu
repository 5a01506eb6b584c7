// softmax and log_softmax along one axis, and logsumexp over any. The largest element is subtracted before exp, so
// nothing overflows.
//
// A row is read once where it fits in registers (softmax_lanes) or in shared memory (softmax_block); columns, whose
// elements are `inner` apart, go to a thread each, so that neighbouring threads read neighbouring elements.
#include "group.cuh"

#ifndef LANES
#define LANES 32
#endif
#ifndef ITEMS
#define ITEMS 1
#endif
#ifndef WIDTH
#define WIDTH 1
#endif
#ifndef LOGARITHM
#define LOGARITHM 0
#endif

// What is kept of an element until the sum is known, and the result that it then gives.
static __device__ __forceinline__ T kept(T x, T top) { return LOGARITHM ? x - top : exp(x - top); }

static __device__ __forceinline__ T result(T kept, T inverse, T log_total)
{
    return LOGARITHM ? kept - log_total : kept * inverse;
}

static __device__ __forceinline__ T term(T kept) { return LOGARITHM ? exp(kept) : kept; }

// Rows of up to LANES * ITEMS * WIDTH elements: each lane keeps ITEMS vectors of WIDTH, a divisor of the length.
KERNEL softmax_lanes(const T *x, T *y, int64_t rows, int64_t length)
{
    wait_for_inputs();
    const int64_t stride = grid_size() / LANES;
    const int lane = threadIdx.x % LANES * WIDTH;
    int64_t row = grid_index() / LANES;
    for (int64_t first = grid_index() / WARP * (WARP / LANES); first < rows; first += stride, row += stride) {
        const int64_t start = min(row, rows - 1) * length;
        Vector<T, WIDTH> mine[ITEMS];
        T top = -INFINITY, total = 0;
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            const int j = lane + k * LANES * WIDTH;
            if (j < length)
                mine[k] = load<T, WIDTH>(x + start + j);
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                mine[k].lane[i] = j < length ? mine[k].lane[i] : (T)-INFINITY;
                top = Max::of(top, mine[k].lane[i]);
            }
        }
        top = over_lanes<Max, LANES>(top);
#pragma unroll
        for (int k = 0; k < ITEMS; k++)
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                mine[k].lane[i] = kept(mine[k].lane[i], top);
                if (lane + k * LANES * WIDTH < length)
                    total += term(mine[k].lane[i]);
            }
        total = over_lanes<Sum, LANES>(total);
        const T log_total = LOGARITHM ? log(total) : (T)0, inverse = 1 / total;
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            const int j = lane + k * LANES * WIDTH;
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                mine[k].lane[i] = result(mine[k].lane[i], inverse, log_total);
            if (j < length && row < rows)
                store(y, start + j, mine[k]);
        }
    }
}

// A block for each row; `cached` says whether the row fits in shared memory, else it is read three times.
KERNEL softmax_block(const T *x, T *y, int64_t, int64_t length, int64_t cached)
{
    wait_for_inputs();
    extern __shared__ __align__(16) char memory[];
    T *row = (T *)memory;
    const T *from = x + blockIdx.x * length;
    T *to = y + blockIdx.x * length;
    T top = -INFINITY, total = 0;
    for (int64_t j = threadIdx.x; j < length; j += blockDim.x) {
        const T value = from[j];
        if (cached)
            row[j] = value;
        top = Max::of(top, value);
    }
    top = over_block<Max>(top);
    // Each thread reads back what it has written itself.
    for (int64_t j = threadIdx.x; j < length; j += blockDim.x) {
        const T value = kept(cached ? row[j] : from[j], top);
        if (cached)
            row[j] = value;
        total += term(value);
    }
    total = over_block<Sum>(total);
    const T log_total = LOGARITHM ? log(total) : (T)0, inverse = 1 / total;
    for (int64_t j = threadIdx.x; j < length; j += blockDim.x)
        to[j] = result(cached ? row[j] : kept(from[j], top), inverse, log_total);
}

KERNEL softmax_columns(const T *x, T *y, int64_t outer, int64_t length, int64_t inner)
{
    wait_for_inputs();
    for (int64_t i = grid_index(); i < outer * inner; i += grid_size()) {
        const int64_t start = i / inner * length * inner + i % inner;
        T top = x[start], total = 0;
        for (int64_t j = 1; j < length; j++)
            top = Max::of(top, x[start + j * inner]);
        for (int64_t j = 0; j < length; j++)
            total += exp(x[start + j * inner] - top);
        const T log_total = LOGARITHM ? log(total) : (T)0, inverse = 1 / total;
        for (int64_t j = 0; j < length; j++)
            y[start + j * inner] = result(kept(x[start + j * inner], top), inverse, log_total);
    }
}

// log(sum(exp(x))) over the reduced ones of four lengths in turns: k0 r0 k1 r1; a block for each output.
KERNEL logsumexp(const T *x, T *y, int64_t k0, int64_t r0, int64_t k1, int64_t r1)
{
    wait_for_inputs();
    const T *from = x + (blockIdx.x / k1 * r0 * k1 + blockIdx.x % k1) * r1;
    const Runs runs = {r0, r1, k1 * r1};
    T top = -INFINITY, total = 0;
    for (int64_t r = threadIdx.x; r < r0 * r1; r += blockDim.x)
        top = Max::of(top, from[runs.place(r)]);
    top = over_block<Max>(top);
    if (!isfinite(top)) // all -inf gives log 0 and not inf - inf
        top = 0;
    for (int64_t r = threadIdx.x; r < r0 * r1; r += blockDim.x)
        total += exp(from[runs.place(r)] - top);
    total = over_block<Sum>(total);
    if (threadIdx.x == 0)
        y[blockIdx.x] = log(total) + top;
}
