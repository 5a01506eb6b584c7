// Reductions of any axes: sum, max, min. A shape is eight lengths in turns of kept and of reduced axes
//
//     k0 r0 k1 r1 k2 r2 k3 r3        (C-contiguous; many of them are 1)
//
// so that an output is a number o in k0 k1 k2 k3, and an element of it a number r in r0 r1 r2 r3. Where there are few
// outputs, r is divided into parts: the first kernel writes one value for each part to scratch[o * parts + part], and
// `combine` reduces those. The division follows from the shape alone, so every device computes the same bits.
#include "group.cuh"

#if OPERATION == 0
typedef Sum Op;
#elif OPERATION == 1
typedef Max Op;
#else
typedef Min Op;
#endif

#ifndef LANES
#define LANES 32
#endif

#define LENGTHS int64_t k0, int64_t r0, int64_t k1, int64_t r1, int64_t k2, int64_t r2, int64_t k3, int64_t r3
#define WALK Walk{k0, r0, k1, r1, k2, r2, k3, r3}

struct Walk {
    int64_t k0, r0, k1, r1, k2, r2, k3, r3;

    __device__ int64_t outputs() const { return k0 * k1 * k2 * k3; }
    __device__ int64_t count() const { return r0 * r1 * r2 * r3; }

    // The place of the first element of output o.
    __device__ int64_t start(int64_t o) const
    {
        if (k0 * k1 * k2 == 1)
            return o * r3;
        int64_t step = r3, place = o % k3 * step;
        o /= k3, step *= k3 * r2, place += o % k2 * step;
        o /= k2, step *= k2 * r1, place += o % k1 * step;
        o /= k1, step *= k1 * r0, place += o * step;
        return place;
    }

    // Whether the reduced elements of an output are equally far apart, and how far.
    __device__ bool even() const { return r0 * r1 * r2 == 1 || r0 * r1 * r3 == 1; }
    __device__ int64_t distance() const { return r0 * r1 * r2 == 1 ? 1 : k3; }

    // From there to element r.
    __device__ int64_t offset(int64_t r) const
    {
        if (even())
            return r * distance();
        return count() < (int64_t)1 << 31 ? taken_apart<uint32_t>((uint32_t)r) : taken_apart<int64_t>(r);
    }

    // 32 bits divide several times faster than 64.
    template <typename I> __device__ int64_t taken_apart(I r) const
    {
        int64_t step = k3 * r3, place = r % (I)r3;
        r /= (I)r3;
        place += r % (I)r2 * step, r /= (I)r2, step *= r2 * k2;
        place += r % (I)r1 * step, r /= (I)r1, step *= r1 * k1;
        return place + r * step;
    }
};

// Where a reduction of x[first], ... begins: the sum at 0, an extreme at one of the elements.
static __device__ __forceinline__ U initial(const T *x, int64_t first)
{
#if OPERATION == 0
    return (U)0;
#else
    return (U)x[first];
#endif
}

// Elements r = begin, begin + step, ... < end, where `place(r)` says. Four loads are under way at a time.
template <typename Place>
static __device__ __forceinline__ U every(const T *x, Place place, int64_t begin, int64_t end, int64_t step, U initial)
{
    U a = initial, b = initial, c = initial, d = initial;
    int64_t r = begin;
    for (; r + 3 * step < end; r += 4 * step) {
        const T e = x[place(r)], f = x[place(r + step)], g = x[place(r + 2 * step)], h = x[place(r + 3 * step)];
        a = Op::of(a, (U)e), b = Op::of(b, (U)f), c = Op::of(c, (U)g), d = Op::of(d, (U)h);
    }
    for (; r < end; r += step)
        a = Op::of(a, (U)x[place(r)]);
    return Op::of(Op::of(a, b), Op::of(c, d));
}

static __device__ __forceinline__ U strided(const T *x, const Walk &walk, int64_t begin, int64_t end, int64_t step,
                                            U initial)
{
    if (walk.even()) {
        const int64_t distance = walk.distance();
        return every(x, [=](int64_t r) { return r * distance; }, begin, end, step, initial);
    }
    return every(x, [&](int64_t r) { return walk.offset(r); }, begin, end, step, initial);
}

// Two sums of contiguous elements by `threads` threads of which we are number `first`, 16 bytes at a time.
static __device__ __forceinline__ void contiguous(const T *x, int64_t count, int first, int threads, U &a, U &b)
{
    constexpr int WIDTH = 16 / sizeof(T);
    const int64_t vectors = (uintptr_t)x % 16 == 0 ? count / WIDTH : 0;
    int64_t i = first;
    for (; i + threads < vectors; i += 2 * threads) {
        const Vector<T, WIDTH> u = load<T, WIDTH>(x + i * WIDTH), v = load<T, WIDTH>(x + (i + threads) * WIDTH);
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            a = Op::of(a, (U)u.lane[k]), b = Op::of(b, (U)v.lane[k]);
    }
    if (i < vectors) {
        const Vector<T, WIDTH> u = load<T, WIDTH>(x + i * WIDTH);
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            a = Op::of(a, (U)u.lane[k]);
    }
    for (int64_t r = vectors * WIDTH + first; r < count; r += threads)
        b = Op::of(b, (U)x[r]);
}

// The shortest run that a block reads from end to end before it goes on to the next one.
#define LONG_RUN 512

// A block for each part of each output, where reduced elements lie next to one another.
static __device__ __forceinline__ void by_block(const T *x, U *y, const Walk &walk, int64_t parts, int64_t chunk)
{
    const int64_t o = blockIdx.x / parts, begin = blockIdx.x % parts * chunk;
    const int64_t end = min(begin + chunk, walk.count()), run = walk.r3;
    const T *from = x + walk.start(o);
    U a = begin < end ? initial(from, walk.offset(begin)) : (U)0, b = a;
    if (run < LONG_RUN)
        a = strided(from, walk, begin + threadIdx.x, end, blockDim.x, a);
    else
        for (int64_t start = begin / run * run; start < end; start += run) {
            const int64_t first = max(begin, start), last = min(end, start + run);
            contiguous(from + walk.offset(first), last - first, threadIdx.x, blockDim.x, a, b);
        }
    const U value = over_block<Op>(Op::of(a, b));
    if (threadIdx.x == 0)
        y[blockIdx.x] = value;
}

KERNEL reduce_block(const T *x, U *y, LENGTHS) {
    wait_for_inputs(); by_block(x, y, WALK, 1, r0 * r1 * r2 * r3); }

KERNEL reduce_block_parts(const T *x, U *y, LENGTHS, int64_t parts, int64_t chunk, char *scratch)
{
    wait_for_inputs();
    by_block(x, (U *)scratch, WALK, parts, chunk);
}

// LANES lanes of a warp for each output: for few elements that lie next to one another.
KERNEL reduce_lanes(const T *x, U *y, LENGTHS)
{
    wait_for_inputs();
    const Walk walk = WALK;
    const int64_t outputs = walk.outputs(), count = walk.count(), stride = grid_size() / LANES;
    // All lanes of a warp go on until its first output is past the end; the last output is then computed twice.
    int64_t g = grid_index() / LANES;
    for (int64_t first = grid_index() / WARP * (WARP / LANES); first < outputs; first += stride, g += stride) {
        const T *from = x + walk.start(min(g, outputs - 1));
        U value = count ? initial(from, 0) : (U)0, other = value;
        if (walk.r0 * walk.r1 * walk.r2 == 1)
            contiguous(from, count, threadIdx.x % LANES, LANES, value, other);
        else
            value = strided(from, walk, threadIdx.x % LANES, count, LANES, value);
        value = Op::of(value, other);
        value = over_lanes<Op, LANES>(value);
        if (threadIdx.x % LANES == 0 && g < outputs)
            y[g] = value;
    }
}

// A thread for each output of few elements, where the outputs' elements lie next to one another.
KERNEL reduce_thread(const T *x, U *y, LENGTHS)
{
    wait_for_inputs();
    const Walk walk = WALK;
    const int64_t outputs = walk.outputs(), count = walk.count();
    for (int64_t o = grid_index(); o < outputs; o += grid_size()) {
        const T *from = x + walk.start(o);
        y[o] = strided(from, walk, 0, count, 1, count ? initial(from, 0) : (U)0);
    }
}

// A block of WARP x WARP threads for each part of WARP outputs, where the outputs' elements lie next to one another:
// a warp reads neighbouring outputs, and the warps take turns along the reduced axes. At the end each warp adds up what
// all of them have found for one output.
static __device__ __forceinline__ void by_columns(const T *x, U *y, const Walk &walk, int64_t parts, int64_t chunk)
{
    __shared__ U found[WARP][WARP + 1];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t first = blockIdx.x / parts * WARP, begin = blockIdx.x % parts * chunk;
    const int64_t end = min(begin + chunk, walk.count()), outputs = walk.outputs();
    if (first + lane < outputs) {
        const T *from = x + walk.start(first + lane);
        found[warp][lane] = strided(from, walk, begin + warp, end, WARP, initial(from, walk.offset(begin)));
    }
    __syncthreads();
    if (first + warp < outputs) { // the same for all lanes
        const U value = over_lanes<Op, WARP>(found[lane][warp]);
        if (lane == 0)
            y[(first + warp) * parts + blockIdx.x % parts] = value;
    }
}

KERNEL __launch_bounds__(WARP * WARP) reduce_columns(const T *x, U *y, LENGTHS)
{
    wait_for_inputs();
    by_columns(x, y, WALK, 1, r0 * r1 * r2 * r3);
}

KERNEL __launch_bounds__(WARP * WARP)
reduce_columns_parts(const T *x, U *y, LENGTHS, int64_t parts, int64_t chunk, char *scratch)
{
    wait_for_inputs();
    by_columns(x, (U *)scratch, WALK, parts, chunk);
}

// The second pass: a warp for each output adds up its parts.
KERNEL combine(const T *, U *y, int64_t outputs, int64_t parts, char *scratch)
{
    wait_for_inputs();
    const U *partial = (const U *)scratch;
    for (int64_t o = grid_index() / WARP; o < outputs; o += grid_size() / WARP) {
        const int lane = threadIdx.x % WARP;
        U value = lane < parts ? partial[o * parts + lane] : OPERATION == 0 ? (U)0 : partial[o * parts];
        for (int64_t p = lane + WARP; p < parts; p += WARP)
            value = Op::of(value, partial[o * parts + p]);
        value = over_lanes<Op, WARP>(value);
        if (lane == 0)
            y[o] = value;
    }
}
