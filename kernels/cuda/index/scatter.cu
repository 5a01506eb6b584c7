// scatter_add with many indices: y[o, l, i] = sum of ct[o, j, i] over the j with indices[j] == l, in the order of j.
//
// A stable radix sort orders the positions j by index, DIGITS bits per pass: each block counts the digits of its chunk
// (sort_count), one block computes prefix sums of the counts (sort_offsets), and each block moves its positions
// (sort_place). Then a thread per vector sums SEGMENT consecutive positions (sum_segments). If all positions of an index
// are in one segment, its sum is stored in y. Other sums go to scratch, and join_segments adds those of each index. The
// order of the additions follows from the indices alone, so each run gives the same bits.
#include "common/collectives.cuh"

#define DIGITS 8 // bits of a digit
#define VALUES (1 << DIGITS)
#define THREADS 256
#define WARPS (THREADS / WARP)
// Rows that a thread loads before it adds any.
#define LOADS 4

#ifndef WIDTH
#define WIDTH 1
#endif
// Number of the sort, from 0. The first one reads `indices`; position j is j.
#ifndef PASS
#define PASS 0
#endif
// Positions of a segment.
#ifndef SEGMENT
#define SEGMENT 32
#endif

#define SCATTER_NUMBERS int64_t outer, int64_t length, int64_t inner, int64_t count, int64_t blocks, int64_t chunk

// The scratch memory: two buffers of keys and of positions, which a pass reads and writes alternately; counts; then sums of
// segments.
struct Scratch {
    uint32_t *key[2], *position[2], *counts;
    T *segments;

    __device__ __forceinline__ Scratch(char *scratch, int64_t count, int64_t blocks) {
        key[0] = SCRATCH_KEYS(uint32_t, scratch, count, blocks), key[1] = SCRATCH_NEXT_KEYS(uint32_t, scratch, count, blocks);
        position[0] = SCRATCH_POSITIONS(uint32_t, scratch, count, blocks);
        position[1] = SCRATCH_NEXT_POSITIONS(uint32_t, scratch, count, blocks);
        counts = SCRATCH_COUNTS(uint32_t, scratch, count, blocks);
        segments = SCRATCH_SEGMENTS(T, scratch, count, blocks);
    }
};

// Indices out of range sort last.
static __device__ __forceinline__ uint32_t key_at(const U *indices, const Scratch &memory, int64_t j, int64_t length,
                                                  int *bad) {
    if (PASS > 0) return memory.key[PASS % 2][j];
    const int64_t index = (int64_t)indices[j];
    if (index >= 0 && index < length) return (uint32_t)index;
    *bad = 1;
    return (uint32_t)length;
}

static __device__ __forceinline__ int digit(uint32_t key) { return key >> (PASS * DIGITS) & (VALUES - 1); }

// Zeros for indices that do not occur.
KERNEL clear(const T *, const U *, T *y, SCATTER_NUMBERS, char *scratch, int *bad) {
    wait_for_inputs();
    for (int64_t i = grid_index(); i < outer * length * inner / WIDTH; i += grid_size())
        store(y, i * WIDTH, Vector<T, WIDTH>{});
}

KERNEL __launch_bounds__(THREADS) sort_count(const T *, const U *indices, T *, SCATTER_NUMBERS, char *scratch, int *bad) {
    wait_for_inputs();
    __shared__ int found[VALUES];
    const Scratch memory(scratch, count, blocks);
    for (int d = threadIdx.x; d < VALUES; d += THREADS) found[d] = 0;
    __syncthreads();
    const int64_t begin = blockIdx.x * chunk, end = min(begin + chunk, count);
    for (int64_t j = begin + threadIdx.x; j < end; j += THREADS)
        atomicAdd(&found[digit(key_at(indices, memory, j, length, bad))], 1); // integers: the order does not matter
    __syncthreads();
    for (int d = threadIdx.x; d < VALUES; d += THREADS) memory.counts[d * blocks + blockIdx.x] = found[d];
}

// Exclusive prefix sum of the counts, by one block.
KERNEL __launch_bounds__(1024) sort_offsets(const T *, const U *, T *, SCATTER_NUMBERS, char *scratch, int *bad) {
    wait_for_inputs();
    __shared__ uint32_t of_warp[WARP];
    uint32_t *counts = Scratch(scratch, count, blocks).counts;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t all = VALUES * blocks;
    uint32_t carry = 0;
    for (int64_t begin = 0; begin < all; begin += 4 * blockDim.x) {
        const int64_t i = begin + 4 * threadIdx.x; // the total is a multiple of 4
        Vector<uint32_t, 4> v = {};
        if (i < all) v = load<uint32_t, 4>(counts + i);
        const uint32_t mine = v.lane[0] + v.lane[1] + v.lane[2] + v.lane[3];
        uint32_t sum = mine;
        #pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            const uint32_t before = __shfl_up_sync(FULL_MASK, sum, distance);
            if (lane >= distance) sum += before;
        }
        if (lane == WARP - 1) of_warp[warp] = sum;
        __syncthreads();
        uint32_t next = carry + sum - mine;
        for (int w = 0; w < blockDim.x / WARP; w++) {
            if (w < warp) next += of_warp[w];
            carry += of_warp[w];
        }
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t own = v.lane[k];
            v.lane[k] = next;
            next += own;
        }
        if (i < all) store(counts, i, v);
        __syncthreads();
    }
}

// Each warp sorts a range of the block's chunk. The counts of the ranges before it give the first target of each digit. Within
// the warp, the rank of a key is the number of lower lanes with the same digit.
KERNEL __launch_bounds__(THREADS) sort_place(const T *, const U *indices, T *, SCATTER_NUMBERS, char *scratch, int *bad) {
    wait_for_inputs();
    __shared__ uint32_t next[WARPS][VALUES];
    const Scratch memory(scratch, count, blocks);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t range = (chunk + WARPS - 1) / WARPS, last = min((blockIdx.x + 1) * chunk, count);
    const int64_t begin = min(blockIdx.x * chunk + warp * range, last), end = min(begin + range, last);
    for (int i = threadIdx.x; i < WARPS * VALUES; i += THREADS) next[i / VALUES][i % VALUES] = 0;
    __syncthreads();
    for (int64_t j = begin + lane; j < end; j += WARP)
        atomicAdd(&next[warp][digit(key_at(indices, memory, j, length, bad))], 1);
    __syncthreads();
    for (int d = threadIdx.x; d < VALUES; d += THREADS) {
        uint32_t at = memory.counts[d * blocks + blockIdx.x];
        for (int w = 0; w < WARPS; w++) {
            const uint32_t own = next[w][d];
            next[w][d] = at;
            at += own;
        }
    }
    __syncthreads();
    for (int64_t first = begin; first < end; first += WARP) {
        const int64_t j = first + lane;
        const bool in_range = j < end;
        const uint32_t key = in_range ? key_at(indices, memory, j, length, bad) : 0;
        const int d = in_range ? digit(key) : VALUES; // lanes past the end match each other only
        const unsigned same = __match_any_sync(FULL_MASK, d), before = same & ((1u << lane) - 1);
        const uint32_t at = in_range ? next[warp][d] + __popc(before) : 0;
        __syncwarp();
        if (in_range && before == 0) next[warp][d] += __popc(same);
        __syncwarp();
        if (in_range) {
            memory.key[(PASS + 1) % 2][at] = key;
            memory.position[(PASS + 1) % 2][at] = PASS > 0 ? memory.position[PASS % 2][j] : (uint32_t)j;
        }
    }
}

// PASS is the number of sorts. A thread computes the sums of a segment's indices, for an outer index and a vector of inner. If
// the first index began in an earlier segment, its sum goes to segments[segment][0]. If the last one continues in the next
// segment, its sum goes to segments[segment][1].
KERNEL sum_segments(const T *ct, const U *, T *y, SCATTER_NUMBERS, char *scratch, int *bad) {
    wait_for_inputs();
    const Scratch memory(scratch, count, blocks);
    const uint32_t *keys = memory.key[PASS % 2], *positions = memory.position[PASS % 2];
    const int64_t vectors = inner / WIDTH, segments = (count + SEGMENT - 1) / SEGMENT;
    for (int64_t g = grid_index(); g < outer * segments * vectors; g += grid_size()) {
        const int64_t i = g % vectors * WIDTH, segment = g / vectors % segments, o = g / vectors / segments;
        const int64_t begin = segment * SEGMENT, end = min(begin + SEGMENT, count);
        const bool began_before = begin > 0 && keys[begin - 1] == keys[begin];
        Vector<T, WIDTH> sum = {};
        bool first = began_before;
        for (int64_t from = begin; from < end; from += LOADS) {
            Vector<T, WIDTH> v[LOADS];
            #pragma unroll
            for (int k = 0; k < LOADS; k++)
                if (from + k < end) v[k] = load<T, WIDTH>(ct + (o * count + positions[from + k]) * inner + i);
            #pragma unroll
            for (int k = 0; k < LOADS; k++) {
                if (from + k >= end) continue;
                const uint32_t key = keys[from + k];
                #pragma unroll
                for (int j = 0; j < WIDTH; j++) sum.lane[j] += v[k].lane[j];
                const bool at_end = from + k + 1 == end, goes_on = from + k + 1 < count && keys[from + k + 1] == key;
                if (goes_on && !at_end) continue;
                T *segment_sums = memory.segments + ((o * segments + segment) * 2) * inner + i;
                if (first)
                    store(segment_sums, 0, sum);
                else if (goes_on)
                    store(segment_sums, inner, sum);
                else if (key < length)
                    store(y, (o * length + key) * inner + i, sum);
                sum = {};
                first = false;
            }
        }
    }
}

// Indices that begin in a segment and continue in the next: adds their segments in order.
KERNEL join_segments(const T *, const U *, T *y, SCATTER_NUMBERS, char *scratch, int *bad) {
    wait_for_inputs();
    const Scratch memory(scratch, count, blocks);
    const uint32_t *keys = memory.key[PASS % 2];
    const int64_t vectors = inner / WIDTH, segments = (count + SEGMENT - 1) / SEGMENT;
    for (int64_t g = grid_index(); g < outer * (segments - 1) * vectors; g += grid_size()) {
        const int64_t i = g % vectors * WIDTH, segment = g / vectors % (segments - 1), o = g / vectors / (segments - 1);
        const int64_t last = (segment + 1) * SEGMENT - 1;
        const uint32_t key = keys[last];
        const bool began_before = segment > 0 && keys[segment * SEGMENT - 1] == key;
        if (keys[last + 1] != key || began_before || key >= length) continue;
        const T *parts = memory.segments + (o * segments * 2) * inner + i;
        const Vector<T, WIDTH> own = load<T, WIDTH>(parts + (segment * 2 + 1) * inner);
        TotalOf<T>::type total[WIDTH];
        #pragma unroll
        for (int j = 0; j < WIDTH; j++) total[j] = own.lane[j];
        bool more = true;
        for (int64_t p = segment + 1; more; p += LOADS) {
            Vector<T, WIDTH> v[LOADS];
            bool same[LOADS];
            #pragma unroll
            for (int k = 0; k < LOADS; k++) {
                same[k] = p + k < segments && keys[(p + k) * SEGMENT] == key;
                if (p + k < segments) v[k] = load<T, WIDTH>(parts + (p + k) * 2 * inner);
            }
            #pragma unroll
            for (int k = 0; k < LOADS; k++) {
                more = more && same[k];
                #pragma unroll
                for (int j = 0; j < WIDTH; j++) total[j] += more ? v[k].lane[j] : (T)0;
            }
        }
        Vector<T, WIDTH> sum;
        #pragma unroll
        for (int j = 0; j < WIDTH; j++) sum.lane[j] = (T)total[j];
        store(y, (o * length + key) * inner + i, sum);
    }
}
