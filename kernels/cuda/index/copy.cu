// Strided copies: transpose, flip, slice, concatenate, pad. A copy has AXES axes, outermost first. Each axis has a length, and a
// stride in source and target.
#include "common/common.cuh"
#include "index/copy_tile.cuh"

#ifndef AXES
#define AXES 1
#endif
#ifndef WIDTH
#define WIDTH 1
#endif
#ifndef REVERSED
#define REVERSED 0
#endif
#ifndef ROWS
#define ROWS 64
#define COLUMNS 64
#endif

// n: lengths; s, t: strides in source and target. At most six axes after merging; absent axes come first, with length 1.
#define NUMBERS                                                                                                        \
    int64_t n0, int64_t n1, int64_t n2, int64_t n3, int64_t n4, int64_t n5, int64_t s0, int64_t s1, int64_t s2,        \
        int64_t s3, int64_t s4, int64_t s5, int64_t t0, int64_t t1, int64_t t2, int64_t t3, int64_t t4, int64_t t5,    \
        int64_t source, int64_t target
#define MAX_AXES 6

struct Layout {
    int64_t n[MAX_AXES], s[MAX_AXES], t[MAX_AXES];

    __device__ __forceinline__ int64_t count() const { return n[0] * n[1] * n[2] * n[3] * n[4] * n[5]; }
};

// Vectors that a thread loads before it stores any.
#define LOADS 4

// A grid-stride loop over all vectors of the target. find(i, from, to) sets the offsets of vector i in source and target. It
// returns false if the vector is not in the source; then `value` is stored.
template <typename I, typename Find>
static __device__ __forceinline__ void for_each_vector(const T *x, T *y, int64_t count, T value, Find find) {
    for (int64_t g = grid_index(); g < count; g += LOADS * grid_size()) {
        Vector<T, WIDTH> held[LOADS];
        int64_t to[LOADS];
        #pragma unroll
        for (int k = 0; k < LOADS; k++) {
            const int64_t i = g + k * grid_size();
            int64_t from;
            if (i < count && find((I)i, from, to[k]))
                held[k] = load<T, WIDTH>(x + from);
            else
                #pragma unroll
                for (int j = 0; j < WIDTH; j++) held[k].lane[j] = value;
        }
        #pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (g + k * grid_size() < count) {
                Vector<T, WIDTH> v = held[k];
                if constexpr (REVERSED)
                    #pragma unroll
                    for (int j = 0; j < WIDTH; j++) v.lane[j] = held[k].lane[WIDTH - 1 - j];
                store(y, to[k], v);
            }
    }
}

template <typename I> static __device__ __forceinline__ void copy_vectors(const T *x, T *y, const Layout &axes) {
    const Divisor<I> n1(axes.n[1]), n2(axes.n[2]), n3(axes.n[3]), n4(axes.n[4]), n5(axes.n[5] / WIDTH);
    const Divisor<I> lengths[MAX_AXES] = {n1, n1, n2, n3, n4, n5};
    for_each_vector<I>(x, y, axes.count() / WIDTH, (T)0, [&](I rest, int64_t &from, int64_t &to) {
        from = to = 0;
        #pragma unroll
        for (int k = MAX_AXES - 1; k >= MAX_AXES - AXES; k--) {
            const I next = k == MAX_AXES - AXES ? (I)0 : lengths[k](rest);
            const int64_t at = (int64_t)rest * (k == MAX_AXES - 1 ? WIDTH : 1);
            from += at * axes.s[k];
            to += at * axes.t[k];
            rest = next;
        }
        if (REVERSED) // from is the offset of the vector's first element, which is the last in memory
            from -= WIDTH - 1;
        return true;
    });
}

// The last axis is contiguous in the target. WIDTH > 1 where it is contiguous in the source too (reversed if REVERSED),
// and vectors are aligned in both.
KERNEL copy(const T *x, T *y, NUMBERS) {
    wait_for_inputs();
    const Layout axes = {{n0, n1, n2, n3, n4, n5}, {s0, s1, s2, s3, s4, s5}, {t0, t1, t2, t3, t4, t5}};
    if (axes.count() < (int64_t)1 << 31) // division is several times faster in 32 bits
        copy_vectors<uint32_t>(x + source, y + target, axes);
    else
        copy_vectors<int64_t>(x + source, y + target, axes);
}

// Pads: index i of x along an axis is at low + i * step of y; all other elements are `value`.
#define PAD_NUMBERS                                                                                                    \
    int64_t m0, int64_t m1, int64_t m2, int64_t m3, int64_t m4, int64_t m5, int64_t n0, int64_t n1, int64_t n2,        \
        int64_t n3, int64_t n4, int64_t n5, int64_t low0, int64_t low1, int64_t low2, int64_t low3, int64_t low4,      \
        int64_t low5, int64_t step0, int64_t step1, int64_t step2, int64_t step3, int64_t step4, int64_t step5

struct Frame {
    int64_t m[MAX_AXES], n[MAX_AXES], low[MAX_AXES], step[MAX_AXES];
};

template <typename I> static __device__ __forceinline__ void pad_vectors(const T *x, T *y, const Frame &axes, T value) {
    const Divisor<I> m1(axes.m[1]), m2(axes.m[2]), m3(axes.m[3]), m4(axes.m[4]), m5(axes.m[5] / WIDTH);
    const Divisor<I> lengths[MAX_AXES] = {m1, m1, m2, m3, m4, m5};
    const int64_t count = axes.m[0] * axes.m[1] * axes.m[2] * axes.m[3] * axes.m[4] * axes.m[5];
    for_each_vector<I>(x, y, count / WIDTH, value, [&](I i, int64_t &from, int64_t &to) {
        to = (int64_t)i * WIDTH;
        from = 0;
        bool inside = true;
        int64_t distance = 1;
        I rest = i;
        #pragma unroll
        for (int k = MAX_AXES - 1; k >= MAX_AXES - AXES; k--) {
            const I next = k == MAX_AXES - AXES ? (I)0 : lengths[k](rest);
            int64_t at = (int64_t)rest * (k == MAX_AXES - 1 ? WIDTH : 1) - axes.low[k];
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

// The type in which a constant is passed: double for floating-point elements, else int64_t; double is not exact for all
// integers.
template <bool FLOATING> struct NumberOf { typedef int64_t type; };
template <> struct NumberOf<true> { typedef double type; };
typedef NumberOf<IS_FLOAT<T>>::type Number;

KERNEL pad(const T *x, T *y, PAD_NUMBERS, Number value) {
    wait_for_inputs();
    const Frame axes = {{m0, m1, m2, m3, m4, m5},
                        {n0, n1, n2, n3, n4, n5},
                        {low0, low1, low2, low3, low4, low5},
                        {step0, step1, step2, step3, step4, step5}};
    if (m0 * m1 * m2 * m3 * m4 * m5 < (int64_t)1 << 31)
        pad_vectors<uint32_t>(x, y, axes, (T)value);
    else
        pad_vectors<int64_t>(x, y, axes, (T)value);
}

// The last axis is contiguous in the target, the one before it in the source. A block copies a tile of ROWS x COLUMNS.
#define THREADS 256
KERNEL __launch_bounds__(THREADS) copy_tiles(const T *x, T *y, NUMBERS) {
    wait_for_inputs();
    __shared__ CopyTile<T, ROWS, COLUMNS> tile;
    // A grid has fewer than 2^31 blocks, so 32 bits are enough for their indices.
    const uint32_t across = (n5 + COLUMNS - 1) / COLUMNS, down = (n4 + ROWS - 1) / ROWS;
    uint32_t block = blockIdx.x;
    const int64_t column = (int64_t)(block % across) * COLUMNS, row = (int64_t)(block / across % down) * ROWS;
    block /= across * down;
    const uint32_t m1 = n1, m2 = n2, m3 = n3;
    const int64_t i3 = block % m3, i2 = block / m3 % m2, i1 = block / m3 / m2 % m1, i0 = block / m3 / m2 / m1;
    const T *from = x + source + i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3 + row * s4 + column * s5;
    T *to = y + target + i0 * t0 + i1 * t1 + i2 * t2 + i3 * t3 + row * t4 + column * t5;
    const uint32_t rows = n4 - row < ROWS ? n4 - row : ROWS, columns = n5 - column < COLUMNS ? n5 - column : COLUMNS;
    tile.copy<THREADS>(from, to, rows, columns, s4, s5, t4, t5);
}

#ifdef PARTS // a macro of `join` alone
// Joins the elements of PARTS contiguous arrays to one vector, in one launch. Each block copies CHUNK bytes of one part.
#define VECTOR 16

struct Parts {
    const T *of[PARTS];
};
struct Starts {
    int64_t of[PARTS + 1];
};

// starts: of each part in `joined`, in elements; the last one is the end. blocks: the first block of each part.
KERNEL join(const Parts parts, T *joined, const Starts starts, const Starts blocks)
{
    wait_for_inputs();
    int part = 0;
    while (part + 1 < PARTS && (int64_t)blockIdx.x >= blocks.of[part + 1]) part++;
    const T *from = parts.of[part];
    T *to = joined + starts.of[part];
    const int64_t first = (blockIdx.x - blocks.of[part]) * (int64_t)(CHUNK / sizeof(T));
    const int64_t length = starts.of[part + 1] - starts.of[part];
    const int64_t end = first + CHUNK / sizeof(T) < length ? first + CHUNK / sizeof(T) : length;
    constexpr int WIDE = VECTOR / sizeof(T);
    int64_t whole = first;
    if (starts.of[part] % WIDE == 0) { // arrays are aligned to vectors
        whole = first + (end - first) / WIDE * WIDE;
        Vector<T, WIDE> held[CHUNK / VECTOR / THREADS];
        #pragma unroll
        for (int k = 0; k < CHUNK / VECTOR / THREADS; k++) {
            const int64_t i = first + (k * THREADS + threadIdx.x) * WIDE;
            if (i < whole) held[k] = load<T, WIDE>(from + i);
        }
        #pragma unroll
        for (int k = 0; k < CHUNK / VECTOR / THREADS; k++) {
            const int64_t i = first + (k * THREADS + threadIdx.x) * WIDE;
            if (i < whole) store(to, i, held[k]);
        }
    }
    for (int64_t i = whole + threadIdx.x; i < end; i += THREADS) to[i] = from[i];
}
#endif
