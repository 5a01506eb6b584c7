// Halves: a float32, scaled by a power of two, as two float16 numbers, high + low / 2^11, three products of which make up
// one of float32. Each image and each filter has a scale of its own, which its largest element takes to 2^14 or up to
// twice that; a window never leaves its image.
//
// An operand is held where all its elements are zero or normal numbers of float16: then each of them keeps at least 22
// bits, and no product is more than 2^-20.4 off, in the root of the mean square 2^-23.8. What that leaves to pieces:
// - images, and the filters with them, that are not held, infinity and NaN among their elements;
// - sums of few products, or of few large ones (Known::share), of which a chain of multiply-adds rounds next to nothing;
// - MARKED positions whose sums are small beside the products, by the root of the mean squares: where products cancel,
//   the bits show that are missing.
#pragma once
constexpr int TEAMS = 3, COLUMNS = 96, BRINGING = 256;
#include "conv_planes.cuh"
#include "group.cuh"

constexpr float LOW = 0x1p-11f;     // the unit of low
constexpr float FEW = 8, LEAST = 8; // products, see Known::share; of squares of products to one of their sums'
typedef HalfWeights OfWeights;

// Eight neighbours along the channels, scaled. The sum of their squares.
__device__ __forceinline__ float halve(Word (&words)[2], const float (&x)[GROUP_OF], float up) {
    float squares = 0;
    #pragma unroll
    for (int i = 0; i < GROUP_OF / 2; i++) {
        const float even = x[2 * i] * up, odd = x[2 * i + 1] * up;
        squares = fma(even, even, fma(odd, odd, squares));
        float of_even, of_odd;
        words[0].lane[i] = rounded_halves(even, odd);
        as_floats(words[0].lane[i], of_even, of_odd);
        words[1].lane[i] = rounded_halves((even - of_even) / LOW, (odd - of_odd) / LOW);
    }
    return squares;
}
