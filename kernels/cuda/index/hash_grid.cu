// Multiresolution hash encoding: see adtrain/ops/hash_grid.py. There are `count` points. A level is {resolution, first
// row, mask}. Each bit of `along` is a coordinate by which the weights of the corners are differentiated.
//
// hash_grid_add adds integers, so its result does not depend on the order. A summand is rounded to a multiple of a unit,
// a power of two. The unit follows from the largest element of the cotangent, so that no sum exceeds 64 bits.
#include "common/common.cuh"

#define CORNERS (1 << COORDINATES)
#define VECTORS (FEATURES / WIDTH)

// The rows and weights of the corners of a point's cell. Bit i of a corner's number is its end of coordinate i.
struct Corners {
    int64_t row[CORNERS];
    T weight[CORNERS];

    __device__ __forceinline__ Corners(const T *point, const int64_t *level, int64_t along) {
        constexpr uint32_t PRIMES[4] = {1u, 2654435761u, 805459861u, 3674653429u};
        const int64_t resolution = level[0], first = level[1];
        const uint32_t mask = (uint32_t)level[2];
        uint32_t at[CORNERS] = {}, stride = 1;
        weight[0] = 1;
        #pragma unroll
        for (int i = 0; i < COORDINATES; i++) {
            const T position = point[i] * (T)resolution;
            const bool below = position < 0, above = position > (T)resolution;
            const T within = below ? (T)0 : above ? (T)resolution : position; // NaN stays
            const int64_t last = resolution - 1, cell = within >= 0 ? min((int64_t)within, last) : 0;
            const T fraction = within - (T)cell, slope = !below && !above;
            const T high = along >> i & 1 ? slope : fraction, low = along >> i & 1 ? -slope : 1 - fraction;
            const uint32_t factor = mask ? PRIMES[i] : stride, here = (uint32_t)cell * factor, next = here + factor;
            #pragma unroll
            for (int k = 0; k < 1 << i; k++) {
                at[(1 << i) + k] = mask ? at[k] ^ next : at[k] + next;
                at[k] = mask ? at[k] ^ here : at[k] + here;
                weight[(1 << i) + k] = weight[k] * high;
                weight[k] *= low;
            }
            stride *= (uint32_t)resolution + 1;
        }
        #pragma unroll
        for (int k = 0; k < CORNERS; k++) row[k] = first + (mask ? at[k] & mask : at[k]);
    }
};

// A thread computes WIDTH features of a point in a level.
KERNEL hash_grid(const T *points, const T *table, const int64_t *levels, T *out, int64_t count, int64_t along) {
    wait_for_inputs();
    for (int64_t g = grid_index(); g < count * LEVELS * VECTORS; g += grid_size()) {
        const int64_t f = g % VECTORS * WIDTH, l = g / VECTORS % LEVELS, n = g / VECTORS / LEVELS;
        const Corners corners(points + n * COORDINATES, levels + 3 * l, along);
        Vector<T, WIDTH> sum = {};
        #pragma unroll
        for (int c = 0; c < CORNERS; c++) {
            const Vector<T, WIDTH> x = load<T, WIDTH>(table + corners.row[c] * FEATURES + f);
            #pragma unroll
            for (int k = 0; k < WIDTH; k++) sum.lane[k] = fma(corners.weight[c], x.lane[k], sum.lane[k]);
        }
        store(out, g * WIDTH, sum);
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

// A thread adds a feature of a point in a level. So neighbouring threads add to the same sectors of memory.
KERNEL hash_grid_add_points(const T *ct, const T *points, const int64_t *levels, T *, int64_t count, int64_t along,
                            int64_t elements, int64_t room, char *scratch) {
    wait_for_inputs();
    const Scratch memory(scratch, elements);
    const double scale = ldexp(1.0, memory.exponent(room));
    for (int64_t g = grid_index(); g < count * LEVELS * FEATURES; g += grid_size()) {
        const int64_t f = g % FEATURES, l = g / FEATURES % LEVELS, n = g / FEATURES / LEVELS;
        const Corners corners(points + n * COORDINATES, levels + 3 * l, along);
        const double x = ct[g];
        #pragma unroll
        for (int c = 0; c < CORNERS; c++) {
            const double summand = corners.weight[c] * x;
            if (!isfinite(summand)) atomicMax(memory.largest, ~0ull >> 1); // the bits of a NaN: then all results are NaN
            atomicAdd(memory.sums + corners.row[c] * FEATURES + f, (unsigned long long)(int64_t)rint(summand * scale));
        }
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
