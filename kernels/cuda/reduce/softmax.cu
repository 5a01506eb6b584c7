// softmax and log_softmax of rows.
//
// A row that fits into the registers of its threads is read once (softmax_rows, softmax_team). Of a longer row, shared memory
// caches as many elements as fit; the others are read twice (softmax_long).
//
// x has elements of type S, which may be bfloat16 if rows of it are multiples of 16 bytes, except in softmax_rows.
#include "reduce/softmax.cuh"

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

typedef StoredAs<U>::type S;

// Vectors of a long row that a thread loads before it uses any.
#define LOADS (16 / (int)sizeof(T))

// Rows of up to TEAM * ITEMS * WIDTH elements, a multiple of WIDTH: each of TEAM threads holds ITEMS vectors. A team is
// lanes of a warp, or the block. Lanes of a warp process ROWS rows at once.
constexpr int ROWS = TEAM > WARP || ITEMS >= 4 ? 1 : 4 / ITEMS, UNIT = TEAM > WARP ? TEAM : WARP;

// Whether lanes past the end of a row compute too, with elements that add nothing, so that there is no branch between the
// exps. Not in float64: its exps are longer, and interleaving them needs registers, which lowers the occupancy.
constexpr bool UNIFORM = sizeof(T) == 4;

KERNEL __launch_bounds__(TEAM > WARP ? TEAM : 512) softmax_team(const S *x, T *y, int64_t rows, int64_t length) {
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
                    mine[r][k] = load_as<T, WIDTH>(x + (row + r * stride) * length + me + k * TEAM * WIDTH);
                else
                    #pragma unroll
                    for (int i = 0; i < WIDTH; i++) mine[r][k].lane[i] = -(T)INFINITY;
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            T top = -(T)INFINITY, sum = 0;
            #pragma unroll
            for (int k = 0; k < ITEMS; k++)
                #pragma unroll
                for (int i = 0; i < WIDTH; i++)
                    if (UNIFORM || me + k * TEAM * WIDTH < length) top = Max::of(top, mine[r][k].lane[i]);
            top = over_team<Max, TEAM>(top);
            #pragma unroll
            for (int k = 0; k < ITEMS; k++)
                #pragma unroll
                for (int i = 0; i < WIDTH; i++)
                    if (UNIFORM || me + k * TEAM * WIDTH < length) {
                        mine[r][k].lane[i] = unnormalized(mine[r][k].lane[i], top);
                        sum += term(mine[r][k].lane[i]);
                    }
            const Total total(over_team<Sum, TEAM>(sum));
            #pragma unroll
            for (int k = 0; k < ITEMS; k++) {
                #pragma unroll
                for (int i = 0; i < WIDTH; i++) mine[r][k].lane[i] = total.result(mine[r][k].lane[i]);
                if (me + k * TEAM * WIDTH < length && row + r * stride < rows)
                    store(y, (row + r * stride) * length + me + k * TEAM * WIDTH, mine[r][k]);
            }
        }
        row += ROWS * stride;
    }
}

// A thread per row of LENGTH elements, which are not a multiple of a vector. Loads and stores go through shared memory.
KERNEL __launch_bounds__(THREADS, 1) softmax_rows(const T *x, T *y, int64_t rows) {
    wait_for_inputs();
    __shared__ __align__(16) T held[THREADS * LENGTH];
    const int64_t first = (int64_t)blockIdx.x * THREADS, left = rows - first;
    copy_by_block<THREADS, THREADS * LENGTH>(x + first * LENGTH, held, left * LENGTH);
    __syncthreads();
    if (threadIdx.x < left) by_thread(held + threadIdx.x * LENGTH, held + threadIdx.x * LENGTH, 1);
    __syncthreads();
    copy_by_block<THREADS, THREADS * LENGTH>(held, y + first * LENGTH, left * LENGTH);
}

// Writes the results of the vectors first, first - blockDim.x, ... >= end of a long row from device or shared memory.
template <typename E> static __device__ __forceinline__ void write_vectors(
    T *to, const E *from, int64_t first, int64_t end, T top, const Total &total) {
    constexpr int WIDE = 16 / sizeof(T);
    for (int64_t i = first; i >= end; i -= LOADS * blockDim.x) {
        Vector<T, WIDE> v[LOADS];
        #pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (i - k * (int)blockDim.x >= end) v[k] = load_as<T, WIDE>(from + (i - k * (int)blockDim.x) * WIDE);
        #pragma unroll
        for (int k = 0; k < LOADS; k++) {
            #pragma unroll
            for (int j = 0; j < WIDE; j++) v[k].lane[j] = total.result(unnormalized(v[k].lane[j], top));
            if (i - k * (int)blockDim.x >= end) store(to, (i - k * (int)blockDim.x) * WIDE, v[k]);
        }
    }
}

// A block per row. Shared memory caches the first `cached` bytes of the aligned vectors.
KERNEL __launch_bounds__(512, sizeof(T) == 8 ? 1 : 2) softmax_long(const S *x, T *y, int64_t, int64_t length, int64_t cached) {
    wait_for_inputs();
    constexpr int WIDE = 16 / sizeof(T);
    extern __shared__ __align__(16) char memory[];
    T *row = (T *)memory;
    const S *from = x + blockIdx.x * length;
    T *to = y + blockIdx.x * length;
    const int64_t head = min(length, (int64_t)((16 - (uintptr_t)from % 16) % 16 / sizeof(S)));
    const int64_t vectors = (length - head) / WIDE, tail = head + vectors * WIDE;
    const int64_t in_memory = min(vectors, cached / 16);
    State state = State::empty();
    for (int64_t i = threadIdx.x; i < vectors; i += LOADS * blockDim.x) {
        T all[LOADS * WIDE];
        #pragma unroll
        for (int k = 0; k < LOADS; k++) {
            Vector<T, WIDE> v;
            #pragma unroll
            for (int j = 0; j < WIDE; j++) v.lane[j] = -(T)INFINITY;
            if (i + k * blockDim.x < vectors) v = load_as<T, WIDE>(from + head + (i + k * blockDim.x) * WIDE);
            #pragma unroll
            for (int j = 0; j < WIDE; j++) all[k * WIDE + j] = v.lane[j];
        }
        #pragma unroll
        for (int k = 0; k < LOADS; k++) {
            Vector<T, WIDE> v;
            #pragma unroll
            for (int j = 0; j < WIDE; j++) v.lane[j] = all[k * WIDE + j];
            if (i + k * blockDim.x < in_memory) store(row, (i + k * blockDim.x) * WIDE, v);
        }
        state.take(all, 0);
    }
    for (int64_t i = threadIdx.x; i < head; i += blockDim.x) state.take(load_as<T, 1>(from + i).lane, 0);
    for (int64_t i = tail + threadIdx.x; i < length; i += blockDim.x) state.take(load_as<T, 1>(from + i).lane, 0);
    state = over_block<Merge>(state);
    const T top = state.top;
    const Total total(state.total);
    // The end first: it was read last, and may still be in L2.
    write_vectors(to + head, from + head, vectors - 1 - threadIdx.x, in_memory, top, total);
    write_vectors(to + head, row, in_memory - 1 - threadIdx.x, 0, top, total);
    for (int64_t i = threadIdx.x; i < head; i += blockDim.x) to[i] = total.result(unnormalized((T)from[i], top));
    for (int64_t i = tail + threadIdx.x; i < length; i += blockDim.x) to[i] = total.result(unnormalized((T)from[i], top));
}
