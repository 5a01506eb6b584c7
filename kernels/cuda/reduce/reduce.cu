// Reductions over any axes: sum, max, min, argmax, logsumexp. A shape is given as eight lengths, of kept and reduced
// axes in turn
//
//     k0 r0 k1 r1 k2 r2 k3 r3        (C-contiguous; many of them are 1)
//
// An output has an index o in k0 k1 k2 k3, and an element of it an index r in r0 r1 r2 r3. If there are too few outputs for the
// GPU, r is split into parts: the first kernel writes one state per part to scratch[o * parts + part], and `combine` reduces
// them. The split follows from the shape alone, so each GPU computes the same bits.
//
// The argument is an array, or with COMPUTED_ARGUMENT computed from others where it is needed; see reduce/accumulators.cuh.
#include "reduce/accumulators.cuh"

// The offsets of the elements of a reduction, by these lengths.
struct ReductionIndex {
    int64_t k0, r0, k1, r1, k2, r2, k3, r3;

    __device__ int64_t outputs() const { return k0 * k1 * k2 * k3; }
    __device__ int64_t count() const { return r0 * r1 * r2 * r3; }

    // The offset of the first element of output o. Division is several times faster in 32 bits than in 64.
    __device__ int64_t start(int64_t o) const {
        if (k0 * k1 * k2 == 1) return o * r3;
        return outputs() < (int64_t)1 << 31 ? start_of<uint32_t>((uint32_t)o) : start_of<int64_t>(o);
    }

    template <typename I> __device__ int64_t start_of(I o) const {
        int64_t step = r3, start = o % (I)k3 * step;
        o /= (I)k3, step *= k3 * r2, start += o % (I)k2 * step;
        o /= (I)k2, step *= k2 * r1, start += o % (I)k1 * step;
        o /= (I)k1, step *= k1 * r0, start += o * step;
        return start;
    }

    // Whether the reduced elements of an output have one stride, and that stride.
    __device__ bool uniform() const { return r0 * r1 * r2 == 1 || r0 * r1 * r3 == 1; }
    __device__ int64_t stride() const { return r0 * r1 * r2 == 1 ? 1 : k3; }

    // The offset of element r from the output's first element.
    __device__ int64_t offset(int64_t r) const {
        if (uniform()) return r * stride();
        if (count() < (int64_t)1 << 31) // division is several times faster in 32 bits
            return Steps<uint32_t, false>(*this, r, 0).at;
        return Steps<int64_t, false>(*this, r, 0).at;
    }

    // The offsets of elements begin, begin + step, ... without divisions: a step is added in the mixed radix r0 r1 r2
    // r3, with carries. PLANES: r0 and r1 are 1.
    template <typename I, bool PLANES> struct Steps {
        I i3, i2, i1, d3, d2, d1, r3, r2, r1;
        int64_t at, along, carry3, carry2, carry1;

        __device__ __forceinline__ Steps(const ReductionIndex &w, int64_t begin, int64_t step)
            : r3(w.r3), r2(w.r2), r1(w.r1) {
            const int64_t step2 = w.k3 * w.r3, step1 = step2 * w.r2 * w.k2, step0 = step1 * w.r1 * w.k1;
            auto split = [&](I r, I &a3, I &a2, I &a1) {
                I rest = r / r3;
                a3 = r - rest * r3, a2 = rest, a1 = 0;
                if (PLANES) return a3 + (int64_t)a2 * step2;
                a2 = rest % r2, rest /= r2, a1 = rest % r1, rest /= r1;
                return a3 + (int64_t)a2 * step2 + (int64_t)a1 * step1 + (int64_t)rest * step0;
            };
            at = split((I)begin, i3, i2, i1);
            along = split((I)step, d3, d2, d1);
            carry3 = step2 - w.r3, carry2 = step1 - w.r2 * step2, carry1 = step0 - w.r1 * step1;
        }
        __device__ __forceinline__ int64_t next() {
            const int64_t here = at;
            at += along, i3 += d3;
            const bool over3 = i3 >= r3;
            if (over3) i3 -= r3, at += carry3;
            if (PLANES) return here;
            i2 += d2 + over3;
            const bool over2 = i2 >= r2;
            if (over2) i2 -= r2, at += carry2;
            i1 += d1 + over2;
            if (i1 >= r1) i1 -= r1, at += carry1;
            return here;
        }
    };
};

struct UniformSteps {
    int64_t at, along;

    __device__ __forceinline__ int64_t next() {
        const int64_t here = at;
        at += along;
        return here;
    }
};

#ifndef LANES
#define LANES 32
#endif
#ifndef WIDTH
#define WIDTH 1
#endif

#define LENGTHS int64_t k0, int64_t r0, int64_t k1, int64_t r1, int64_t k2, int64_t r2, int64_t k3, int64_t r3
#define REDUCTION_INDEX ReductionIndex{k0, r0, k1, r1, k2, r2, k3, r3}
#define THREADS 256

// LANES lanes of a warp per output of contiguous elements; `length` is a multiple of WIDTH. Loads of ROWS outputs are in flight
// at once.
#define ROWS 4
KERNEL reduce_lanes(Argument x, U *y, int64_t outputs, int64_t length) {
    wait_for_inputs();
    const int64_t stride = grid_size() / LANES;
    int64_t row = grid_index() / LANES;
    // All lanes of a warp stay in the loop until its first output is past the end: they shuffle together.
    for (int64_t first = grid_index() / WARP * (WARP / LANES); first < outputs; first += ROWS * stride) {
        State state[ROWS];
        #pragma unroll
        for (int k = 0; k < ROWS; k++) state[k] = State::empty();
        for (int j = threadIdx.x % LANES * WIDTH; j < length; j += LANES * WIDTH) {
            Vector<T, WIDTH> v[ROWS];
            #pragma unroll
            for (int k = 0; k < ROWS; k++) // past the end, load the last one again: no branches between the loads
                v[k] = load_words<WIDTH>(x + min(row + k * stride, outputs - 1) * length + j);
            #pragma unroll
            for (int k = 0; k < ROWS; k++) state[k].take(v[k].lane, j);
        }
        #pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const State total = combine_lanes<LANES>(state[k]);
            if (threadIdx.x % LANES == 0 && row + k * stride < outputs) y[row + k * stride] = total.result();
        }
        row += ROWS * stride;
    }
}

// A warp per output of contiguous elements of any alignment.
KERNEL reduce_warps(Argument x, U *y, int64_t outputs, int64_t length) {
    wait_for_inputs();
    for (int64_t o = grid_index() / WARP; o < outputs; o += grid_size() / WARP) {
        State state = State::empty(), other = State::empty();
        contiguous(x + o * length, length, 0, threadIdx.x % WARP, WARP, state, other);
        state = combine_lanes<WARP>(Merge::of(state, other));
        if (threadIdx.x % WARP == 0) y[o] = state.result();
    }
}

// Takes elements r = begin, begin + step, ... < end of W neighbouring outputs, at offsets steps.next(). Four loads are
// in flight, or eight of single words.
template <int W, typename Place, typename Steps>
static __device__ __forceinline__ void take_steps(Place x, Steps steps, int64_t begin, int64_t end, int64_t step,
                                             State (&state)[W]) {
    constexpr int LOADS = W * sizeof(T) > 4 ? 4 : 8;
    int64_t r = begin;
    for (; r + (LOADS - 1) * step < end; r += LOADS * step) {
        Vector<T, W> v[LOADS];
        #pragma unroll
        for (int i = 0; i < LOADS; i++) v[i] = load<T, W>(x + steps.next());
        #pragma unroll
        for (int k = 0; k < W; k++) {
            T column[LOADS];
            #pragma unroll
            for (int i = 0; i < LOADS; i++) column[i] = v[i].lane[k];
            state[k].take(column, r, step);
        }
    }
    for (; r < end; r += step) {
        const Vector<T, W> v = load<T, W>(x + steps.next());
        #pragma unroll
        for (int k = 0; k < W; k++) state[k].take({v.lane[k]}, r);
    }
}

template <int W, typename Place>
static __device__ __forceinline__ void take_strided(Place x, const ReductionIndex &index, int64_t begin, int64_t end,
                                                    int64_t step, State (&state)[W]) {
    if (index.uniform())
        take_steps(x, UniformSteps{begin * index.stride(), step * index.stride()}, begin, end, step, state);
    else if (index.r0 * index.r1 == 1 && index.count() < (int64_t)1 << 31)
        take_steps(x, ReductionIndex::Steps<uint32_t, true>(index, begin, step), begin, end, step, state);
    else
        take_steps(x, ReductionIndex::Steps<int64_t, false>(index, begin, step), begin, end, step, state);
}

// Elements of the shortest contiguous run that a warp reads, and that a block reads where there is a run for each warp.
#define WARP_RUN 512
#define BLOCK_RUN 2048

// A block per part of an output whose reduced elements are contiguous.
static __device__ __forceinline__ State by_block(Argument x, const ReductionIndex &index, int64_t parts, int64_t chunk) {
    const int64_t o = blockIdx.x / parts, begin = blockIdx.x % parts * chunk;
    const int64_t end = min(begin + chunk, index.count()), run = index.r3;
    const auto from = x + index.start(o);
    State states[1] = {State::empty()}, other = State::empty();
    if (run < WARP_RUN && !index.uniform())
        take_strided(from, index, begin + threadIdx.x, end, blockDim.x, states);
    else {
        const bool enough = run < BLOCK_RUN && end - begin >= run * (THREADS / WARP);
        const int team = enough ? WARP : blockDim.x, thread = threadIdx.x % team;
        for (int64_t start = (begin / run + threadIdx.x / team) * run; start < end; start += blockDim.x / team * run) {
            const int64_t first = max(begin, start), last = min(end, start + run);
            contiguous(from + index.offset(first), last - first, first, thread, team, states[0], other);
        }
    }
    return over_block<Merge>(Merge::of(states[0], other));
}

KERNEL __launch_bounds__(THREADS, sizeof(T) == 4 ? 3 : 1) reduce_block(Argument x, U *y, LENGTHS) {
    wait_for_inputs();
    const State state = by_block(x, REDUCTION_INDEX, 1, r0 * r1 * r2 * r3);
    if (threadIdx.x == 0) y[blockIdx.x] = state.result();
}

KERNEL __launch_bounds__(THREADS, sizeof(T) == 4 ? 3 : 1)
reduce_block_parts(Argument x, U *y, LENGTHS, int64_t parts, int64_t chunk, char *scratch) {
    wait_for_inputs();
    const State state = by_block(x, REDUCTION_INDEX, parts, chunk);
    if (threadIdx.x == 0) SCRATCH_STATES(State, scratch)[blockIdx.x] = state;
}

// A block per part of LANES * WIDTH contiguous outputs: each thread reads WIDTH neighbouring outputs, and rows of LANES
// threads take the reduced elements round robin. A tree over the rows leaves the result in row 0. Returns whether the
// thread is in row 0 and in range.
static __device__ __forceinline__ bool by_columns(Argument x, const ReductionIndex &index, int64_t parts, int64_t chunk,
                                                  State (&state)[WIDTH], int64_t &first) {
    constexpr int ROWS_OF_THREADS = THREADS / LANES, HALF = ROWS_OF_THREADS > 1 ? ROWS_OF_THREADS / 2 : 1;
    __shared__ State found[HALF][LANES][WIDTH];
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    first = (blockIdx.x / parts * LANES + lane) * WIDTH;
    const int64_t begin = blockIdx.x % parts * chunk, end = min(begin + chunk, index.count());
    #pragma unroll
    for (int k = 0; k < WIDTH; k++) state[k] = State::empty();
    const bool in_range = first < index.outputs();
    if (in_range) take_strided(x + index.start(first), index, begin + row, end, ROWS_OF_THREADS, state);
    #pragma unroll
    for (int half = ROWS_OF_THREADS / 2; half > 0; half /= 2) {
        if (row >= half && row < 2 * half)
            #pragma unroll
            for (int k = 0; k < WIDTH; k++) found[row - half][lane][k] = state[k];
        __syncthreads();
        if (row < half)
            #pragma unroll
            for (int k = 0; k < WIDTH; k++) state[k] = Merge::of(state[k], found[row][lane][k]);
        __syncthreads();
    }
    return in_range && row == 0;
}

KERNEL __launch_bounds__(THREADS) reduce_columns(Argument x, U *y, LENGTHS) {
    wait_for_inputs();
    State state[WIDTH];
    int64_t first;
    if (!by_columns(x, REDUCTION_INDEX, 1, r0 * r1 * r2 * r3, state, first)) return;
    Vector<U, WIDTH> results;
    #pragma unroll
    for (int k = 0; k < WIDTH; k++) results.lane[k] = state[k].result();
    store(y, first, results);
}

KERNEL __launch_bounds__(THREADS, sizeof(T) == 8 ? 1 : 2)
reduce_columns_parts(Argument x, U *y, LENGTHS, int64_t parts, int64_t chunk, char *scratch) {
    wait_for_inputs();
    State state[WIDTH];
    int64_t first;
    if (by_columns(x, REDUCTION_INDEX, parts, chunk, state, first))
        #pragma unroll
        for (int k = 0; k < WIDTH; k++) SCRATCH_STATES(State, scratch)[(first + k) * parts + blockIdx.x % parts] = state[k];
}

// The second pass: a warp per output combines its parts.
KERNEL combine(Argument, U *y, int64_t outputs, int64_t parts, char *scratch) {
    wait_for_inputs();
    const State *partial = SCRATCH_STATES(State, scratch);
    for (int64_t o = grid_index() / WARP; o < outputs; o += grid_size() / WARP) {
        State state = State::empty();
        for (int64_t p = threadIdx.x % WARP; p < parts; p += WARP) state = Merge::of(state, partial[o * parts + p]);
        state = combine_lanes<WARP>(state);
        if (threadIdx.x % WARP == 0) y[o] = state.result();
    }
}
