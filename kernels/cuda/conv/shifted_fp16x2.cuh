// What conv/shifted_fp16x2.cu and the launches before it share: convolutions of operands in halves, see conv/fp16x2.cuh. A window never
// leaves its image, so a sum has one scale. What halves leave to pieces:
// - images, and the filters with them, that are not held, infinity and NaN among their elements;
// - sums of few products, or of few large ones (Known::share), of which a chain of multiply-adds rounds next to nothing;
// - MARKED positions whose sums are small beside the products, by the root of the mean squares: where products cancel,
//   the bits show that are missing;
// - such with a sum that is small beside what small elements of an image have lost.
// Of rounded operands only the last of these reasons is left, and what is not held.
#pragma once
constexpr int TEAMS = 2, COLUMNS = 144, BRINGING = 128, GATHERERS = TEAMS * 32; // a warp for each team
#include "conv/shifted_tiles.cuh"
#include "conv/packed_images.cuh"

typedef HalfWeights OfWeights;

constexpr int SKIPPED = FRONT - BEFORE; // of a tile's lines, not needed
static_assert(!STACKED, "at least 33 filters");
static_assert(CHANNELS == OF_LINE && TILE % 8 == 0, "a stage has whole lines, whose words are exchanged alike");

// Lines in shared memory.
struct OfImages {
    static constexpr int LINES = (SKIPPED + TILE + REACH + 7) / 8 * 8;
    static constexpr int NUMBER = LINES * LINE, SIZE = NUMBERS * NUMBER; // bytes
};

#ifdef WEIGHT_BYTES
static_assert(WEIGHT_BYTES >= (int64_t)BLOCKS * CHUNKS * TAPS * PieceWeights::SIZE, "scratch");
static_assert(FP16_WEIGHT_BYTES >= (int64_t)BLOCKS * CHUNKS * TAPS * HalfWeights::SIZE, "scratch");
#endif

// The images, in scratch behind what is made on the way.
__device__ __forceinline__ Laid laid_images(const Made &made, int batch) {
    char *behind = aligned_to_lines(made.marks + parts(batch * IMAGE, TILE) * (TILE / MARKED) * BLOCKS);
    return Laid(behind, batch, IN_CHANNELS, FRONT);
}
