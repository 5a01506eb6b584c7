// Running sums along an axis, from its end with `reverse`. A small number of rows or columns is split into parts: the first
// launch computes the sum of each part (cumsum_sums, cumsum_column_sums), the second the running sums, which begin with the
// sum of the earlier parts.
#include "common/collectives.cuh"

typedef TotalOf<U>::type Total;

#define THREADS 256
// Neighbouring elements of a thread; elements of a block.
#define ITEMS 8
#define STEP (THREADS * ITEMS)

// Maps summand k to its position in a row or column.
struct Position {
    int64_t length;
    bool reverse;

    __device__ __forceinline__ int64_t operator()(int64_t k) const { return reverse ? length - 1 - k : k; }
};

// The sum of the values of the threads before this one in the block; `all` becomes the sum over the block.
static __device__ __forceinline__ U exclusive_sum(U value, U &all) {
    __shared__ U of_warp[THREADS / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    U sum = value;
    #pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        const U before = __shfl_up_sync(FULL_MASK, sum, distance);
        if (lane >= distance) sum += before;
    }
    const U within = __shfl_up_sync(FULL_MASK, sum, 1);
    __syncthreads();
    if (lane == WARP - 1) of_warp[warp] = sum;
    __syncthreads();
    U earlier = 0;
    all = 0;
    #pragma unroll
    for (int w = 0; w < THREADS / WARP; w++) {
        if (w < warp) earlier += of_warp[w];
        all += of_warp[w];
    }
    return lane > 0 ? earlier + within : earlier;
}

// The sum of the parts before `part` of the same row or column, in order.
static __device__ __forceinline__ Total sum_of_parts_before(const Total *sums, int64_t part) {
    Total sum = 0;
    #pragma unroll 16
    for (int64_t p = 0; p < part; p++) sum += sums[p];
    return sum;
}

// A block per part of a row. Elements pass through shared memory, so that global loads and stores are coalesced while
// each thread adds ITEMS consecutive elements.
template <bool WRITE>
static __device__ __forceinline__ Total by_block(
    const T *x, U *y, Position position, int64_t begin, int64_t end, Total carry) {
    __shared__ U tile[STEP + STEP / WARP];
    auto slot = [](int i) { return i + i / WARP; }; // the padding avoids bank conflicts
    for (int64_t start = begin; start < end; start += STEP) {
        T held[ITEMS];
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            const int64_t at = start + threadIdx.x + k * THREADS;
            held[k] = at < end ? x[position(at)] : (T)0;
        }
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) tile[slot(threadIdx.x + k * THREADS)] = (U)held[k];
        __syncthreads();
        U mine[ITEMS], sum = 0, all;
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            sum += tile[slot(threadIdx.x * ITEMS + k)];
            mine[k] = sum;
        }
        const Total earlier = carry + exclusive_sum(sum, all);
        carry += all;
        if constexpr (WRITE) {
            #pragma unroll
            for (int k = 0; k < ITEMS; k++) tile[slot(threadIdx.x * ITEMS + k)] = (U)(earlier + mine[k]);
            __syncthreads();
            #pragma unroll
            for (int k = 0; k < ITEMS; k++) {
                const int64_t at = start + threadIdx.x + k * THREADS;
                if (at < end) y[position(at)] = tile[slot(threadIdx.x + k * THREADS)];
            }
        }
    }
    return carry;
}

#define NUMBERS int64_t outer, int64_t length, int64_t inner, int64_t reverse, int64_t parts, int64_t chunk, char *scratch

KERNEL __launch_bounds__(THREADS) cumsum_sums(const T *x, U *, NUMBERS) {
    wait_for_inputs();
    const int64_t row = blockIdx.x / parts, begin = blockIdx.x % parts * chunk;
    const Total sum = by_block<false>(x + row * length, (U *)0, Position{length, reverse != 0}, begin, min(begin + chunk, length), 0);
    if (threadIdx.x == 0) SCRATCH_SUMS(Total, scratch)[blockIdx.x] = sum;
}

KERNEL __launch_bounds__(THREADS) cumsum_block(const T *x, U *y, NUMBERS) {
    wait_for_inputs();
    const int64_t row = blockIdx.x / parts, part = blockIdx.x % parts, begin = part * chunk;
    const Total carry = sum_of_parts_before(SCRATCH_SUMS(Total, scratch) + row * parts, part);
    by_block<true>(x + row * length, y + row * length, Position{length, reverse != 0}, begin, min(begin + chunk, length), carry);
}

// A thread per part of a column, of stride `inner`. Neighbouring threads have neighbouring columns.
template <bool WRITE>
static __device__ __forceinline__ Total by_thread(const T *__restrict__ x, U *__restrict__ y, Position position, int64_t inner,
                                                  int64_t begin, int64_t end, Total total) {
    // The next elements are loaded while these are added.
    const int64_t step = position.reverse ? -inner : inner;
    auto read = [&](T(&held)[ITEMS], int64_t k) {
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) held[i] = k + i < end ? x[position(k) * inner + i * step] : (T)0;
    };
    T next[ITEMS];
    read(next, begin);
    for (int64_t k = begin; k < end; k += ITEMS) {
        T held[ITEMS];
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) held[i] = next[i];
        read(next, k + ITEMS);
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            total += held[i];
            if (WRITE && k + i < end) y[position(k) * inner + i * step] = (U)total;
        }
    }
    return total;
}

// The part of thread t of outer * parts * inner.
struct Part {
    int64_t start, begin, end, sums, part;

    __device__ __forceinline__ Part(int64_t t, int64_t length, int64_t inner, int64_t parts, int64_t chunk) {
        const int64_t column = t % inner, o = t / inner / parts;
        part = t / inner % parts;
        start = o * length * inner + column, begin = part * chunk, end = min(begin + chunk, length);
        sums = (o * inner + column) * parts;
    }
};

KERNEL cumsum_column_sums(const T *x, U *, NUMBERS) {
    wait_for_inputs();
    for (int64_t t = grid_index(); t < outer * parts * inner; t += grid_size()) {
        const Part at(t, length, inner, parts, chunk);
        SCRATCH_SUMS(Total, scratch)[at.sums + at.part] =
            by_thread<false>(x + at.start, (U *)0, Position{length, reverse != 0}, inner, at.begin, at.end, 0);
    }
}

KERNEL cumsum_columns(const T *x, U *y, NUMBERS) {
    wait_for_inputs();
    for (int64_t t = grid_index(); t < outer * parts * inner; t += grid_size()) {
        const Part at(t, length, inner, parts, chunk);
        const Total carry = sum_of_parts_before(SCRATCH_SUMS(Total, scratch) + at.sums, at.part);
        by_thread<true>(x + at.start, y + at.start, Position{length, reverse != 0}, inner, at.begin, at.end, carry);
    }
}
