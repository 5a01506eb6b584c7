// Copies between layouts: transpose, flip, slice, concatenate, pad. AXES axes, outermost first, each with a length and
// with the distance from one index to the next in source and target.
#include "common.cuh"

#ifndef AXES
#define AXES 1
#endif

// Six axes are enough for merged ones; absent ones come first, with length 1.
#define NUMBERS                                                                                                        \
    int64_t n0, int64_t n1, int64_t n2, int64_t n3, int64_t n4, int64_t n5, int64_t s0, int64_t s1, int64_t s2,        \
        int64_t s3, int64_t s4, int64_t s5, int64_t t0, int64_t t1, int64_t t2, int64_t t3, int64_t t4, int64_t t5,    \
        int64_t source, int64_t target
#define MOST 6

struct Layout {
    int64_t n[MOST], s[MOST], t[MOST];
};

template <typename I> static __device__ __forceinline__ void copied(const T *x, T *y, const Layout &axes, I count)
{
    for (I i = (I)grid_index(); i < count; i += (I)grid_size()) {
        I rest = i;
        int64_t from = 0, to = 0;
#pragma unroll
        for (int k = MOST - 1; k >= MOST - AXES; k--) {
            const I n = (I)axes.n[k], at = k == MOST - AXES ? rest : rest % n;
            rest /= n;
            from += at * axes.s[k];
            to += at * axes.t[k];
        }
        y[to] = x[from];
    }
}

// The last axis is contiguous in the target.
KERNEL copy(const T *x, T *y, NUMBERS)
{
    wait_for_inputs();
    const Layout axes = {{n0, n1, n2, n3, n4, n5}, {s0, s1, s2, s3, s4, s5}, {t0, t1, t2, t3, t4, t5}};
    const int64_t count = n0 * n1 * n2 * n3 * n4 * n5;
    if (count < 1 << 30) // 32 bits divide several times faster
        copied<uint32_t>(x + source, y + target, axes, (uint32_t)count);
    else
        copied<int64_t>(x + source, y + target, axes, count);
}

// The last axis is contiguous in the target, the one before it in the source: a block reads a tile along the one and
// writes it along the other, so that both are by neighbouring threads. One column more keeps the column's elements in
// different banks of shared memory.
#define TILE 64
KERNEL __launch_bounds__(256) copy_tiles(const T *x, T *y, NUMBERS)
{
    wait_for_inputs();
    __shared__ T tile[TILE][TILE + 1];
    // A grid has fewer than 2^31 blocks, so 32 bits number them and what they are made of.
    const uint32_t across = (n5 + TILE - 1) / TILE, down = (n4 + TILE - 1) / TILE;
    uint32_t block = blockIdx.x / across;
    const int64_t column = (int64_t)(blockIdx.x % across) * TILE, row = (int64_t)(block % down) * TILE;
    block /= down;
    const uint32_t m1 = n1, m2 = n2, m3 = n3;
    const int64_t i3 = block % m3, i2 = block / m3 % m2, i1 = block / m3 / m2 % m1, i0 = block / m3 / m2 / m1;
    const T *from = x + source + i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3;
    T *to = y + target + i0 * t0 + i1 * t1 + i2 * t2 + i3 * t3;
    const int lane = threadIdx.x % TILE;
#pragma unroll
    for (int i = 0, k = threadIdx.x / TILE; i < TILE * TILE / 256; i++, k += 256 / TILE)
        if (row + lane < n4 && column + k < n5)
            tile[k][lane] = from[(row + lane) * s4 + (column + k) * s5];
    __syncthreads();
#pragma unroll
    for (int i = 0, k = threadIdx.x / TILE; i < TILE * TILE / 256; i++, k += 256 / TILE)
        if (row + k < n4 && column + lane < n5)
            to[(row + k) * t4 + (column + lane) * t5] = tile[lane][k];
}

KERNEL fill(const T *, T *y, int64_t count, double value)
{
    wait_for_inputs();
    for (int64_t i = grid_index(); i < count; i += grid_size())
        y[i] = (T)value;
}
