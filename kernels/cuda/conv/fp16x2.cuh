// fp16x2: a float32, scaled by a power of two, as two float16 numbers high + low / 2^11; three products make up one of
// float32. Each image and each filter has its own scale, which takes its largest element to [2^14, 2^15). Operands that
// are rounded to at most 10 bits of mantissa need only high, and one product (FP16_PARTS).
//
// A normal float16 keeps at least 22 bits, or all of a rounded operand. A product of normal numbers is at most 2^-20.4
// off, 2^-23.8 in root mean square. A filter is represented if all its elements are 0 or normal. An image may have up
// to MAX_SMALL smaller ones; sums that are small beside what these may lose fall back.
#pragma once
#include "common/collectives.cuh"
#include "conv/shifted.cuh"
#include "sm90/fp16x2.cuh"
#include "sm90/tma.cuh"

#ifndef STATISTICS_BYTES
#define STATISTICS_BYTES 16
#endif
constexpr int FP16_PARTS = MANTISSA > 10 ? 2 : 1;
constexpr float LOW = 0x1p-11f; // the value of a 1 in low
// Thresholds of the fallback: effective products of a sum, at least (Statistics::share); and how many times the mean
// square of the sums may be below the sum of their products' mean squares. Rounded operands lose no bits that would
// show there.
constexpr float MIN_PRODUCTS = FP16_PARTS == 2 ? 8 : 0x1p-64f, MAX_CANCELLATION = 8;

// Of an image or a filter.
struct alignas(16) Statistics {
    float scale, inverse_scale; // a power of two
    // The participation ratio (sum |x|)^2 / sum x^2, the effective number of non-zeros: of an image relative to its
    // elements; 0 where fp16x2 does not represent it.
    float share;
    float squares; // sum of the squares of the scaled elements
};

static_assert(sizeof(Statistics) == STATISTICS_BYTES, "as the rule counts scratch");

constexpr int MAX_EXPONENT = 14; // the largest element is scaled to 2^MAX_EXPONENT
constexpr int MIN_SCALE_EXPONENT = -16, MAX_SCALE_EXPONENT = 89;
constexpr float MIN_NORMAL = 0x1p-14f;    // of float16
constexpr float MIN_SUBNORMAL = 0x1p-24f; // of float16
constexpr int MAX_SMALL = 16;           // elements of an image between these two, at most
constexpr int NOT_REPRESENTABLE = -1;

// How large a non-zero sum of scaled products must be for each small element that it may contain. fp16x2 holds such an
// element to 2^-36 and drops as much with low x low: times the largest scaled number, 2^15, this is 2^-20, 2^-24 of the
// sum. A single float16 holds it to 2^-25, 2^-11 of the sum.
constexpr float SMALL_ELEMENT_LOSS = FP16_PARTS == 2 ? 16 : 2;

// Whether a non-zero sum is below `limit`.
template <int COUNT> __device__ __forceinline__ bool any_below(const float (&sums)[COUNT], float limit) {
    bool found = false;
    if (limit > 0) {
        #pragma unroll
        for (float sum : sums) found |= sum != 0 && fabsf(sum) < limit;
    }
    return found;
}

constexpr int MEASURE_THREADS = 256; // of a block that measures a filter or a part of an image

// Statistics of the elements that a thread, a warp or a block has seen.
struct alignas(16) RunningStatistics {
    float largest = 0, smallest_nonzero = INFINITY, sum = 0; // of magnitudes
    float squares = 0;                     // times UNIT^2
    static constexpr float UNIT = 0x1p20f; // keeps the squares of representable elements normal

    __device__ __forceinline__ void add(float x) {
        const float size = fabsf(x), scaled = x * UNIT;
        largest = Max::of(largest, size);
        smallest_nonzero = fminf(smallest_nonzero, size > 0 ? size : INFINITY);
        sum += size;
        squares = fma(scaled, scaled, squares);
    }

    __device__ __forceinline__ void merge(const RunningStatistics &other) {
        largest = Max::of(largest, other.largest);
        smallest_nonzero = fminf(smallest_nonzero, other.smallest_nonzero);
        sum += other.sum;
        squares += other.squares;
    }

    // Over a warp or a block, in all of its threads.
    __device__ __forceinline__ void merge_warp() {
        #pragma unroll
        for (int mask = WARP / 2; mask > 0; mask /= 2)
            merge({shuffle_xor(largest, mask), shuffle_xor(smallest_nonzero, mask), shuffle_xor(sum, mask),
                shuffle_xor(squares, mask)});
    }
    __device__ __forceinline__ void merge_block() {
        __shared__ Vector<float, 4> of_warp[MEASURE_THREADS / WARP];
        merge_warp();
        if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = {largest, smallest_nonzero, sum, squares};
        __syncthreads();
        *this = RunningStatistics();
        for (int i = 0; i < MEASURE_THREADS / WARP; i++) {
            const Vector<float, 4> &found = of_warp[i];
            merge({found.lane[0], found.lane[1], found.lane[2], found.lane[3]});
        }
    }

    // The scale of an operand; 0 where fp16x2 does not represent it, as a scaled element would be below `smallest`.
    __device__ __forceinline__ float scale(float smallest) const {
        if (largest == 0) return 1;
        const int exponent = MAX_EXPONENT + 127 - (int)(__float_as_uint(largest) >> 23); // too small where not finite
        if (exponent < MIN_SCALE_EXPONENT || exponent > MAX_SCALE_EXPONENT) return 0;
        const float scale = __int_as_float(exponent + 127 << 23);
        return smallest_nonzero * scale < smallest ? 0 : scale;
    }

    // count: elements that `share` is relative to.
    __device__ __forceinline__ Statistics statistics(float smallest, float count) const {
        const float scale = this->scale(smallest), unit = scale / UNIT;
        if (largest == 0) return {1, 1, INFINITY, 0};
        if (scale == 0) return {0, 0, 0, 0};
        return {scale, 1 / scale, sum * UNIT * (sum * UNIT / squares) / count, squares * unit * unit};
    }
};

static_assert(sizeof(RunningStatistics) == STATISTICS_BYTES, "as the rule counts scratch");

// Scales and splits eight neighbouring channels; returns the sum of the scaled elements' squares.
__device__ __forceinline__ float split_fp16x2(Chunk (&parts)[FP16_PARTS], const float (&x)[CHUNK_ELEMENTS],
    float scale) {
    float squares = 0;
    #pragma unroll
    for (int i = 0; i < CHUNK_ELEMENTS / 2; i++) {
        const float even = rounded(x[2 * i]) * scale, odd = rounded(x[2 * i + 1]) * scale;
        squares = fma(even, even, fma(odd, odd, squares));
        parts[0].lane[i] = pack_half2(even, odd);
        if constexpr (FP16_PARTS == 2) {
            float of_even, of_odd;
            unpack_half2(parts[0].lane[i], of_even, of_odd);
            parts[1].lane[i] = pack_half2((even - of_even) / LOW, (odd - of_odd) / LOW);
        }
    }
    return squares;
}
