// fp16x2: a scaled float32 as two float16 terms, high + low / 2^11. Three products of terms add up to a float32 product.
// Each image and each filter has its own scale, a power of two: its largest scaled element is in [2^14, 2^15). Operands
// that are rounded to at most 10 bits of mantissa need only high, and one product (FP16_TERMS).
//
// Two terms keep at least 22 bits if high is normal; one keeps all bits of a rounded operand. The error of a product of
// such numbers is at most 2^-20.4 of it, 2^-23.8 in root mean square. A filter is representable if all elements are 0 or
// normal. An image may have up to MAX_SMALL subnormal elements; a sum falls back if it is not much larger than their
// possible error.
#pragma once
#include "common/collectives.cuh"
#include "common/mma_sync.cuh"
#include "conv/shifted.cuh"
#include "sm90/tma.cuh"

constexpr int FP16_TERMS = MANTISSA > 10 ? 2 : 1;
constexpr float LOW = 0x1p-11f; // the unit of low terms
// Thresholds of the fallback: the minimum of effective products of a sum (Statistics::share), and the maximum ratio of the
// sum of the products' mean squares to the mean square of the sums. Rounded operands lose no bits, so cancellation is exact.
constexpr float MIN_PRODUCTS = FP16_TERMS == 2 ? 8 : 0x1p-64f, MAX_CANCELLATION = 8;

// Statistics of an image or a filter.
struct alignas(16) Statistics {
    float scale, inverse_scale; // a power of two
    // The participation ratio (sum |x|)^2 / sum x^2: the effective number of non-zeros. For an image, divided by its number
    // of elements. 0 if it is not representable.
    float share;
    float squares; // sum of the squares of the scaled elements
};

constexpr int MAX_EXPONENT = 14; // the largest element is scaled to 2^MAX_EXPONENT
constexpr int MIN_SCALE_EXPONENT = -16, MAX_SCALE_EXPONENT = 89;
constexpr float MIN_NORMAL = 0x1p-14f;    // of float16
constexpr float MIN_SUBNORMAL = 0x1p-24f; // of float16
constexpr int MAX_SMALL = 16;           // maximum of elements of an image between these two
constexpr int NOT_REPRESENTABLE = -1;

// The minimum of a non-zero sum of scaled products, for each small element that it may contain. The error of such an
// element in fp16x2 is 2^-36, and omitting low x low adds as much. Multiplied by the largest scaled number, 2^15, this is
// 2^-20, or 2^-24 of the sum. The error in a single float16 is 2^-25, or 2^-11 of the sum.
constexpr float SMALL_ELEMENT_LOSS = FP16_TERMS == 2 ? 16 : 2;

// Whether a non-zero sum is below `limit`.
template <int COUNT> __device__ __forceinline__ bool any_below(const float (&sums)[COUNT], float limit) {
    bool found = false;
    if (limit > 0) {
        #pragma unroll
        for (float sum : sums) found |= sum != 0 && fabsf(sum) < limit;
    }
    return found;
}

constexpr int MEASURE_THREADS = 256; // of a block that computes statistics of a filter or of a part of an image

// Statistics of the elements that a thread, a warp or a block has read.
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

    // The scale of an operand; 0 if it is not representable: a scaled element would be below `smallest`, or it is not finite.
    __device__ __forceinline__ float scale(float smallest) const {
        if (largest == 0) return 1;
        const int exponent = MAX_EXPONENT + 127 - (int)(__float_as_uint(largest) >> 23); // too small where not finite
        if (exponent < MIN_SCALE_EXPONENT || exponent > MAX_SCALE_EXPONENT) return 0;
        const float scale = __int_as_float(exponent + 127 << 23);
        return smallest_nonzero * scale < smallest ? 0 : scale;
    }

    // count: the divisor of `share`.
    __device__ __forceinline__ Statistics statistics(float smallest, float count) const {
        const float scale = this->scale(smallest), unit = scale / UNIT;
        if (largest == 0) return {1, 1, INFINITY, 0};
        if (scale == 0) return {0, 0, 0, 0};
        return {scale, 1 / scale, sum * UNIT * (sum * UNIT / squares) / count, squares * unit * unit};
    }
};

// Scales and splits eight neighbouring channels; returns the sum of the scaled elements' squares.
__device__ __forceinline__ float split_fp16x2(Chunk (&terms)[FP16_TERMS], const float (&x)[CHUNK_ELEMENTS],
    float scale) {
    float squares = 0;
    #pragma unroll
    for (int i = 0; i < CHUNK_ELEMENTS / 2; i++) {
        const float even = rounded(x[2 * i]) * scale, odd = rounded(x[2 * i + 1]) * scale;
        squares = fma(even, even, fma(odd, odd, squares));
        terms[0].lane[i] = pack_pair<FLOAT16>(even, odd);
        if constexpr (FP16_TERMS == 2) {
            float of_even, of_odd;
            unpack_float16(terms[0].lane[i], of_even, of_odd);
            terms[1].lane[i] = pack_pair<FLOAT16>((even - of_even) / LOW, (odd - of_odd) / LOW);
        }
    }
    return squares;
}
