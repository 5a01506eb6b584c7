// Positions of the elements of each row of x (rows, length) in a stable order. NaN is larger than every number.
//
// The first launch sorts tiles of TILE neighbouring positions. Each further launch merges pairs of sorted runs into one. A
// thread finds the target of one position: the number of elements that go before its own, in its tile or in the other run.
// The launches write y and the scratch memory alternately, the last one writes y.
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

// A block per tile, a thread per position. `merges` is the number of launches that follow.
KERNEL __launch_bounds__(TILE) sort_tiles(const T *x, int64_t *y, int64_t rows, int64_t length, int64_t merges, char *scratch) {
    wait_for_inputs();
    __shared__ T tile[TILE];
    int64_t *to = merges % 2 ? (int64_t *)scratch : y;
    const int64_t tiles = (length + TILE - 1) / TILE;
    for (int64_t t = blockIdx.x; t < rows * tiles; t += gridDim.x) {
        const int64_t row = t / tiles, begin = t % tiles * TILE;
        const int count = (int)min(length - begin, (int64_t)TILE), mine = threadIdx.x;
        if (mine < count) tile[mine] = x[row * length + begin + mine];
        __syncthreads();
        if (mine < count) {
            const T value = tile[mine];
            int rank = 0;
            for (int i = 0; i < mine; i++) rank += !goes_before(value, tile[i]);
            for (int i = mine + 1; i < count; i++) rank += goes_before(tile[i], value);
            to[row * length + begin + rank] = begin + mine;
        }
        __syncthreads();
    }
}

// Merges runs of `run` positions. `later` is the number of launches that follow.
KERNEL merge_runs(const T *x, int64_t *y, int64_t rows, int64_t length, int64_t run, int64_t later, char *scratch) {
    wait_for_inputs();
    const int64_t *from = later % 2 ? y : (const int64_t *)scratch;
    int64_t *to = later % 2 ? (int64_t *)scratch : y;
    for (int64_t k = grid_index(); k < rows * length; k += grid_size()) {
        const int64_t start = k / length * length, own = (k - start) / run, other = own ^ 1;
        const int64_t at = from[k];
        const T *row = x + start, value = row[at];
        const bool left = own < other;
        const int64_t first = min(other * run, length);
        int64_t low = first, high = min(first + run, length);
        while (low < high) { // the first position in the other run that does not go before this one
            const int64_t middle = (low + high) / 2;
            const T opposite = row[from[start + middle]];
            if (left ? goes_before(opposite, value) : !goes_before(value, opposite))
                low = middle + 1;
            else
                high = middle;
        }
        to[k - (left ? 0 : run) + low - first] = at;
    }
}
