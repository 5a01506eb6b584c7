// Multiresolution hash encoding: see adtrain/ops/hash_grid.py. There are `count` points. A level is {resolution, first
// row, mask}. Each bit of `along` is a coordinate by which the weights of the corners are differentiated.
//
// A pair of threads shares a point in a level. Each has the corners at one end of the first coordinate. Their rows are
// mostly neighbours, so that a warp reads or adds to fewer sectors of memory.
//
// hash_grid_add adds integers, so its result does not depend on the order. A summand is rounded to a multiple of a unit,
// a power of two. The unit follows from the largest element of the cotangent, so that no sum exceeds 64 bits. Where the
// sums of a feature of a level fit into shared memory, each block first adds those of its points there.
#include "common/common.cuh"

#define CORNERS (1 << (COORDINATES - 1))
#define VECTORS (FEATURES / WIDTH)

// The rows and weights of the corners of a point's cell at one end of the first coordinate. Bit i of a corner's number is
// its end of coordinate i + 1.
struct Corners {
    int64_t row[CORNERS];
    T weight[CORNERS];

    __device__ __forceinline__ Corners(const T *point, const int64_t *level, int64_t along, bool end) {
        constexpr uint32_t PRIMES[4] = {1u, 2654435761u, 805459861u, 3674653429u};
        const int resolution = (int)level[0]; // at most 2^24
        const int64_t first = level[1];
        const uint32_t mask = (uint32_t)level[2];
        uint32_t at[CORNERS], stride = 1;
        #pragma unroll
        for (int i = 0; i < COORDINATES; i++) {
            const T position = point[i] * (T)resolution;
            const bool below = position < 0, above = position > (T)resolution;
            const T within = below ? (T)0 : above ? (T)resolution : position; // NaN stays
            const int cell = within >= 0 ? min((int)within, resolution - 1) : 0;
            const T fraction = within - (T)cell, slope = !below && !above;
            const T high = along >> i & 1 ? slope : fraction, low = along >> i & 1 ? -slope : 1 - fraction;
            const uint32_t factor = mask ? PRIMES[i] : stride, here = (uint32_t)cell * factor, next = here + factor;
            if (i == 0) {
                at[0] = end ? next : here;
                weight[0] = end ? high : low;
            } else {
                #pragma unroll
                for (int k = 0; k < 1 << (i - 1); k++) {
                    at[(1 << (i - 1)) + k] = mask ? at[k] ^ next : at[k] + next;
                    at[k] = mask ? at[k] ^ here : at[k] + here;
                    weight[(1 << (i - 1)) + k] = weight[k] * high;
                    weight[k] *= low;
                }
            }
            stride *= (uint32_t)resolution + 1;
        }
        #pragma unroll
        for (int k = 0; k < CORNERS; k++) row[k] = first + (mask ? at[k] & mask : at[k]);
    }
};

// A pair of threads computes WIDTH features of a point in a level.
KERNEL hash_grid(const T *points, const T *table, const int64_t *levels, T *out, int64_t count, int64_t along) {
    wait_for_inputs();
    const int64_t threads = count * LEVELS * VECTORS * 2;
    for (int64_t g = grid_index(); g - g % WARP < threads; g += grid_size()) { // whole warps
        const int64_t at = min(g, threads - 1) / 2;
        const int64_t f = at % VECTORS * WIDTH, l = at / VECTORS % LEVELS, n = at / VECTORS / LEVELS;
        const Corners corners(points + n * COORDINATES, levels + 3 * l, along, g % 2);
        Vector<T, WIDTH> sum = {};
        #pragma unroll
        for (int c = 0; c < CORNERS; c++) {
            const Vector<T, WIDTH> x = load<T, WIDTH>(table + corners.row[c] * FEATURES + f);
            #pragma unroll
            for (int k = 0; k < WIDTH; k++) sum.lane[k] = fma(corners.weight[c], x.lane[k], sum.lane[k]);
        }
        #pragma unroll
        for (int k = 0; k < WIDTH; k++) sum.lane[k] += __shfl_xor_sync(FULL_MASK, sum.lane[k], 1);
        if (g < threads && g % 2 == 0) store(out, at * WIDTH, sum);
    }
}

#ifdef SCRATCH_SUMS
// The scratch memory: the sums, and the bits of the largest absolute value of the cotangent. As integers, the bits of
// infinity and NaN are larger than those of all numbers.
struct Scratch {
    unsigned long long *sums, *largest;

    __device__ __forceinline__ Scratch(char *scratch, int64_t elements)
        : sums(SCRATCH_SUMS(unsigned long long, scratch, elements)),
          largest(SCRATCH_LARGEST(unsigned long long, scratch, elements)) {}

    // The exponent of the power of two by which summands are multiplied, which is the reciprocal of the unit. A sum is
    // below 2^room times the largest element.
    __device__ __forceinline__ int exponent(int64_t room) const {
        int of_largest;
        frexp(__longlong_as_double((long long)*largest), &of_largest);
        return min(62 - (int)room - of_largest, 1000);
    }
    // A summand as a multiple of the unit.
    __device__ __forceinline__ unsigned long long rounded(double summand, double scale) const {
        if (!isfinite(summand)) atomicMax(largest, ~0ull >> 1); // the bits of a NaN: then all results are NaN
        return (unsigned long long)(int64_t)rint(summand * scale);
    }
    __device__ __forceinline__ bool finite() const { return isfinite(__longlong_as_double((long long)*largest)); }
};

KERNEL hash_grid_add_clear(const T *, const T *, const int64_t *, T *, int64_t count, int64_t along, int64_t elements,
                           int64_t, char *scratch) {
    wait_for_inputs();
    const Scratch memory(scratch, elements);
    for (int64_t i = grid_index(); i <= elements; i += grid_size()) memory.sums[i] = 0; // `largest` follows
}

KERNEL hash_grid_add_largest(const T *ct, const T *, const int64_t *, T *, int64_t count, int64_t along,
                             int64_t elements, int64_t, char *scratch) {
    wait_for_inputs();
    unsigned long long largest = 0;
    for (int64_t i = grid_index(); i < count * LEVELS * VECTORS; i += grid_size()) {
        const Vector<T, WIDTH> x = load<T, WIDTH>(ct + i * WIDTH);
        #pragma unroll
        for (int k = 0; k < WIDTH; k++)
            largest = max(largest, (unsigned long long)__double_as_longlong(fabs((double)x.lane[k])));
    }
    #pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        largest = max(largest, __shfl_xor_sync(FULL_MASK, largest, distance));
    if (threadIdx.x % WARP == 0) atomicMax(Scratch(scratch, elements).largest, largest);
}

// The rows of a level. If there are at most SHARED_SUMS, the sums of a feature fit into the shared memory of a block.
__device__ __forceinline__ int64_t rows_of(const int64_t *levels, int64_t l, int64_t elements) {
    const int64_t end = l + 1 < LEVELS ? levels[3 * (l + 1) + 1] : elements / FEATURES;
    return end - levels[3 * l + 1];
}

// Block (part, feature and level) adds the points of a part in shared memory, if the sums fit.
KERNEL __launch_bounds__(THREADS) hash_grid_add_shared(const T *ct, const T *points, const int64_t *levels, T *,
                                                       int64_t count, int64_t along, int64_t elements, int64_t room,
                                                       char *scratch) {
    wait_for_inputs();
    extern __shared__ __align__(16) uint32_t shared_halves[];
    uint32_t *low = shared_halves, *high = shared_halves + SHARED_SUMS; // the hardware adds 32 bits at a time in shared memory
    const int64_t f = blockIdx.y % FEATURES, l = blockIdx.y / FEATURES, rows = rows_of(levels, l, elements);
    if (rows > SHARED_SUMS) return;
    for (int i = threadIdx.x; i < rows; i += THREADS) low[i] = high[i] = 0;
    __syncthreads();
    const Scratch memory(scratch, elements);
    const double scale = ldexp(1.0, memory.exponent(room));
    const int64_t begin = count * blockIdx.x / gridDim.x, end = count * (blockIdx.x + 1) / gridDim.x;
    const int64_t *level = levels + 3 * l;
    for (int64_t g = 2 * begin + threadIdx.x; g < 2 * end; g += THREADS) {
        const int64_t n = g / 2;
        const Corners corners(points + n * COORDINATES, level, along, g % 2);
        const double x = ct[(n * LEVELS + l) * FEATURES + f];
        #pragma unroll
        for (int c = 0; c < CORNERS; c++) {
            const unsigned long long summand = memory.rounded(corners.weight[c] * x, scale);
            const int at = (int)(corners.row[c] - level[1]);
            const uint32_t part = (uint32_t)summand, before = atomicAdd(low + at, part);
            atomicAdd(high + at, (uint32_t)(summand >> 32) + (before + part < part)); // with the carry
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        const unsigned long long sum = (unsigned long long)high[i] << 32 | low[i];
        if (sum) atomicAdd(memory.sums + (level[1] + i) * FEATURES + f, sum);
    }
}

// A pair of threads adds a feature of a point in a level.
KERNEL hash_grid_add_points(const T *ct, const T *points, const int64_t *levels, T *, int64_t count, int64_t along,
                            int64_t elements, int64_t room, char *scratch) {
    wait_for_inputs();
    const Scratch memory(scratch, elements);
    const double scale = ldexp(1.0, memory.exponent(room));
    for (int64_t g = grid_index(); g < count * LEVELS * 2 * FEATURES; g += grid_size()) {
        const int64_t f = g % FEATURES, l = g / FEATURES / 2 % LEVELS, n = g / FEATURES / 2 / LEVELS;
        if (rows_of(levels, l, elements) <= SHARED_SUMS) continue;
        const Corners corners(points + n * COORDINATES, levels + 3 * l, along, g / FEATURES % 2);
        const double x = ct[(n * LEVELS + l) * FEATURES + f];
        #pragma unroll
        for (int c = 0; c < CORNERS; c++)
            atomicAdd(memory.sums + corners.row[c] * FEATURES + f, memory.rounded(corners.weight[c] * x, scale));
    }
}

KERNEL hash_grid_add_finish(const T *, const T *, const int64_t *, T *out, int64_t count, int64_t along,
                            int64_t elements, int64_t room, char *scratch) {
    wait_for_inputs();
    const Scratch memory(scratch, elements);
    const double unit = ldexp(1.0, -memory.exponent(room));
    for (int64_t i = grid_index(); i < elements; i += grid_size())
        out[i] = memory.finite() ? (T)((double)(long long)memory.sums[i] * unit) : (T)NAN;
}
#endif
