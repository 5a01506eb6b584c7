// Copies between layouts: transpose, flip, slice, concatenate, pad. AXES axes, outermost first, each with a length and
// with the distance from one index to the next in source and target.
#include "common/divisor.cuh"

#ifndef AXES
#define AXES 1
#endif
#ifndef WIDTH
#define WIDTH 1
#endif
#ifndef REVERSED
#define REVERSED 0
#endif
#ifndef TILE
#define TILE 64
#endif

// Six axes are enough for merged ones; absent ones come first, with length 1.
#define NUMBERS                                                                                                        \
    int64_t n0, int64_t n1, int64_t n2, int64_t n3, int64_t n4, int64_t n5, int64_t s0, int64_t s1, int64_t s2,        \
        int64_t s3, int64_t s4, int64_t s5, int64_t t0, int64_t t1, int64_t t2, int64_t t3, int64_t t4, int64_t t5,    \
        int64_t source, int64_t target
#define MOST 6

struct Layout {
    int64_t n[MOST], s[MOST], t[MOST];

    __device__ __forceinline__ int64_t count() const { return n[0] * n[1] * n[2] * n[3] * n[4] * n[5]; }
};

// How many a thread reads before it writes any.
#define UNDER_WAY 4

// Goes through all vectors of the target in turns: find(i, from, to) says where vector i comes from and goes to, and
// whether it comes from anywhere; the others are `value`.
template <typename I, typename Find>
static __device__ __forceinline__ void through(const T *x, T *y, int64_t count, T value, Find find)
{
    for (int64_t g = grid_index(); g < count; g += UNDER_WAY * grid_size()) {
        Vector<T, WIDTH> held[UNDER_WAY];
        int64_t to[UNDER_WAY];
#pragma unroll
        for (int k = 0; k < UNDER_WAY; k++) {
            const int64_t i = g + k * grid_size();
            int64_t from;
            if (i < count && find((I)i, from, to[k]))
                held[k] = load<T, WIDTH>(x + from);
            else
#pragma unroll
                for (int j = 0; j < WIDTH; j++)
                    held[k].lane[j] = value;
        }
#pragma unroll
        for (int k = 0; k < UNDER_WAY; k++)
            if (g + k * grid_size() < count) {
                Vector<T, WIDTH> v = held[k];
                if constexpr (REVERSED)
#pragma unroll
                    for (int j = 0; j < WIDTH; j++)
                        v.lane[j] = held[k].lane[WIDTH - 1 - j];
                store(y, to[k], v);
            }
    }
}

template <typename I> static __device__ __forceinline__ void copied(const T *x, T *y, const Layout &axes)
{
    const Divisor<I> n1(axes.n[1]), n2(axes.n[2]), n3(axes.n[3]), n4(axes.n[4]), n5(axes.n[5] / WIDTH);
    const Divisor<I> lengths[MOST] = {n1, n1, n2, n3, n4, n5};
    through<I>(x, y, axes.count() / WIDTH, (T)0, [&](I rest, int64_t &from, int64_t &to) {
        from = to = 0;
#pragma unroll
        for (int k = MOST - 1; k >= MOST - AXES; k--) {
            const I next = k == MOST - AXES ? (I)0 : lengths[k](rest);
            const int64_t at = (int64_t)rest * (k == MOST - 1 ? WIDTH : 1);
            from += at * axes.s[k];
            to += at * axes.t[k];
            rest = next;
        }
        if (REVERSED) // the vector ends where its first element is
            from -= WIDTH - 1;
        return true;
    });
}

// The last axis is contiguous in the target; WIDTH > 1 where it is in the source too, backwards if REVERSED, and vectors
// are aligned in both.
KERNEL copy(const T *x, T *y, NUMBERS)
{
    wait_for_inputs();
    const Layout axes = {{n0, n1, n2, n3, n4, n5}, {s0, s1, s2, s3, s4, s5}, {t0, t1, t2, t3, t4, t5}};
    if (axes.count() < (int64_t)1 << 31) // 32 bits divide several times faster
        copied<uint32_t>(x + source, y + target, axes);
    else
        copied<int64_t>(x + source, y + target, axes);
}

// `value`, and x in its midst: along each axis, index i of x is found at low + i * step.
#define PAD_NUMBERS                                                                                                    \
    int64_t m0, int64_t m1, int64_t m2, int64_t m3, int64_t m4, int64_t m5, int64_t n0, int64_t n1, int64_t n2,        \
        int64_t n3, int64_t n4, int64_t n5, int64_t low0, int64_t low1, int64_t low2, int64_t low3, int64_t low4,      \
        int64_t low5, int64_t step0, int64_t step1, int64_t step2, int64_t step3, int64_t step4, int64_t step5

struct Frame {
    int64_t m[MOST], n[MOST], low[MOST], step[MOST];
};

template <typename I> static __device__ __forceinline__ void padded(const T *x, T *y, const Frame &axes, T value)
{
    const Divisor<I> m1(axes.m[1]), m2(axes.m[2]), m3(axes.m[3]), m4(axes.m[4]), m5(axes.m[5] / WIDTH);
    const Divisor<I> lengths[MOST] = {m1, m1, m2, m3, m4, m5};
    const int64_t count = axes.m[0] * axes.m[1] * axes.m[2] * axes.m[3] * axes.m[4] * axes.m[5];
    through<I>(x, y, count / WIDTH, value, [&](I i, int64_t &from, int64_t &to) {
        to = (int64_t)i * WIDTH;
        from = 0;
        bool inside = true;
        int64_t distance = 1;
        I rest = i;
#pragma unroll
        for (int k = MOST - 1; k >= MOST - AXES; k--) {
            const I next = k == MOST - AXES ? (I)0 : lengths[k](rest);
            int64_t at = (int64_t)rest * (k == MOST - 1 ? WIDTH : 1) - axes.low[k];
            if (axes.step[k] > 1) {
                inside = inside && at >= 0 && (uint64_t)at % (uint64_t)axes.step[k] == 0;
                at /= axes.step[k];
            }
            inside = inside && at >= 0 && at < axes.n[k];
            from += at * distance;
            distance *= axes.n[k];
            rest = next;
        }
        return inside;
    });
}

KERNEL pad(const T *x, T *y, PAD_NUMBERS, double value)
{
    wait_for_inputs();
    const Frame axes = {{m0, m1, m2, m3, m4, m5},
                        {n0, n1, n2, n3, n4, n5},
                        {low0, low1, low2, low3, low4, low5},
                        {step0, step1, step2, step3, step4, step5}};
    if (m0 * m1 * m2 * m3 * m4 * m5 < (int64_t)1 << 31)
        padded<uint32_t>(x, y, axes, (T)value);
    else
        padded<int64_t>(x, y, axes, (T)value);
}

// The last axis is contiguous in the target, the one before it in the source: a block reads a tile along the one and
// writes it along the other, so that both are by neighbouring threads. One column more keeps the column's elements in
// different banks of shared memory.
#define THREADS 256
KERNEL __launch_bounds__(THREADS) copy_tiles(const T *x, T *y, NUMBERS)
{
    wait_for_inputs();
    __shared__ T tile[TILE][TILE + 1];
    // A grid has fewer than 2^31 blocks, so 32 bits number them and what they are made of.
    const uint32_t across = (n5 + TILE - 1) / TILE, down = (n4 + TILE - 1) / TILE;
    uint32_t block = blockIdx.x;
    const int64_t column = (int64_t)(block % across) * TILE, row = (int64_t)(block / across % down) * TILE;
    block /= across * down;
    const uint32_t m1 = n1, m2 = n2, m3 = n3;
    const int64_t i3 = block % m3, i2 = block / m3 % m2, i1 = block / m3 / m2 % m1, i0 = block / m3 / m2 / m1;
    const T *from = x + source + i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3;
    T *to = y + target + i0 * t0 + i1 * t1 + i2 * t2 + i3 * t3;
    constexpr int SIDE = TILE < THREADS ? TILE : THREADS, TURNS = THREADS / SIDE;
    const int lane = threadIdx.x % SIDE;
#pragma unroll 16
    for (int k = threadIdx.x / SIDE; k < TILE; k += TURNS)
        if (row + lane < n4 && column + k < n5)
            tile[k][lane] = from[(row + lane) * s4 + (column + k) * s5];
    __syncthreads();
#pragma unroll 16
    for (int k = threadIdx.x / SIDE; k < TILE; k += TURNS)
        if (row + k < n4 && column + lane < n5)
            to[(row + k) * t4 + (column + lane) * t5] = tile[lane][k];
}
