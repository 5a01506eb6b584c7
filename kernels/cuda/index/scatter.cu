// scatter_add with many indices: y[o, l, i] = sum of ct[o, j, i] over the j with indices[j] == l, in the order of j.
//
// First the positions j are sorted by index: tiles of TILE positions, then pairs of sorted runs are merged, as in index/sort.cu.
// Then a thread per vector sums SEGMENT consecutive positions (sum_segments). If all positions of an index are in one segment,
// its sum is stored in y. Other sums go to scratch, and join_segments adds those of each index. The order of the additions
// follows from the indices alone, so each run gives the same bits.
#include "common/common.cuh"

// Rows that a thread loads before it adds any.
#define LOADS 4

#ifndef WIDTH
#define WIDTH 1
#endif

#define SCATTER_NUMBERS int64_t outer, int64_t length, int64_t inner, int64_t count, int64_t sorts

// An index in the upper 32 bits, its position in the lower ones: all are different, and their order is stable.
typedef uint64_t Entry;
static __device__ __forceinline__ uint32_t key_of(Entry entry) { return entry >> 32; }
static __device__ __forceinline__ uint32_t position_of(Entry entry) { return (uint32_t)entry; }

// Launch `sort` of the sort writes list sort % 2.
static __device__ __forceinline__ Entry *list_of(char *scratch, int64_t count, int64_t sort) {
    return SCRATCH_LISTS(Entry, scratch, count) + sort % 2 * count;
}

// Zeros for indices that do not occur.
KERNEL clear(const T *, const U *, T *y, SCATTER_NUMBERS, char *scratch, int *bad) {
    wait_for_inputs();
    for (int64_t i = grid_index(); i < outer * length * inner / WIDTH; i += grid_size())
        store(y, i * WIDTH, Vector<T, WIDTH>{});
}

// A block per tile, a thread per position. Indices out of range sort last.
KERNEL __launch_bounds__(TILE) sort_tiles(const T *, const U *indices, T *, SCATTER_NUMBERS, char *scratch, int *bad) {
    wait_for_inputs();
    __shared__ Entry tile[TILE];
    const int64_t begin = (int64_t)blockIdx.x * TILE, j = begin + threadIdx.x;
    const int size = (int)min(count - begin, (int64_t)TILE);
    Entry own = 0;
    if (j < count) {
        const int64_t index = (int64_t)indices[j];
        const bool valid = index >= 0 && index < length;
        if (!valid) *bad = 1;
        tile[threadIdx.x] = own = (Entry)(valid ? index : length) << 32 | (uint32_t)j;
    }
    __syncthreads();
    if (j >= count) return;
    int rank = 0;
    for (int i = 0; i < size; i++) rank += tile[i] < own;
    list_of(scratch, count, 0)[begin + rank] = own;
}

// Merges runs of `run` entries. A thread finds the place of an entry by binary search in the other run.
KERNEL merge_runs(const T *, const U *, T *, SCATTER_NUMBERS, int64_t sort, int64_t run, char *scratch, int *bad) {
    wait_for_inputs();
    const Entry *from = list_of(scratch, count, sort - 1);
    Entry *to = list_of(scratch, count, sort);
    for (int64_t i = grid_index(); i < count; i += grid_size()) {
        const int64_t own = i / run, begin = min((own ^ 1) * run, count);
        const Entry entry = from[i];
        int64_t low = begin, high = min(begin + run, count);
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (from[middle] < entry)
                low = middle + 1;
            else
                high = middle;
        }
        to[i - own % 2 * run + low - begin] = entry;
    }
}

// A thread computes the sums of a segment's indices, for an outer index and a vector of inner. If
// the first index began in an earlier segment, its sum goes to segments[segment][0]. If the last one continues in the next
// segment, its sum goes to segments[segment][1].
KERNEL sum_segments(const T *ct, const U *, T *y, SCATTER_NUMBERS, char *scratch, int *bad) {
    wait_for_inputs();
    const Entry *entries = list_of(scratch, count, sorts - 1);
    const auto key_at = [&](int64_t i) { return key_of(entries[i]); };
    const int64_t vectors = inner / WIDTH, segments = (count + SEGMENT - 1) / SEGMENT;
    for (int64_t g = grid_index(); g < outer * segments * vectors; g += grid_size()) {
        const int64_t i = g % vectors * WIDTH, segment = g / vectors % segments, o = g / vectors / segments;
        const int64_t begin = segment * SEGMENT, end = min(begin + SEGMENT, count);
        const bool began_before = begin > 0 && key_at(begin - 1) == key_at(begin);
        Vector<T, WIDTH> sum = {};
        bool first = began_before;
        for (int64_t from = begin; from < end; from += LOADS) {
            Vector<T, WIDTH> v[LOADS];
            #pragma unroll
            for (int k = 0; k < LOADS; k++)
                if (from + k < end) v[k] = load<T, WIDTH>(ct + (o * count + position_of(entries[from + k])) * inner + i);
            #pragma unroll
            for (int k = 0; k < LOADS; k++) {
                if (from + k >= end) continue;
                const uint32_t key = key_at(from + k);
                #pragma unroll
                for (int j = 0; j < WIDTH; j++) sum.lane[j] += v[k].lane[j];
                const bool at_end = from + k + 1 == end, goes_on = from + k + 1 < count && key_at(from + k + 1) == key;
                if (goes_on && !at_end) continue;
                T *segment_sums = SCRATCH_SEGMENTS(T, scratch, count) + ((o * segments + segment) * 2) * inner + i;
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
    const Entry *entries = list_of(scratch, count, sorts - 1);
    const auto key_at = [&](int64_t i) { return key_of(entries[i]); };
    const int64_t vectors = inner / WIDTH, segments = (count + SEGMENT - 1) / SEGMENT;
    for (int64_t g = grid_index(); g < outer * (segments - 1) * vectors; g += grid_size()) {
        const int64_t i = g % vectors * WIDTH, segment = g / vectors % (segments - 1), o = g / vectors / (segments - 1);
        const int64_t last = (segment + 1) * SEGMENT - 1;
        const uint32_t key = key_at(last);
        const bool began_before = segment > 0 && key_at(segment * SEGMENT - 1) == key;
        if (key_at(last + 1) != key || began_before || key >= length) continue;
        const T *parts = SCRATCH_SEGMENTS(T, scratch, count) + (o * segments * 2) * inner + i;
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
                same[k] = p + k < segments && key_at((p + k) * SEGMENT) == key;
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
