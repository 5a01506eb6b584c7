// Halves: a float32, scaled by a power of two, as two float16 numbers, high + low / 2^11, three products of which make up
// one of float32. Each image and each filter has a scale of its own, which its largest element takes to 2^14 or up to
// twice that. Of operands that are rounded to 10 bits of mantissa or fewer high is all there is, and one product (FP16_PARTS).
//
// A normal number of float16 keeps at least 22 bits, or all of a rounded one, and no product of such is more than 2^-20.4
// off, in the root of the mean square 2^-23.8. Filters are held where all elements are zero or such numbers; images may
// have MAX_SMALL smaller ones, where no sum is below what these may have cost (`PackedImages::small`).
#pragma once
#include "common/collectives.cuh"
#include "conv/shifted.cuh"
#include "sm90/fp16x2.cuh"
#include "sm90/tma.cuh"

#ifndef STATISTICS_BYTES
#define STATISTICS_BYTES 16
#endif
constexpr int FP16_PARTS = MANTISSA > 10 ? 2 : 1;
constexpr float LOW = 0x1p-11f; // the unit of low
// Products that a sum must have on average, see Statistics::share. The mean square of sums must be a MAX_CANCELLATION-th of the sum of the
// mean squares of their products. Rounded operands lose no bits that would show in few products, or where these cancel.
constexpr float MIN_PRODUCTS = FP16_PARTS == 2 ? 8 : 0x1p-64f, MAX_CANCELLATION = 8;

// What is known of an image, or of a filter.
struct alignas(16) Statistics {
    float up, down; // its scale, a power of two, and one over that
    float share;    // elements of one size that would count as its own do: of an image as a part of all, of a filter how
                    // many; 0 where it is not held
    float squares;  // of its scaled elements, their sum
};

static_assert(sizeof(Statistics) == STATISTICS_BYTES, "as the rule counts scratch");

constexpr int MAX_EXPONENT = 14;                     // the largest element is scaled to 2^MAX_EXPONENT
constexpr int MIN_SCALE_EXPONENT = -16, MAX_SCALE_EXPONENT = 89; // exponents of a scale
constexpr float MIN_NORMAL = 0x1p-14f;          // the least normal number of float16
constexpr float MIN_SUBNORMAL = 0x1p-24f;            // the least number of all, of what `high` is not 0
constexpr int MAX_SMALL = 16;              // elements of an image between these two
constexpr int NOT_REPRESENTABLE = -1;

// What a sum of scaled products must be, where it is not 0, for each small element that it may have. Two numbers hold such an
// element up to 2^-36, and as much is low x low: 2^-35 times 2^15, the largest scaled number, is 2^-24 of the sum then. One
// number holds it up to 2^-25, which is 2^-11 of the sum.
constexpr float SMALL_ELEMENT_LOSS = FP16_PARTS == 2 ? 16 : 2;

// Whether one is below that, and not 0.
template <int COUNT> __device__ __forceinline__ bool any_below(const float (&sums)[COUNT], float least) {
    bool found = false;
    if (least > 0) {
        #pragma unroll
        for (float sum : sums) found |= sum != 0 && fabsf(sum) < least;
    }
    return found;
}

constexpr int MEASURE_THREADS = 256; // threads of a block that measures a filter, or a part of an image

// What a thread, a block, and then all blocks have seen of an operand.
struct alignas(16) RunningStatistics {
    float most = 0, least = INFINITY, sum = 0; // of magnitudes the largest, the least that is not 0, the sum
    float squares = 0;                         // their sum, times UNIT^2
    static constexpr float UNIT = 0x1p20f;     // so that squares of what can be held are normal numbers

    __device__ __forceinline__ void add(float x) {
        const float size = fabsf(x), scaled = x * UNIT;
        most = Max::of(most, size);
        least = fminf(least, size > 0 ? size : INFINITY);
        sum += size;
        squares = fma(scaled, scaled, squares);
    }

    __device__ __forceinline__ void merge(const RunningStatistics &other) {
        most = Max::of(most, other.most);
        least = fminf(least, other.least);
        sum += other.sum;
        squares += other.squares;
    }

    // What all threads of a warp have seen, in all of them; and of a block.
    __device__ __forceinline__ void merge_warp() {
        #pragma unroll
        for (int mask = WARP / 2; mask > 0; mask /= 2)
            merge({shuffle_xor(most, mask), shuffle_xor(least, mask), shuffle_xor(sum, mask), shuffle_xor(squares, mask)});
    }
    __device__ __forceinline__ void merge_block() {
        __shared__ Vector<float, 4> of_warp[MEASURE_THREADS / WARP];
        merge_warp();
        if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = {most, least, sum, squares};
        __syncthreads();
        *this = RunningStatistics();
        for (int i = 0; i < MEASURE_THREADS / WARP; i++) {
            const Vector<float, 4> &found = of_warp[i];
            merge({found.lane[0], found.lane[1], found.lane[2], found.lane[3]});
        }
    }

    // Statistics::up, of an operand whose elements are no smaller than `smallest`, scaled.
    __device__ __forceinline__ float up(float smallest) const {
        if (most == 0) return 1;
        const int exponent = MAX_EXPONENT + 127 - (int)(__float_as_uint(most) >> 23); // less than MIN_SCALE_EXPONENT where it is not finite
        if (exponent < MIN_SCALE_EXPONENT || exponent > MAX_SCALE_EXPONENT) return 0;
        const float up = __int_as_float(exponent + 127 << 23);
        return least * up < smallest ? 0 : up;
    }

    // Of an operand of so many elements. Share: (sum |x|)^2 / sum x^2 elements of one size would have these sums.
    __device__ __forceinline__ Statistics known(float smallest, float count) const {
        const float up = this->up(smallest), unit = up / UNIT;
        if (most == 0) return {1, 1, INFINITY, 0};
        if (up == 0) return {0, 0, 0, 0};
        return {up, 1 / up, sum * UNIT * (sum * UNIT / squares) / count, squares * unit * unit};
    }
};

static_assert(sizeof(RunningStatistics) == STATISTICS_BYTES, "as the rule counts scratch");

// Eight neighbours along the channels, scaled. The sum of their squares.
__device__ __forceinline__ float split_fp16x2(Chunk (&words)[FP16_PARTS], const float (&x)[CHUNK_ELEMENTS], float up) {
    float squares = 0;
    #pragma unroll
    for (int i = 0; i < CHUNK_ELEMENTS / 2; i++) {
        const float even = rounded(x[2 * i]) * up, odd = rounded(x[2 * i + 1]) * up;
        squares = fma(even, even, fma(odd, odd, squares));
        words[0].lane[i] = pack_half2(even, odd);
        if constexpr (FP16_PARTS == 2) {
            float of_even, of_odd;
            unpack_half2(words[0].lane[i], of_even, of_odd);
            words[1].lane[i] = pack_half2((even - of_even) / LOW, (odd - of_odd) / LOW);
        }
    }
    return squares;
}
