// Positions of the first `count` elements of each row of x (rows, length) in a stable order. NaN is larger than every number.
//
// The first launch sorts tiles of TILE neighbouring positions. Each further launch merges pairs of sorted runs into one. A
// thread finds where one position goes: the number of elements that go before its element. It counts them in its tile, and
// finds them in the other run by binary search. Launch i writes list i % 2 in the scratch, the last launch writes y.
#include "common/common.cuh"

#ifndef TILE
#define TILE 256
#endif
#ifndef DESCENDING
#define DESCENDING 0
#endif

static __device__ __forceinline__ bool goes_before(T a, T b) {
    const T low = DESCENDING ? b : a, high = DESCENDING ? a : b;
    return low < high || (high != high && low == low);
}

// Where a launch writes: a list of all positions, or the first `count` of each row.
struct Output {
    int64_t *list, width;

    __device__ __forceinline__ Output(int64_t *y, char *scratch, int64_t rows, int64_t length, int64_t count, int64_t launch,
                                      bool last)
        : list(last ? y : SCRATCH_LISTS(int64_t, scratch) + launch % 2 * rows * length), width(last ? count : length) {}
    __device__ __forceinline__ void put(int64_t row, int64_t at, int64_t position) const {
        if (at < width) list[row * width + at] = position;
    }
};

// A block per tile, a thread per position.
KERNEL __launch_bounds__(TILE)
    sort_tiles(const T *x, int64_t *y, int64_t rows, int64_t length, int64_t count, int64_t launches, char *scratch) {
    wait_for_inputs();
    __shared__ T tile[TILE];
    const Output output(y, scratch, rows, length, count, 0, launches == 1);
    const int64_t tiles = (length + TILE - 1) / TILE;
    for (int64_t t = blockIdx.x; t < rows * tiles; t += gridDim.x) {
        const int64_t row = t / tiles, begin = t % tiles * TILE;
        const int mine = threadIdx.x, size = (int)min(length - begin, (int64_t)TILE);
        if (mine < size) tile[mine] = x[row * length + begin + mine];
        __syncthreads();
        if (mine < size) {
            const T value = tile[mine];
            int rank = 0;
            for (int i = 0; i < mine; i++) rank += !goes_before(value, tile[i]);
            for (int i = mine + 1; i < size; i++) rank += goes_before(tile[i], value);
            output.put(row, begin + rank, begin + mine);
        }
        __syncthreads();
    }
}

// Merges runs of `run` positions. Positions that are not among the first `count` of their run are left out.
KERNEL merge_runs(const T *x, int64_t *y, int64_t rows, int64_t length, int64_t count, int64_t run, int64_t launch,
                  int64_t launches, char *scratch) {
    wait_for_inputs();
    const int64_t *from = SCRATCH_LISTS(int64_t, scratch) + (launch - 1) % 2 * rows * length;
    const Output output(y, scratch, rows, length, count, launch, launch + 1 == launches);
    for (int64_t k = grid_index(); k < rows * length; k += grid_size()) {
        const int64_t row = k / length, i = k % length, own = i / run, other = own ^ 1;
        if (i - own * run >= count) continue;
        const int64_t *order = from + row * length;
        const T *values = x + row * length, value = values[order[i]];
        const bool left = own < other;
        const int64_t begin = min(other * run, length);
        int64_t low = begin, high = min(begin + min(run, count), length);
        while (low < high) { // the first position in the other run that does not go before this one
            const int64_t middle = (low + high) / 2;
            const T opposite = values[order[middle]];
            if (left ? goes_before(opposite, value) : !goes_before(value, opposite))
                low = middle + 1;
            else
                high = middle;
        }
        output.put(row, i - (left ? 0 : run) + low - begin, order[i]);
    }
}
