// The operations of a one-block kernel: one thread block computes small equations one after another.
//
// Each takes `t`, the index of this thread among THREADS. Independent equations get indices that are rotated by whole warps, so
// that small ones run in parallel. Lengths are compile-time constants. The generator writes the functions that access elements.
#pragma once
#include "common/common.cuh"
#include "common/collectives.cuh"

extern __shared__ __align__(16) unsigned char shared_bytes[];

namespace in_block {

// LANES neighbouring threads reduce the elements read(o, r), r = 0 ... COUNT - 1, of an output o, and call write(o, value). All
// threads of a warp call it together.
template <typename Op, typename A, int THREADS, int OUTPUTS, int COUNT, int LANES, typename Read, typename Write>
__device__ __forceinline__ void reduce_lanes(int t, Read read, Write write) {
    static_assert(LANES <= WARP && LANES <= COUNT, "every lane starts with an element");
    constexpr int AT_ONCE = THREADS / LANES;
    for (int first = 0; first < OUTPUTS; first += AT_ONCE) {
        const int o = first + t / LANES, lane = t % LANES;
        if (first + t / WARP * WARP / LANES >= OUTPUTS)
            continue; // no lane of this warp has an output
        const int from = o < OUTPUTS ? o : OUTPUTS - 1;
        A value = read(from, lane);
        #pragma unroll 4
        for (int r = lane + LANES; r < COUNT; r += LANES) value = Op::of(value, read(from, r));
        value = over_lanes<Op, LANES>(value);
        if (lane == 0 && o < OUTPUTS) write(o, value);
    }
}

// Like reduce_lanes, for a small number of outputs, or for contiguous ones. Each of SLICES groups of threads reduces every
// SLICES-th element of WIDE neighbouring outputs to partial[slice * OUTPUTS + o].
template <typename Op, typename A, int THREADS, int OUTPUTS, int COUNT, int SLICES, int WIDE, typename Read>
__device__ __forceinline__ void reduce_slices(int t, A *partial, Read read) {
    static_assert(SLICES <= COUNT, "every slice starts with an element");
    for (int i = t; i < OUTPUTS / WIDE * SLICES; i += THREADS) {
        const int o = i % (OUTPUTS / WIDE) * WIDE, slice = i / (OUTPUTS / WIDE);
        A value[WIDE];
        const auto first = read(o, slice);
        #pragma unroll
        for (int k = 0; k < WIDE; k++) value[k] = first.lane[k];
        #pragma unroll 8
        for (int r = slice + SLICES; r < COUNT; r += SLICES) {
            const auto next = read(o, r);
            #pragma unroll
            for (int k = 0; k < WIDE; k++) value[k] = Op::of(value[k], (A)next.lane[k]);
        }
        #pragma unroll
        for (int k = 0; k < WIDE; k++) partial[slice * OUTPUTS + o + k] = value[k];
    }
}

// The same without partial results. A warp reduces WARP / LANES vectors of outputs side by side. LANES of its lanes share one.
template <typename Op, typename A, int THREADS, int OUTPUTS, int COUNT, int LANES, int WIDE, typename Read, typename Write>
__device__ __forceinline__ void reduce_columns(int t, Read read, Write write) {
    static_assert(LANES <= COUNT, "every lane starts with an element");
    constexpr int BESIDE = WARP / LANES, VECTORS = OUTPUTS / WIDE;
    for (int first = t / WARP * BESIDE; first < VECTORS; first += THREADS / WARP * BESIDE) {
        const int slice = t % WARP / BESIDE, vector = first + t % BESIDE;
        const bool live = vector < VECTORS;
        const int o = (live ? vector : VECTORS - 1) * WIDE;
        A value[WIDE];
        const auto start = read(o, slice);
        #pragma unroll
        for (int k = 0; k < WIDE; k++) value[k] = start.lane[k];
        const auto take = [&](int r) {
            const auto next = read(o, r);
            #pragma unroll
            for (int k = 0; k < WIDE; k++) value[k] = Op::of(value[k], (A)next.lane[k]);
        };
        #pragma unroll 16
        for (int round = 1; round < COUNT / LANES; round++) take(slice + round * LANES);
        if (slice < COUNT % LANES) take(slice + COUNT / LANES * LANES);
        #pragma unroll
        for (int k = 0; k < WIDE; k++) {
            #pragma unroll
            for (int mask = BESIDE; mask < WARP; mask *= 2) value[k] = Op::of(value[k], shuffle_xor(value[k], mask));
            if (live && slice == 0) write(o + k, value[k]);
        }
    }
}

// y = a b, a stored as [k][row], in tiles of TALL rows by WIDE columns. A warp computes WARP / LANES tiles at a time. LANES lanes
// share a tile: each adds some of the K products.
template <typename A, int THREADS, int ROWS, int COLUMNS, int K, int LANES, int TALL, int WIDE>
__device__ __forceinline__ void transposed_products(int t, const A *a, const A *b, A *y) {
    static_assert(ROWS % TALL == 0 && COLUMNS % WIDE == 0 && K % LANES == 0, "whole tiles");
    constexpr int BESIDE = WARP / LANES, ACROSS = COLUMNS / WIDE, TILES = ROWS / TALL * ACROSS;
    for (int first = t / WARP * BESIDE; first < TILES; first += THREADS / WARP * BESIDE) {
        const int slice = t % WARP / BESIDE, tile = first + t % BESIDE, from = tile < TILES ? tile : TILES - 1;
        const int row = from / ACROSS * TALL, column = from % ACROSS * WIDE;
        A sums[TALL][WIDE] = {};
        #pragma unroll 16
        for (int round = 0; round < K / LANES; round++) {
            const int k = slice + round * LANES;
            const Vector<A, TALL> left = load<A, TALL>(a + k * ROWS + row);
            const Vector<A, WIDE> right = load<A, WIDE>(b + k * COLUMNS + column);
            #pragma unroll
            for (int i = 0; i < TALL; i++)
                #pragma unroll
                for (int j = 0; j < WIDE; j++) sums[i][j] = fma(left.lane[i], right.lane[j], sums[i][j]);
        }
        #pragma unroll
        for (int i = 0; i < TALL; i++)
            #pragma unroll
            for (int j = 0; j < WIDE; j++) {
                #pragma unroll
                for (int mask = BESIDE; mask < WARP; mask *= 2) sums[i][j] += shuffle_xor(sums[i][j], mask);
                if (tile < TILES && slice == 0) y[(row + i) * COLUMNS + column + j] = sums[i][j];
            }
    }
}

// y = a b for a long K, b stored as [column][k]. LANES neighbouring threads share a sum; each loads up to eight vectors of both
// operands before it multiplies.
template <typename A, int THREADS, int ROWS, int COLUMNS, int K, int LANES, int WIDE>
__device__ __forceinline__ void long_products(int t, const A *a, const A *b, A *y) {
    constexpr int OUTPUTS = ROWS * COLUMNS, VECTORS = (K / WIDE + LANES - 1) / LANES, AHEAD = VECTORS < 8 ? VECTORS : 8;
    for (int first = 0; first < OUTPUTS; first += THREADS / LANES) {
        const int o = first + t / LANES, from = o < OUTPUTS ? o : OUTPUTS - 1;
        if (first + t / WARP * WARP / LANES >= OUTPUTS)
            continue; // no lane of this warp has an output
        const A *left = a + from / COLUMNS * K, *right = b + from % COLUMNS * K;
        A sum = 0;
        #pragma unroll 1
        for (int begin = 0; begin < VECTORS; begin += AHEAD) {
            Vector<A, WIDE> l[AHEAD] = {}, r[AHEAD] = {};
            #pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int k = ((begin + i) * LANES + t % LANES) * WIDE;
                if (k < K) l[i] = load<A, WIDE>(left + k), r[i] = load<A, WIDE>(right + k);
            }
            #pragma unroll
            for (int i = 0; i < AHEAD; i++)
                #pragma unroll
                for (int h = 0; h < WIDE; h++) sum = fma(l[i].lane[h], r[i].lane[h], sum);
        }
        sum = over_lanes<Sum, LANES>(sum);
        if (t % LANES == 0 && o < OUTPUTS) y[o] = sum;
    }
}

// y = a b for a short K. A thread keeps a column of b in registers and multiplies rows of a by it. The strides of b are STEP_K
// along K and STEP along columns.
template <typename A, int THREADS, int ROWS, int COLUMNS, int K, int STEP_K, int STEP>
__device__ __forceinline__ void short_products(int t, const A *a, const A *b, A *y) {
    constexpr int GROUPS = THREADS < 2 * COLUMNS ? 1 : THREADS / COLUMNS < ROWS ? THREADS / COLUMNS : ROWS;
    constexpr int WIDE = K % 4 == 0 && sizeof(A) <= 4 ? 4 : K % 2 == 0 ? 2 : 1;
    for (int i = t; i < GROUPS * COLUMNS; i += THREADS) {
        const int column = i % COLUMNS;
        A mine[K];
        #pragma unroll
        for (int k = 0; k < K; k++) mine[k] = b[k * STEP_K + column * STEP];
        const auto take = [&](int row) {
            A sum = 0;
            #pragma unroll
            for (int k = 0; k < K; k += WIDE) {
                const Vector<A, WIDE> left = load<A, WIDE>(a + row * K + k);
                #pragma unroll
                for (int h = 0; h < WIDE; h++) sum = fma(left.lane[h], mine[k + h], sum);
            }
            y[row * COLUMNS + column] = sum;
        };
        #pragma unroll 4
        for (int round = 0; round < ROWS / GROUPS; round++) take(i / COLUMNS + round * GROUPS);
        if (i / COLUMNS < ROWS % GROUPS) take(i / COLUMNS + ROWS / GROUPS * GROUPS);
    }
}

// Calls body(row, lane, live) for ROWS rows; LANES neighbouring threads share a row. Threads without a row get the last one, with
// live = false.
template <int THREADS, int ROWS, int LANES, typename Body> __device__ __forceinline__ void for_each_row(int t, Body body) {
    for (int first = 0; first < ROWS; first += THREADS / LANES) {
        if (first + t / WARP * WARP / LANES >= ROWS)
            continue; // no lane of this warp has a row
        const int row = first + t / LANES;
        body(row < ROWS ? row : ROWS - 1, t % LANES, row < ROWS);
    }
}

// Adds values over LANES neighbouring lanes and divides the sums among them. Calls write(i, sum), first <= i < end, in the lane that
// has sum i.
template <int COUNT, int LANES, typename A, typename Write>
__device__ __forceinline__ void divide_sums(A (&values)[COUNT], int lane, int first, int end, Write write) {
    if constexpr (LANES == 1) {
        #pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (first + i < end) write(first + i, values[i]);
    } else {
        constexpr int HALF = (COUNT + 1) / 2; // the upper lanes have the other values
        const bool upper = lane & LANES / 2;
        A mine[HALF];
        #pragma unroll
        for (int i = 0; i < HALF; i++) {
            const A low = values[i], high = HALF + i < COUNT ? values[HALF + i] : (A)0;
            mine[i] = (upper ? high : low) + shuffle_xor(upper ? low : high, LANES / 2);
        }
        const int middle = first + HALF < end ? first + HALF : end;
        divide_sums<HALF, LANES / 2>(mine, lane, upper ? middle : first, upper ? end : middle, write);
    }
}

// y = a b for few columns, b stored as [column][k]. LANES neighbouring threads keep a row of a in registers and multiply all columns
// by it.
template <typename A, int THREADS, int ROWS, int COLUMNS, int K, int LANES, int WIDE>
__device__ __forceinline__ void narrow_products(int t, const A *a, const A *b, A *y) {
    constexpr int VECTORS = K / (LANES * WIDE);
    static_assert(VECTORS * LANES * WIDE == K, "whole vectors");
    for_each_row<THREADS, ROWS, LANES>(t, [&](int row, int lane, bool live) {
        Vector<A, WIDE> mine[VECTORS];
        A sums[COLUMNS] = {};
        #pragma unroll
        for (int i = 0; i < VECTORS; i++) mine[i] = load<A, WIDE>(a + row * K + (i * LANES + lane) * WIDE);
        #pragma unroll
        for (int column = 0; column < COLUMNS; column++)
            #pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                const Vector<A, WIDE> other = load<A, WIDE>(b + column * K + (i * LANES + lane) * WIDE);
                #pragma unroll
                for (int h = 0; h < WIDE; h++) sums[column] = fma(mine[i].lane[h], other.lane[h], sums[column]);
            }
        divide_sums<COLUMNS, LANES>(sums, lane, 0, COLUMNS, [&](int column, A sum) {
            if (live) y[row * COLUMNS + column] = sum;
        });
    });
}

// softmax or log_softmax of rows of LENGTH elements with stride INNER.
template <bool LOGARITHM, int THREADS, int ROWS, int LENGTH, int INNER, int LANES, typename A>
__device__ __forceinline__ void softmax(int t, const A *x, A *y) {
    constexpr int ITEMS = (LENGTH + LANES - 1) / LANES;
    for_each_row<THREADS, ROWS, LANES>(t, [&](int row, int lane, bool live) {
        const int start = row / INNER * (LENGTH * INNER) + row % INNER;
        A mine[ITEMS], top = (A)-INFINITY, total = 0;
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            const int j = lane + k * LANES;
            mine[k] = j < LENGTH ? x[start + j * INNER] : (A)-INFINITY;
            top = Max::of(top, mine[k]);
        }
        top = over_lanes<Max, LANES>(top);
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            mine[k] = LOGARITHM ? mine[k] - top : (A)exp(mine[k] - top);
            if (lane + k * LANES < LENGTH) total += LOGARITHM ? (A)exp(mine[k]) : mine[k];
        }
        total = over_lanes<Sum, LANES>(total);
        const A shift = LOGARITHM ? (A)log(total) : 1 / total;
        #pragma unroll
        for (int k = 0; k < ITEMS; k++)
            if (live && lane + k * LANES < LENGTH)
                y[start + (lane + k * LANES) * INNER] = LOGARITHM ? mine[k] - shift : mine[k] * shift;
    });
}

// Mean 0 and variance 1 of rows of LENGTH elements; place(row, r) is the position of an element. The first element is
// subtracted before, so that numbers that are all alike become 0.
template <typename A, int THREADS, int ROWS, int LENGTH, int LANES, typename Place>
__device__ __forceinline__ void standardize(
    int t, const A *x, A *y, A *means, A *variances, A eps, Place place) {
    constexpr int ITEMS = (LENGTH + LANES - 1) / LANES;
    for_each_row<THREADS, ROWS, LANES>(t, [&](int row, int lane, bool live) {
        A mine[ITEMS], sum = 0, squares = 0;
        const A first = x[place(row, 0)];
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            const int r = lane + k * LANES;
            mine[k] = r < LENGTH ? x[place(row, r)] - first : (A)0;
            sum += mine[k];
        }
        const A mean = over_lanes<Sum, LANES>(sum) / (A)LENGTH;
        #pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            mine[k] -= mean;
            squares += lane + k * LANES < LENGTH ? mine[k] * mine[k] : (A)0;
        }
        const A variance = over_lanes<Sum, LANES>(squares) / (A)LENGTH;
        const A inverse = 1 / sqrt(variance + eps);
        #pragma unroll
        for (int k = 0; k < ITEMS; k++)
            if (live && lane + k * LANES < LENGTH) y[place(row, lane + k * LANES)] = mine[k] * inverse;
        if (live && lane == 0) means[row] = first + mean, variances[row] = variance;
    });
}

// The index of the first maximum of each row. NaN counts as the maximum, as in NumPy.
template <int THREADS, int ROWS, int LENGTH, int INNER, int LANES, typename A>
__device__ __forceinline__ void argmax(int t, const A *x, int64_t *y) {
    for_each_row<THREADS, ROWS, LANES>(t, [&](int row, int lane, bool live) {
        const int start = row / INNER * (LENGTH * INNER) + row % INNER;
        A best = x[start + lane * INNER];
        int at = lane;
        const auto take = [&](A value, int position) {
            const bool larger = value > best || (value != value && best == best);
            const bool equal = value == best || (value != value && best != best);
            if (larger || (equal && position < at)) best = value, at = position;
        };
        for (int j = lane + LANES; j < LENGTH; j += LANES) take(x[start + j * INNER], j);
        #pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2) {
            const A value = shuffle_xor(best, mask);
            take(value, shuffle_xor(at, mask));
        }
        if (live && lane == 0) y[row] = at;
    });
}

template <typename I> __device__ __forceinline__ bool valid(I index, int length, int *bad) {
    const bool found = (int64_t)index >= 0 && (int64_t)index < length;
    if (!found) *bad = 1;
    return found;
}

} // namespace in_block
