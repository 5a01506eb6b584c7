// Halves: a float32, scaled by a power of two, as two float16 numbers, high + low / 2^11, three products of which make up
// one of float32. Each image and each filter has a scale of its own, which its largest element takes to 2^14 or up to
// twice that. Of operands that are rounded to 10 bits of mantissa or fewer high is all there is, and one product (NUMBERS).
//
// A normal number of float16 keeps at least 22 bits, or all of a rounded one, and no product of such is more than 2^-20.4
// off, in the root of the mean square 2^-23.8. Filters are held where all elements are zero or such numbers; images may
// have MOST_SMALL smaller ones, where no sum is below what these may have cost (`Laid::small`).
#pragma once
#include "common/collectives.cuh"
#include "conv/shifted.cuh"
#include "sm90/fp16x2.cuh"
#include "sm90/tma.cuh"

#ifndef STATISTICS_BYTES
#define STATISTICS_BYTES 16
#endif
constexpr int NUMBERS = MANTISSA > 10 ? 2 : 1;
constexpr float LOW = 0x1p-11f; // the unit of low
// Products that a sum must have on average, see Known::share. The mean square of sums must be a LEAST-th of the sum of the
// mean squares of their products. Rounded operands lose no bits that would show in few products, or where these cancel.
constexpr float FEW = NUMBERS == 2 ? 8 : 0x1p-64f, LEAST = 8;

// What is known of an image, or of a filter.
struct alignas(16) Known {
    float up, down; // its scale, a power of two, and one over that
    float share;    // elements of one size that would count as its own do: of an image as a part of all, of a filter how
                    // many; 0 where it is not held
    float squares;  // of its scaled elements, their sum
};

static_assert(sizeof(Known) == STATISTICS_BYTES, "as the rule counts scratch");

constexpr int TOP = 14;                     // the largest element is scaled to 2^TOP
constexpr int LEAST_UP = -16, MOST_UP = 89; // exponents of a scale
constexpr float NORMAL = 0x1p-14f;          // the least normal number of float16
constexpr float TINY = 0x1p-24f;            // the least number of all, of what `high` is not 0
constexpr int MOST_SMALL = 16;              // elements of an image between these two
constexpr int NOT_HELD = -1;

// What a sum of scaled products must be, where it is not 0, for each small element that it may have. Two numbers hold such an
// element up to 2^-36, and as much is low x low: 2^-35 times 2^15, the largest scaled number, is 2^-24 of the sum then. One
// number holds it up to 2^-25, which is 2^-11 of the sum.
constexpr float FOR_SMALL = NUMBERS == 2 ? 16 : 2;

// Whether one is below that, and not 0.
template <int COUNT> __device__ __forceinline__ bool any_below(const float (&sums)[COUNT], float least) {
    bool found = false;
    if (least > 0) {
        #pragma unroll
        for (float sum : sums) found |= sum != 0 && fabsf(sum) < least;
    }
    return found;
}

constexpr int MEASURING = 256; // threads of a block that measures a filter, or a part of an image

// What a thread, a block, and then all blocks have seen of an operand.
struct alignas(16) Measured {
    float most = 0, least = INFINITY, sum = 0; // of magnitudes the largest, the least that is not 0, the sum
    float squares = 0;                         // their sum, times UNIT^2
    static constexpr float UNIT = 0x1p20f;     // so that squares of what can be held are normal numbers

    __device__ __forceinline__ void see(float x) {
        const float size = fabsf(x), scaled = x * UNIT;
        most = Max::of(most, size);
        least = fminf(least, size > 0 ? size : INFINITY);
        sum += size;
        squares = fma(scaled, scaled, squares);
    }

    __device__ __forceinline__ void join(const Measured &other) {
        most = Max::of(most, other.most);
        least = fminf(least, other.least);
        sum += other.sum;
        squares += other.squares;
    }

    // What all threads of a warp have seen, in all of them; and of a block.
    __device__ __forceinline__ void join_warp() {
        #pragma unroll
        for (int mask = WARP / 2; mask > 0; mask /= 2)
            join({shuffle_xor(most, mask), shuffle_xor(least, mask), shuffle_xor(sum, mask), shuffle_xor(squares, mask)});
    }
    __device__ __forceinline__ void join_block() {
        __shared__ Vector<float, 4> of_warp[MEASURING / WARP];
        join_warp();
        if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = {most, least, sum, squares};
        __syncthreads();
        *this = Measured();
        for (int i = 0; i < MEASURING / WARP; i++) {
            const Vector<float, 4> &found = of_warp[i];
            join({found.lane[0], found.lane[1], found.lane[2], found.lane[3]});
        }
    }

    // Known::up, of an operand whose elements are no smaller than `smallest`, scaled.
    __device__ __forceinline__ float up(float smallest) const {
        if (most == 0) return 1;
        const int exponent = TOP + 127 - (int)(__float_as_uint(most) >> 23); // less than LEAST_UP where it is not finite
        if (exponent < LEAST_UP || exponent > MOST_UP) return 0;
        const float up = __int_as_float(exponent + 127 << 23);
        return least * up < smallest ? 0 : up;
    }

    // Of an operand of so many elements. Share: (sum |x|)^2 / sum x^2 elements of one size would have these sums.
    __device__ __forceinline__ Known known(float smallest, float count) const {
        const float up = this->up(smallest), unit = up / UNIT;
        if (most == 0) return {1, 1, INFINITY, 0};
        if (up == 0) return {0, 0, 0, 0};
        return {up, 1 / up, sum * UNIT * (sum * UNIT / squares) / count, squares * unit * unit};
    }
};

static_assert(sizeof(Measured) == STATISTICS_BYTES, "as the rule counts scratch");

// Eight neighbours along the channels, scaled. The sum of their squares.
__device__ __forceinline__ float halve(Chunk (&words)[NUMBERS], const float (&x)[CHUNK_ELEMENTS], float up) {
    float squares = 0;
    #pragma unroll
    for (int i = 0; i < CHUNK_ELEMENTS / 2; i++) {
        const float even = rounded(x[2 * i]) * up, odd = rounded(x[2 * i + 1]) * up;
        squares = fma(even, even, fma(odd, odd, squares));
        words[0].lane[i] = pack_half2(even, odd);
        if constexpr (NUMBERS == 2) {
            float of_even, of_odd;
            unpack_half2(words[0].lane[i], of_even, of_odd);
            words[1].lane[i] = pack_half2((even - of_even) / LOW, (odd - of_odd) / LOW);
        }
    }
    return squares;
}
