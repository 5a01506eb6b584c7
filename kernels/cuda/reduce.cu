// Reductions of any axes: sum, max, min, position of the maximum, logarithm of the sum of exponentials. A shape is eight
// lengths in turns of kept and of reduced axes
//
//     k0 r0 k1 r1 k2 r2 k3 r3        (C-contiguous; many of them are 1)
//
// so that an output is a number o in k0 k1 k2 k3, and an element of it a number r in r0 r1 r2 r3. Where there are few
// outputs, r is divided into parts: the first kernel writes one state for each part to scratch[o * parts + part], and
// `combine` reduces those. The division follows from the shape alone, so every device computes the same bits.
#include "divide.cuh"
#include "state.cuh"

#ifndef LANES
#define LANES 32
#endif
#ifndef WIDTH
#define WIDTH 1
#endif
#ifndef LENGTH
#define LENGTH 1
#endif

#define LENGTHS int64_t k0, int64_t r0, int64_t k1, int64_t r1, int64_t k2, int64_t r2, int64_t k3, int64_t r3
#define WALK Walk{k0, r0, k1, r1, k2, r2, k3, r3}
#define THREADS 256

struct Walk {
    int64_t k0, r0, k1, r1, k2, r2, k3, r3;

    __device__ int64_t outputs() const { return k0 * k1 * k2 * k3; }
    __device__ int64_t count() const { return r0 * r1 * r2 * r3; }

    // The place of the first element of output o. 32 bits divide several times faster than 64.
    __device__ int64_t start(int64_t o) const
    {
        if (k0 * k1 * k2 == 1)
            return o * r3;
        return outputs() < (int64_t)1 << 31 ? start_of<uint32_t>((uint32_t)o) : start_of<int64_t>(o);
    }

    template <typename I> __device__ int64_t start_of(I o) const
    {
        int64_t step = r3, place = o % (I)k3 * step;
        o /= (I)k3, step *= k3 * r2, place += o % (I)k2 * step;
        o /= (I)k2, step *= k2 * r1, place += o % (I)k1 * step;
        o /= (I)k1, step *= k1 * r0, place += o * step;
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
        return count() < (int64_t)1 << 31 ? Apart<uint32_t>(*this)(r) : Apart<int64_t>(*this)(r);
    }

    template <typename I> struct Apart {
        Divisor<I> r3, r2, r1;
        int64_t step2, step1, step0;

        __device__ __forceinline__ explicit Apart(const Walk &w)
            : r3(w.r3), r2(w.r2), r1(w.r1), step2(w.k3 * w.r3), step1(step2 * w.r2 * w.k2), step0(step1 * w.r1 * w.k1)
        {
        }
        __device__ __forceinline__ int64_t operator()(int64_t r) const
        {
            I i3 = (I)r, i2 = r3(i3), i1 = r2(i2);
            const I i0 = r1(i1);
            return i3 + (int64_t)i2 * step2 + (int64_t)i1 * step1 + (int64_t)i0 * step0;
        }
    };
};

// LANES lanes of a warp for each output of few elements that lie next to one another: `length` is a multiple of WIDTH.
// Several outputs are under way at once.
#define ROWS 4
KERNEL reduce_lanes(const T *x, U *y, int64_t outputs, int64_t length)
{
    wait_for_inputs();
    const int64_t stride = grid_size() / LANES;
    int64_t row = grid_index() / LANES;
    // All lanes of a warp go on until its first output is past the end.
    for (int64_t first = grid_index() / WARP * (WARP / LANES); first < outputs; first += ROWS * stride) {
        State state[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            state[k] = State::empty();
        for (int j = threadIdx.x % LANES * WIDTH; j < length; j += LANES * WIDTH) {
            Vector<T, WIDTH> v[ROWS];
#pragma unroll
            for (int k = 0; k < ROWS; k++)
                if (row + k * stride < outputs)
                    v[k] = load<T, WIDTH>(x + (row + k * stride) * length + j);
#pragma unroll
            for (int k = 0; k < ROWS; k++)
                if (row + k * stride < outputs)
                    state[k].take(v[k].lane, j);
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const State total = over_lanes<Merge, LANES>(state[k]);
            if (threadIdx.x % LANES == 0 && row + k * stride < outputs)
                y[row + k * stride] = total.result();
        }
        row += ROWS * stride;
    }
}

// A thread for each output of LENGTH elements that lie next to one another and are no whole vectors: the block brings
// its rows to shared memory.
KERNEL __launch_bounds__(THREADS) reduce_rows(const T *x, U *y, int64_t outputs)
{
    wait_for_inputs();
    __shared__ __align__(16) T rows[THREADS * LENGTH];
    const int64_t first = (int64_t)blockIdx.x * THREADS, left = outputs - first;
    copy_by_block<THREADS, THREADS * LENGTH>(x + first * LENGTH, rows, left * LENGTH);
    __syncthreads();
    if (threadIdx.x >= left)
        return;
    State state = State::empty();
    T row[LENGTH];
#pragma unroll
    for (int j = 0; j < LENGTH; j++)
        row[j] = rows[threadIdx.x * LENGTH + j];
    state.take(row, 0);
    y[first + threadIdx.x] = state.result();
}

// Elements r = begin, begin + step, ... < end of W neighbouring outputs, from `place(r)` on. Four loads are under way.
template <int W, typename Place>
static __device__ __forceinline__ void every(const T *x, Place place, int64_t begin, int64_t end, int64_t step,
                                             State (&state)[W])
{
    int64_t r = begin;
    for (; r + 3 * step < end; r += 4 * step) {
        Vector<T, W> v[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = load<T, W>(x + place(r + i * step));
#pragma unroll
        for (int k = 0; k < W; k++) {
#if OPERATION == 3 // the elements are not neighbours
#pragma unroll
            for (int i = 0; i < 4; i++)
                state[k].take({v[i].lane[k]}, r + i * step);
#else
            state[k].take({v[0].lane[k], v[1].lane[k], v[2].lane[k], v[3].lane[k]}, r);
#endif
        }
    }
    for (; r < end; r += step) {
        const Vector<T, W> v = load<T, W>(x + place(r));
#pragma unroll
        for (int k = 0; k < W; k++)
            state[k].take({v.lane[k]}, r);
    }
}

template <int W>
static __device__ __forceinline__ void strided(const T *x, const Walk &walk, int64_t begin, int64_t end, int64_t step,
                                               State (&state)[W])
{
    if (walk.even()) {
        const int64_t distance = walk.distance();
        every(x, [=](int64_t r) { return r * distance; }, begin, end, step, state);
    } else if (walk.count() < (int64_t)1 << 31)
        every(x, Walk::Apart<uint32_t>(walk), begin, end, step, state);
    else
        every(x, Walk::Apart<int64_t>(walk), begin, end, step, state);
}

// The shortest runs that a warp reads from end to end, and that a block does even where there is one for each warp.
#define WARP_RUN 512
#define BLOCK_RUN 2048

// A block for each part of each output, where reduced elements lie next to one another.
static __device__ __forceinline__ State by_block(const T *x, const Walk &walk, int64_t parts, int64_t chunk)
{
    const int64_t o = blockIdx.x / parts, begin = blockIdx.x % parts * chunk;
    const int64_t end = min(begin + chunk, walk.count()), run = walk.r3;
    const T *from = x + walk.start(o);
    State states[1] = {State::empty()}, other = State::empty();
    if (run < WARP_RUN && !walk.even())
        strided(from, walk, begin + threadIdx.x, end, blockDim.x, states);
    else {
        const bool enough = run < BLOCK_RUN && end - begin >= run * (THREADS / WARP);
        const int team = enough ? WARP : blockDim.x, me = threadIdx.x % team;
        for (int64_t start = (begin / run + threadIdx.x / team) * run; start < end; start += blockDim.x / team * run) {
            const int64_t first = max(begin, start), last = min(end, start + run);
            contiguous(from + walk.offset(first), last - first, first, me, team, states[0], other);
        }
    }
    return over_block<Merge>(Merge::of(states[0], other));
}

KERNEL reduce_block(const T *x, U *y, LENGTHS)
{
    wait_for_inputs();
    const State state = by_block(x, WALK, 1, r0 * r1 * r2 * r3);
    if (threadIdx.x == 0)
        y[blockIdx.x] = state.result();
}

KERNEL reduce_block_parts(const T *x, U *y, LENGTHS, int64_t parts, int64_t chunk, char *scratch)
{
    wait_for_inputs();
    const State state = by_block(x, WALK, parts, chunk);
    if (threadIdx.x == 0)
        ((State *)scratch)[blockIdx.x] = state;
}

// A block for each part of LANES * WIDTH outputs, where the outputs' elements lie next to one another: each thread reads
// WIDTH neighbouring outputs, and rows of LANES threads take turns along the reduced axes. At the end they are added up
// in pairs, and the first row has the result. Returns whether we are in it.
static __device__ __forceinline__ bool by_columns(const T *x, const Walk &walk, int64_t parts, int64_t chunk,
                                                  State (&state)[WIDTH], int64_t &first)
{
    constexpr int TURNS = THREADS / LANES, HALF = TURNS > 1 ? TURNS / 2 : 1;
    __shared__ State found[HALF][LANES][WIDTH];
    const int lane = threadIdx.x % LANES, turn = threadIdx.x / LANES;
    first = (blockIdx.x / parts * LANES + lane) * WIDTH;
    const int64_t begin = blockIdx.x % parts * chunk, end = min(begin + chunk, walk.count());
#pragma unroll
    for (int k = 0; k < WIDTH; k++)
        state[k] = State::empty();
    const bool real = first < walk.outputs();
    if (real)
        strided(x + walk.start(first), walk, begin + turn, end, TURNS, state);
#pragma unroll
    for (int half = TURNS / 2; half > 0; half /= 2) {
        if (turn >= half && turn < 2 * half)
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                found[turn - half][lane][k] = state[k];
        __syncthreads();
        if (turn < half)
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                state[k] = Merge::of(state[k], found[turn][lane][k]);
        __syncthreads();
    }
    return real && turn == 0;
}

KERNEL __launch_bounds__(THREADS) reduce_columns(const T *x, U *y, LENGTHS)
{
    wait_for_inputs();
    State state[WIDTH];
    int64_t first;
    if (!by_columns(x, WALK, 1, r0 * r1 * r2 * r3, state, first))
        return;
    Vector<U, WIDTH> results;
#pragma unroll
    for (int k = 0; k < WIDTH; k++)
        results.lane[k] = state[k].result();
    store(y, first, results);
}

KERNEL __launch_bounds__(THREADS, 2)
reduce_columns_parts(const T *x, U *y, LENGTHS, int64_t parts, int64_t chunk, char *scratch)
{
    wait_for_inputs();
    State state[WIDTH];
    int64_t first;
    if (by_columns(x, WALK, parts, chunk, state, first))
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            ((State *)scratch)[(first + k) * parts + blockIdx.x % parts] = state[k];
}

// The second pass: a warp for each output reduces its parts.
KERNEL combine(const T *, U *y, int64_t outputs, int64_t parts, char *scratch)
{
    wait_for_inputs();
    const State *partial = (const State *)scratch;
    for (int64_t o = grid_index() / WARP; o < outputs; o += grid_size() / WARP) {
        State state = State::empty();
        for (int64_t p = threadIdx.x % WARP; p < parts; p += WARP)
            state = Merge::of(state, partial[o * parts + p]);
        state = over_lanes<Merge, WARP>(state);
        if (threadIdx.x % WARP == 0)
            y[o] = state.result();
    }
}
