// fp16x2 convolutions: definitions for conv/pack_images.cu and conv/shifted_fp16x2.cu, which runs after it. Read
// conv/fp16x2.cuh first. A window is inside one image, so all products of a sum have one scale. These fall back to bf16x3:
// - tiles with an image or a filter that is not representable, infinity and NaN included;
// - tiles whose sums have too few effective products (Statistics::share): sequential FMA has almost no rounding error there;
// - units of FALLBACK_POSITIONS positions whose sums are small compared with their products: cancellation exposes the bits
//   that fp16x2 has lost;
// - units with a sum that is small compared with the error of an image's small elements.
// For rounded operands only the first and the last reason apply.
#pragma once
// LOADERS: a warp for each consumer warpgroup.
constexpr int MMA_WARPGROUPS = 2, COLUMNS = 144, PRODUCERS = 128, LOADERS = MMA_WARPGROUPS * 32;
#include "conv/shifted_tiles.cuh"
#include "conv/packed_images.cuh"

typedef Fp16x2WeightLayout WeightLayout;

constexpr int SKIPPED_ROWS = LEADING_ROWS - REACH_BACK; // leading rows of a tile's stage that no window reads
static_assert(!STACKED, "at least 33 filters");
static_assert(STAGE_CHANNELS == ROW_CHANNELS && TILE % 8 == 0, "a stage has whole packed rows with one swizzle phase");

// Packed rows of one stage in shared memory.
struct ImageLayout {
    static constexpr int ROWS = (SKIPPED_ROWS + TILE + REACH + 7) / 8 * 8;
    static constexpr int TERM_BYTES = ROWS * ROW_BYTES, SIZE = FP16_TERMS * TERM_BYTES;
};

__device__ __forceinline__ PackedImages packed_images(char *scratch, int batch) {
    const unsigned marks = ceil_div(batch * IMAGE_PITCH, TILE) * (TILE / FALLBACK_POSITIONS) * FILTER_BLOCKS;
    return PackedImages(SCRATCH_PACKED(char, scratch, marks), batch, IN_CHANNELS, LEADING_ROWS);
}
