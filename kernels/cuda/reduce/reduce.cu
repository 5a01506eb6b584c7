// Reductions of any axes: sum, max, min, position of the maximum, logarithm of the sum of exponentials. A shape is eight
// lengths in turns of kept and of reduced axes
//
//     k0 r0 k1 r1 k2 r2 k3 r3        (C-contiguous; many of them are 1)
//
// so that an output is a number o in k0 k1 k2 k3, and an element of it a number r in r0 r1 r2 r3. Where there are few
// outputs, r is divided into parts: the first kernel writes one state for each part to scratch[o * parts + part], and
// `combine` reduces those. The division follows from the shape alone, so every device computes the same bits.
#include "reduce/accumulators.cuh"
#include "reduce/reduction_index.cuh"

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
            for (int k = 0; k < ROWS; k++) // past the end the last one again: no branches between the loads
                v[k] = load_words<WIDTH>(x + min(row + k * stride, outputs - 1) * length + j);
#pragma unroll
            for (int k = 0; k < ROWS; k++)
                state[k].take(v[k].lane, j);
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const State total = joined<LANES>(state[k]);
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

// A warp for each output of elements that lie next to one another and need not be whole vectors.
KERNEL reduce_warps(const T *x, U *y, int64_t outputs, int64_t length)
{
    wait_for_inputs();
    for (int64_t o = grid_index() / WARP; o < outputs; o += grid_size() / WARP) {
        State state = State::empty(), other = State::empty();
        contiguous(x + o * length, length, 0, threadIdx.x % WARP, WARP, state, other);
        state = joined<WARP>(Merge::of(state, other));
        if (threadIdx.x % WARP == 0)
            y[o] = state.result();
    }
}

// Elements r = begin, begin + step, ... < end of W neighbouring outputs, at steps.next(). Four loads are under way, or
// eight of single words.
template <int W, typename Steps>
static __device__ __forceinline__ void every(const T *x, Steps steps, int64_t begin, int64_t end, int64_t step,
                                             State (&state)[W])
{
    constexpr int AT_ONCE = W * sizeof(T) > 4 ? 4 : 8;
    int64_t r = begin;
    for (; r + (AT_ONCE - 1) * step < end; r += AT_ONCE * step) {
        Vector<T, W> v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            v[i] = load<T, W>(x + steps.next());
#pragma unroll
        for (int k = 0; k < W; k++) {
            T column[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                column[i] = v[i].lane[k];
            state[k].take(column, r, step);
        }
    }
    for (; r < end; r += step) {
        const Vector<T, W> v = load<T, W>(x + steps.next());
#pragma unroll
        for (int k = 0; k < W; k++)
            state[k].take({v.lane[k]}, r);
    }
}

template <int W>
static __device__ __forceinline__ void strided(const T *x, const Walk &walk, int64_t begin, int64_t end, int64_t step,
                                               State (&state)[W])
{
    if (walk.even())
        every(x, EvenSteps{begin * walk.distance(), step * walk.distance()}, begin, end, step, state);
    else if (walk.r0 * walk.r1 == 1 && walk.count() < (int64_t)1 << 31)
        every(x, Walk::Steps<uint32_t, true>(walk, begin, step), begin, end, step, state);
    else
        every(x, Walk::Steps<int64_t, false>(walk, begin, step), begin, end, step, state);
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

KERNEL __launch_bounds__(THREADS, sizeof(T) == 4 ? 3 : 1) reduce_block(const T *x, U *y, LENGTHS)
{
    wait_for_inputs();
    const State state = by_block(x, WALK, 1, r0 * r1 * r2 * r3);
    if (threadIdx.x == 0)
        y[blockIdx.x] = state.result();
}

KERNEL __launch_bounds__(THREADS, sizeof(T) == 4 ? 3 : 1)
reduce_block_parts(const T *x, U *y, LENGTHS, int64_t parts, int64_t chunk, char *scratch)
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

KERNEL __launch_bounds__(THREADS, sizeof(T) == 8 ? 1 : 2)
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
        state = joined<WARP>(state);
        if (threadIdx.x % WARP == 0)
            y[o] = state.result();
    }
}
