// softmax and log_softmax along one axis. The largest element is subtracted before exp, so nothing overflows.
//
// A row is read once where it fits in the registers of its threads (softmax_rows, softmax_team); of a longer one what
// fits in shared memory is kept there, and the rest is read again (softmax_long). Columns, whose elements are `inner`
// apart, go to neighbouring threads.
#define OPERATION 4
#include "state.cuh"

#ifndef TEAM
#define TEAM 32
#endif
#ifndef ITEMS
#define ITEMS 1
#endif
#ifndef WIDTH
#define WIDTH 1
#endif
#ifndef LENGTH
#define LENGTH 1
#endif
#ifndef LOGARITHM
#define LOGARITHM 0
#endif
#define THREADS 256
// Vectors that a thread of a long row reads before it uses any.
#define UNDER_WAY (16 / (int)sizeof(T))

// What is kept of an element until the sum is known, what it adds to the sum, and the result that it then gives.
static __device__ __forceinline__ T kept(T x, T top) { return LOGARITHM ? x - top : exp(x - top); }

static __device__ __forceinline__ T term(T kept) { return LOGARITHM ? exp(kept) : kept; }

// The sum of a row's terms, ready to turn what is kept into results.
struct Total {
    T factor;

    __device__ __forceinline__ explicit Total(T sum) : factor(LOGARITHM ? log(sum) : 1 / sum) {}
    __device__ __forceinline__ T result(T kept) const { return LOGARITHM ? kept - factor : kept * factor; }
};

// Rows of up to TEAM * ITEMS * WIDTH elements, a multiple of WIDTH: each of TEAM threads keeps ITEMS vectors. A team is
// lanes of a warp, or the block; what a warp's lanes do by themselves is done for several rows at once.
constexpr int ROWS = TEAM > WARP || ITEMS >= 4 ? 1 : 4 / ITEMS, UNIT = TEAM > WARP ? TEAM : WARP;

KERNEL __launch_bounds__(TEAM > WARP ? TEAM : 1024) softmax_team(const T *x, T *y, int64_t rows, int64_t length)
{
    wait_for_inputs();
    const int64_t stride = grid_size() / TEAM;
    const int me = threadIdx.x % TEAM * WIDTH;
    int64_t row = grid_index() / TEAM;
    for (int64_t first = grid_index() / UNIT * (UNIT / TEAM); first < rows; first += ROWS * stride) {
        Vector<T, WIDTH> mine[ROWS][ITEMS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < ITEMS; k++)
                if (me + k * TEAM * WIDTH < length && row + r * stride < rows)
                    mine[r][k] = load<T, WIDTH>(x + (row + r * stride) * length + me + k * TEAM * WIDTH);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            T top = -(T)INFINITY, sum = 0;
#pragma unroll
            for (int k = 0; k < ITEMS; k++)
#pragma unroll
                for (int i = 0; i < WIDTH; i++)
                    if (me + k * TEAM * WIDTH < length)
                        top = Max::of(top, mine[r][k].lane[i]);
            top = over_team<Max, TEAM>(top);
#pragma unroll
            for (int k = 0; k < ITEMS; k++)
#pragma unroll
                for (int i = 0; i < WIDTH; i++)
                    if (me + k * TEAM * WIDTH < length) {
                        mine[r][k].lane[i] = kept(mine[r][k].lane[i], top);
                        sum += term(mine[r][k].lane[i]);
                    }
            const Total total(over_team<Sum, TEAM>(sum));
#pragma unroll
            for (int k = 0; k < ITEMS; k++) {
#pragma unroll
                for (int i = 0; i < WIDTH; i++)
                    mine[r][k].lane[i] = total.result(mine[r][k].lane[i]);
                if (me + k * TEAM * WIDTH < length && row + r * stride < rows)
                    store(y, (row + r * stride) * length + me + k * TEAM * WIDTH, mine[r][k]);
            }
        }
        row += ROWS * stride;
    }
}

// LENGTH elements, `step` apart, by one thread; `to` may be `from`.
static __device__ __forceinline__ void by_thread(const T *from, T *to, int64_t step)
{
    T mine[LENGTH], top = -(T)INFINITY, sum = 0;
#pragma unroll
    for (int j = 0; j < LENGTH; j++)
        mine[j] = from[j * step];
#pragma unroll
    for (int j = 0; j < LENGTH; j++)
        top = Max::of(top, mine[j]);
#pragma unroll
    for (int j = 0; j < LENGTH; j++) {
        mine[j] = kept(mine[j], top);
        sum += term(mine[j]);
    }
    const Total total(sum);
#pragma unroll
    for (int j = 0; j < LENGTH; j++)
        to[j * step] = total.result(mine[j]);
}

// A thread for each row of LENGTH elements that are no whole vectors: they go through shared memory on both ways.
KERNEL __launch_bounds__(THREADS, 1) softmax_rows(const T *x, T *y, int64_t rows)
{
    wait_for_inputs();
    __shared__ __align__(16) T held[THREADS * LENGTH];
    const int64_t first = (int64_t)blockIdx.x * THREADS, left = rows - first;
    copy_by_block<THREADS, THREADS * LENGTH>(x + first * LENGTH, held, left * LENGTH);
    __syncthreads();
    if (threadIdx.x < left)
        by_thread(held + threadIdx.x * LENGTH, held + threadIdx.x * LENGTH, 1);
    __syncthreads();
    copy_by_block<THREADS, THREADS * LENGTH>(held, y + first * LENGTH, left * LENGTH);
}

// A block for each row. The first `cached` bytes of its aligned part are kept in shared memory.
KERNEL __launch_bounds__(512, sizeof(T) == 8 ? 1 : 2) softmax_long(const T *x, T *y, int64_t, int64_t length, int64_t cached)
{
    wait_for_inputs();
    constexpr int WIDE = 16 / sizeof(T);
    extern __shared__ __align__(16) char memory[];
    T *row = (T *)memory;
    const T *from = x + blockIdx.x * length;
    T *to = y + blockIdx.x * length;
    const int64_t head = min(length, (int64_t)((16 - (uintptr_t)from % 16) % 16 / sizeof(T)));
    const int64_t vectors = (length - head) / WIDE, tail = head + vectors * WIDE;
    const int64_t in_memory = min(vectors, cached / 16);
    State state = State::empty();
    for (int64_t i = threadIdx.x; i < vectors; i += UNDER_WAY * blockDim.x) {
        T all[UNDER_WAY * WIDE];
#pragma unroll
        for (int k = 0; k < UNDER_WAY; k++) {
            Vector<T, WIDE> v;
#pragma unroll
            for (int j = 0; j < WIDE; j++)
                v.lane[j] = -(T)INFINITY;
            if (i + k * blockDim.x < vectors)
                v = load<T, WIDE>(from + head + (i + k * blockDim.x) * WIDE);
#pragma unroll
            for (int j = 0; j < WIDE; j++)
                all[k * WIDE + j] = v.lane[j];
        }
#pragma unroll
        for (int k = 0; k < UNDER_WAY; k++) {
            Vector<T, WIDE> v;
#pragma unroll
            for (int j = 0; j < WIDE; j++)
                v.lane[j] = all[k * WIDE + j];
            if (i + k * blockDim.x < in_memory)
                store(row, (i + k * blockDim.x) * WIDE, v);
        }
        state.take(all, 0);
    }
    for (int64_t i = threadIdx.x; i < head; i += blockDim.x)
        state.take(load<T, 1>(from + i).lane, 0);
    for (int64_t i = tail + threadIdx.x; i < length; i += blockDim.x)
        state.take(load<T, 1>(from + i).lane, 0);
    state = over_block<Merge>(state);
    const T top = state.top;
    const Total total(state.total);
    // Vectors first, first - blockDim.x, ... >= end, from device or from shared memory.
    auto write = [&](const T *source, int64_t first, int64_t end) {
        for (int64_t i = first; i >= end; i -= UNDER_WAY * blockDim.x) {
            Vector<T, WIDE> v[UNDER_WAY];
#pragma unroll
            for (int k = 0; k < UNDER_WAY; k++)
                if (i - k * (int)blockDim.x >= end)
                    v[k] = load<T, WIDE>(source + (i - k * (int)blockDim.x) * WIDE);
#pragma unroll
            for (int k = 0; k < UNDER_WAY; k++) {
#pragma unroll
                for (int j = 0; j < WIDE; j++)
                    v[k].lane[j] = total.result(kept(v[k].lane[j], top));
                if (i - k * (int)blockDim.x >= end)
                    store(to + head, (i - k * (int)blockDim.x) * WIDE, v[k]);
            }
        }
    };
    write(from + head, vectors - 1 - threadIdx.x, in_memory); // the end first: it is what was read last
    write(row, in_memory - 1 - threadIdx.x, 0);
    for (int64_t i = threadIdx.x; i < head; i += blockDim.x)
        to[i] = total.result(kept(from[i], top));
    for (int64_t i = tail + threadIdx.x; i < length; i += blockDim.x)
        to[i] = total.result(kept(from[i], top));
}

// A thread for each column of LENGTH elements.
KERNEL softmax_columns(const T *x, T *y, int64_t outer, int64_t inner)
{
    wait_for_inputs();
    const bool few = outer * inner < (int64_t)1 << 31; // 32 bits divide several times faster
    for (int64_t i = grid_index(); i < outer * inner; i += grid_size()) {
        const int64_t o = few ? (uint32_t)i / (uint32_t)inner : i / inner, start = o * LENGTH * inner + i - o * inner;
        by_thread(x + start, y + start, inner);
    }
}

#define COLUMN_THREADS 512
// A block for WARP columns: its warps take turns along them, once for the sum and once for the results.
KERNEL __launch_bounds__(COLUMN_THREADS, 1) softmax_long_columns(const T *x, T *y, int64_t outer, int64_t length, int64_t inner)
{
    wait_for_inputs();
    constexpr int TURNS = COLUMN_THREADS / WARP;
    __shared__ State found[TURNS][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t column = (int64_t)blockIdx.x * WARP + lane, start = column / inner * length * inner + column % inner;
    const bool real = column < outer * inner;
    State state = State::empty();
    if (real)
        for (int64_t j = warp; j < length; j += 4 * TURNS) {
            Vector<T, 4> v;
#pragma unroll
            for (int k = 0; k < 4; k++)
                v.lane[k] = j + k * TURNS < length ? x[start + (j + k * TURNS) * inner] : -(T)INFINITY;
            state.take(v.lane, 0);
        }
    found[warp][lane] = state;
    __syncthreads();
    state = found[0][lane];
    for (int w = 1; w < TURNS; w++)
        state = Merge::of(state, found[w][lane]);
    const Total total(state.total);
    if (real)
#pragma unroll 4
        for (int64_t j = warp; j < length; j += TURNS)
            y[start + j * inner] = total.result(kept(x[start + j * inner], state.top));
}
