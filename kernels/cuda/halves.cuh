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
constexpr int TEAMS = 3, COLUMNS = 96, BRINGING = 128;
#include "conv_planes.cuh"
#include "group.cuh"

constexpr float LOW = 0x1p-11f;     // the unit of low
constexpr float FEW = 8, LEAST = 8; // products, see Known::share; of squares of products to one of their sums'
typedef HalfWeights OfWeights;

// The images in halves as conv_halves.cu copies them. A line has the CHANNELS channels of a position, 64 bytes whose words
// are exchanged; for each of both numbers, and each chunk of channels, lie those of all positions one after another,
// zeros before and behind them, so that a tile's lines are one piece of memory.
constexpr int LINE = CHANNELS * 2, WORDS = LINE / WORD; // bytes
constexpr int FRONT = (BEFORE + 7) / 8 * 8, SKIPPED = FRONT - BEFORE; // lines before position 0; of a tile's, not needed
constexpr int LAID = 64; // lines that a block of lay_halves.cu takes
static_assert(LINE == 64, "lines that are exchanged so");
__device__ __forceinline__ int exchanged_word(int line, int word) { return word ^ line / 2 % WORDS; }

// In shared memory.
struct OfImages {
    static constexpr int LINES = (SKIPPED + TILE + REACH + 7) / 8 * 8, NUMBER = LINES * LINE, SIZE = 2 * NUMBER; // bytes
};

// In scratch, behind what is made on the way.
struct Lines {
    int count;      // for each number and chunk
    char *first;
    float *squares; // of a line's scaled elements, their sum

    __device__ Lines(const Made &made, int batch) {
        const int tiles = parts(batch * IMAGE, TILE);
        count = parts((tiles - 1) * TILE + OfImages::LINES, LAID) * LAID;
        first = (char *)(((uintptr_t)(made.marks + tiles * TILE / MARKED * BLOCKS) + 1023) / 1024 * 1024);
        squares = (float *)at(2, 0, 0);
    }
    __device__ __forceinline__ char *at(int number, int chunk, int line) const {
        return first + ((int64_t)(number * CHUNKS + chunk) * count + line) * LINE;
    }
};

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
