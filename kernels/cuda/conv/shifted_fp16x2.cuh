// What conv/shifted_fp16x2.cu and the launches before it share: convolutions of operands in halves, see conv/fp16x2.cuh. A window never
// leaves its image, so a sum has one scale. What halves leave to pieces:
// - images, and the filters with them, that are not held, infinity and NaN among their elements;
// - sums of few products, or of few large ones (Statistics::share), of which a chain of multiply-adds rounds next to nothing;
// - FALLBACK_POSITIONS positions whose sums are small beside the products, by the root of the mean squares: where products cancel,
//   the bits show that are missing;
// - such with a sum that is small beside what small elements of an image have lost.
// Of rounded operands only the last of these reasons is left, and what is not held.
#pragma once
constexpr int MMA_WARPGROUPS = 2, COLUMNS = 144, PRODUCERS = 128, LOADERS = MMA_WARPGROUPS * 32; // a warp for each warpgroup
#include "conv/shifted_tiles.cuh"
#include "conv/packed_images.cuh"

typedef Fp16x2WeightLayout WeightLayout;

constexpr int SKIPPED_ROWS = LEADING_ROWS - REACH_BACK; // of a tile's lines, not needed
static_assert(!STACKED, "at least 33 filters");
static_assert(STAGE_CHANNELS == ROW_CHANNELS && TILE % 8 == 0, "a stage has whole lines, whose words are buffer alike");

// Lines in shared memory.
struct ImageLayout {
    static constexpr int ROWS = (SKIPPED_ROWS + TILE + REACH + 7) / 8 * 8;
    static constexpr int NUMBER = ROWS * ROW_BYTES, SIZE = FP16_PARTS * NUMBER; // bytes
};

#ifdef WEIGHT_BYTES
static_assert(WEIGHT_BYTES >= (int64_t)FILTER_BLOCKS * CHANNEL_BLOCKS * TAPS * Bf16x3WeightLayout::SIZE, "scratch");
static_assert(FP16_WEIGHT_BYTES >= (int64_t)FILTER_BLOCKS * CHANNEL_BLOCKS * TAPS * Fp16x2WeightLayout::SIZE, "scratch");
#endif

// The images, in scratch behind what is made on the way.
__device__ __forceinline__ PackedImages laid_images(const ConvScratch &made, int batch) {
    char *behind = align_1024(made.marks + ceil_div(batch * IMAGE_PITCH, TILE) * (TILE / FALLBACK_POSITIONS) * FILTER_BLOCKS);
    return PackedImages(behind, batch, IN_CHANNELS, LEADING_ROWS);
}
