// scatter_add of many positions: y[o, l, i] = sum of ct[o, j, i] over the j with indices[j] == l, in the order of j.
//
// The positions are sorted by index, stably, DIGITS bits at a time: each block counts the digits of its chunk
// (sort_count), one block adds the counts up (sort_offsets), and each block puts its positions where they belong
// (sort_place). Then PIECE neighbouring positions of the order are added up by one block (sum_pieces): what begins and
// ends among them is a result, the rest goes to scratch, and the block where an index begins adds its pieces up
// (join_pieces). What is added to what follows from the indices alone, so the bits are the same every time.
#include "common/divisor.cuh"

#define DIGITS 8
#define VALUES (1 << DIGITS)
#define THREADS 256
#define WARPS (THREADS / WARP)
#define PIECE 32
// Rows that a thread reads before it adds up any.
#define UNDER_WAY 4

#ifndef WIDTH
#define WIDTH 1
#endif
// The first sort reads `indices`, and the positions are their numbers.
#ifndef PASS
#define PASS 0
#endif

#define NUMBERS                                                                                                        \
    int64_t outer, int64_t length, int64_t inner, int64_t count, int64_t blocks, int64_t chunk, char *scratch, int *bad

// What lies in scratch: keys and positions twice, the sorts' source and target in turns; the counts; the pieces.
struct Memory {
    uint32_t *key[2], *position[2], *counts;
    T *pieces;

    __device__ __forceinline__ Memory(char *scratch, int64_t count, int64_t blocks)
    {
        const int64_t each = (count + 3) / 4 * 4;
        uint32_t *at = (uint32_t *)scratch;
        key[0] = at, key[1] = at + each, position[0] = at + 2 * each, position[1] = at + 3 * each;
        counts = at + 4 * each;
        pieces = (T *)(counts + VALUES * blocks);
    }
};

// Indices out of range sort last.
static __device__ __forceinline__ uint32_t key_at(const U *indices, const Memory &memory, int64_t j, int64_t length,
                                                  int *bad)
{
    if (PASS > 0)
        return memory.key[PASS % 2][j];
    const int64_t index = (int64_t)indices[j];
    if (index >= 0 && index < length)
        return (uint32_t)index;
    *bad = 1;
    return (uint32_t)length;
}

static __device__ __forceinline__ int digit(uint32_t key) { return key >> (PASS * DIGITS) & (VALUES - 1); }

// What no position names is 0.
KERNEL clear(const T *, const U *, T *y, NUMBERS)
{
    wait_for_inputs();
    for (int64_t i = grid_index(); i < outer * length * inner / WIDTH; i += grid_size())
        store(y, i * WIDTH, Vector<T, WIDTH>{});
}

KERNEL __launch_bounds__(THREADS) sort_count(const T *, const U *indices, T *, NUMBERS)
{
    wait_for_inputs();
    __shared__ int found[VALUES];
    const Memory memory(scratch, count, blocks);
    for (int d = threadIdx.x; d < VALUES; d += THREADS)
        found[d] = 0;
    __syncthreads();
    const int64_t begin = blockIdx.x * chunk, end = min(begin + chunk, count);
    for (int64_t j = begin + threadIdx.x; j < end; j += THREADS)
        atomicAdd(&found[digit(key_at(indices, memory, j, length, bad))], 1); // whole numbers: the order does not matter
    __syncthreads();
    for (int d = threadIdx.x; d < VALUES; d += THREADS)
        memory.counts[d * blocks + blockIdx.x] = found[d];
}

// Each count becomes the sum of all before it; one block.
KERNEL __launch_bounds__(1024) sort_offsets(const T *, const U *, T *, NUMBERS)
{
    wait_for_inputs();
    __shared__ uint32_t of_warp[WARP];
    uint32_t *counts = Memory(scratch, count, blocks).counts;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t all = VALUES * blocks;
    uint32_t carry = 0;
    for (int64_t begin = 0; begin < all; begin += 4 * blockDim.x) {
        const int64_t i = begin + 4 * threadIdx.x; // there are a multiple of 4
        Vector<uint32_t, 4> v = {};
        if (i < all)
            v = load<uint32_t, 4>(counts + i);
        const uint32_t mine = v.lane[0] + v.lane[1] + v.lane[2] + v.lane[3];
        uint32_t sum = mine;
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            const uint32_t before = __shfl_up_sync(FULL_MASK, sum, distance);
            if (lane >= distance)
                sum += before;
        }
        if (lane == WARP - 1)
            of_warp[warp] = sum;
        __syncthreads();
        uint32_t next = carry + sum - mine;
        for (int w = 0; w < blockDim.x / WARP; w++) {
            if (w < warp)
                next += of_warp[w];
            carry += of_warp[w];
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t own = v.lane[k];
            v.lane[k] = next;
            next += own;
        }
        if (i < all)
            store(counts, i, v);
        __syncthreads();
    }
}

// Each warp has a stretch of the block's chunk: the counts of all stretches say where its keys of a digit go, and a
// key's place among those of the same digit in the warp is the number of lanes before it.
KERNEL __launch_bounds__(THREADS) sort_place(const T *, const U *indices, T *, NUMBERS)
{
    wait_for_inputs();
    __shared__ uint32_t next[WARPS][VALUES];
    const Memory memory(scratch, count, blocks);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t stretch = (chunk + WARPS - 1) / WARPS, last = min((blockIdx.x + 1) * chunk, count);
    const int64_t begin = min(blockIdx.x * chunk + warp * stretch, last), end = min(begin + stretch, last);
    for (int i = threadIdx.x; i < WARPS * VALUES; i += THREADS)
        next[0][i] = 0;
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
        const bool real = j < end;
        const uint32_t key = real ? key_at(indices, memory, j, length, bad) : 0;
        const int d = real ? digit(key) : VALUES; // lanes past the end are equal to one another only
        const unsigned same = __match_any_sync(FULL_MASK, d), before = same & ((1u << lane) - 1);
        const uint32_t at = real ? next[warp][d] + __popc(before) : 0;
        __syncwarp();
        if (real && before == 0)
            next[warp][d] += __popc(same);
        __syncwarp();
        if (real) {
            memory.key[(PASS + 1) % 2][at] = key;
            memory.position[(PASS + 1) % 2][at] = PASS > 0 ? memory.position[PASS % 2][j] : (uint32_t)j;
        }
    }
}

// PASS is now the number of sorts. Of each piece, outer index and vector of inner: the sums of its indices. Those of the
// first one go to pieces[piece][0] if it began before, those of the last one to pieces[piece][1] if it goes on.
KERNEL sum_pieces(const T *ct, const U *, T *y, NUMBERS)
{
    wait_for_inputs();
    const Memory memory(scratch, count, blocks);
    const uint32_t *keys = memory.key[PASS % 2], *positions = memory.position[PASS % 2];
    const int64_t vectors = inner / WIDTH, pieces = (count + PIECE - 1) / PIECE;
    for (int64_t g = grid_index(); g < outer * pieces * vectors; g += grid_size()) {
        const int64_t i = g % vectors * WIDTH, piece = g / vectors % pieces, o = g / vectors / pieces;
        const int64_t begin = piece * PIECE, end = min(begin + PIECE, count);
        const bool began_before = begin > 0 && keys[begin - 1] == keys[begin];
        Vector<T, WIDTH> sum = {};
        bool first = began_before;
        for (int64_t from = begin; from < end; from += UNDER_WAY) {
            Vector<T, WIDTH> v[UNDER_WAY];
#pragma unroll
            for (int k = 0; k < UNDER_WAY; k++)
                if (from + k < end)
                    v[k] = load<T, WIDTH>(ct + (o * count + positions[from + k]) * inner + i);
#pragma unroll
            for (int k = 0; k < UNDER_WAY; k++) {
                if (from + k >= end)
                    continue;
                const uint32_t key = keys[from + k];
#pragma unroll
                for (int j = 0; j < WIDTH; j++)
                    sum.lane[j] += v[k].lane[j];
                const bool at_end = from + k + 1 == end, goes_on = from + k + 1 < count && keys[from + k + 1] == key;
                if (goes_on && !at_end)
                    continue;
                T *pieces_of = memory.pieces + ((o * pieces + piece) * 2) * inner + i;
                if (first)
                    store(pieces_of, 0, sum);
                else if (goes_on)
                    store(pieces_of, inner, sum);
                else if (key < length)
                    store(y, (o * length + key) * inner + i, sum);
                sum = {};
                first = false;
            }
        }
    }
}

// Indices that begin in a piece and go on in the next one: their pieces in order.
KERNEL join_pieces(const T *, const U *, T *y, NUMBERS)
{
    wait_for_inputs();
    const Memory memory(scratch, count, blocks);
    const uint32_t *keys = memory.key[PASS % 2];
    const int64_t vectors = inner / WIDTH, pieces = (count + PIECE - 1) / PIECE;
    for (int64_t g = grid_index(); g < outer * (pieces - 1) * vectors; g += grid_size()) {
        const int64_t i = g % vectors * WIDTH, piece = g / vectors % (pieces - 1), o = g / vectors / (pieces - 1);
        const int64_t last = (piece + 1) * PIECE - 1;
        const uint32_t key = keys[last];
        const bool began_before = piece > 0 && keys[piece * PIECE - 1] == key;
        if (keys[last + 1] != key || began_before || key >= length)
            continue;
        const T *parts = memory.pieces + (o * pieces * 2) * inner + i;
        Vector<T, WIDTH> sum = load<T, WIDTH>(parts + (piece * 2 + 1) * inner);
        bool more = true;
        for (int64_t p = piece + 1; more; p += UNDER_WAY) {
            Vector<T, WIDTH> v[UNDER_WAY];
            bool same[UNDER_WAY];
#pragma unroll
            for (int k = 0; k < UNDER_WAY; k++) {
                same[k] = p + k < pieces && keys[(p + k) * PIECE] == key;
                if (p + k < pieces)
                    v[k] = load<T, WIDTH>(parts + (p + k) * 2 * inner);
            }
#pragma unroll
            for (int k = 0; k < UNDER_WAY; k++) {
                more = more && same[k];
#pragma unroll
                for (int j = 0; j < WIDTH; j++)
                    sum.lane[j] += more ? v[k].lane[j] : (T)0;
            }
        }
        store(y, (o * length + key) * inner + i, sum);
    }
}
