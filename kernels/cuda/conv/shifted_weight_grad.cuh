// Weight gradients of stride-1 convolutions with 3 x 3 windows in bf16x3. Read conv/shifted.cuh first.
//
// A block has FILTERS filters, STAGE_CHANNELS channels, all taps, and one split of K, the positions. Producer warps load
// STAGE_POSITIONS positions of the gradients and the images that their windows read. Three consumer warpgroups multiply,
// one for each row of the window. In shared memory a row has the channels of a position, so the operand of the next tap
// in a row of the window begins one row later.
//
// STAGES_PER_IMAGE = 0: stages cover the flat index without gaps. Otherwise each image starts with a stage and has
// STAGES_PER_IMAGE stages, at most IMAGE_PITCH positions; the padding after them is skipped.
//
// FALLBACK: a split has whole images; only splits that conv/shifted_weight_grad_fp16x2.cu has marked are computed.
// NORMS: a split is an image, and the result is the squared norm of each image's gradient, which is not stored.
#pragma once
#ifndef NORMS
#define NORMS 0
#endif
#include "common/collectives.cuh"
#include "conv/shifted.cuh"

constexpr int FILTERS = 64, CONSUMERS = KH * WARPGROUP;
constexpr int PRODUCERS = 2 * WARPGROUP, THREADS = PRODUCERS + CONSUMERS, SUM_THREADS = 256;
constexpr int SIZE = OUT_CHANNELS * IN_CHANNELS * TAPS;
constexpr int SPLIT_ELEMENTS = SIZE + BIAS * BF16X3_TERMS * OUT_CHANNELS; // with the bias gradient of each term
constexpr int STAGES = 2, SUMS = KW * STAGE_CHANNELS / 2; // SUMS: accumulators of a thread
static_assert(KH == 3 && KW == 3 && STAGE_CHANNELS == 32, "registers suffice for this");

// Rows of a position's channels, 64 bytes, with the 64-byte swizzle.
struct ImageLayout {
    static constexpr int ROWS = (STAGE_POSITIONS + REACH + 7) / 8 * 8, GROUPS = STAGE_CHANNELS / CHUNK_ELEMENTS;
    static constexpr int ROW_BYTES = STAGE_CHANNELS * 2, TERM_BYTES = ROWS * ROW_BYTES,
        SIZE = BF16X3_TERMS * TERM_BYTES;
    static __device__ __forceinline__ int chunk(int term, int group, int row) {
        return term * TERM_BYTES + row * ROW_BYTES + (group ^ row / 2 % 4) * CHUNK_BYTES;
    }
};

// The split of a block: filters and channels from `filter` and `channel` on, and stages begin to end of images `first` to
// `images`.
struct PositionSplit {
    int filter, channel, first = 0, begin, end, images;

    __device__ PositionSplit(int batch, int splits) : images(batch) {
        constexpr int across = (IN_CHANNELS + STAGE_CHANNELS - 1) / STAGE_CHANNELS;
        filter = blockIdx.x / across * FILTERS;
        channel = blockIdx.x % across * STAGE_CHANNELS;
        const int64_t all = FALLBACK               ? batch
                            : STAGES_PER_IMAGE > 0 ? batch * STAGES_PER_IMAGE
                                                   : ceil_div(batch * IMAGE_PITCH, STAGE_POSITIONS);
        begin = all * blockIdx.y / splits;
        end = all * (blockIdx.y + 1) / splits;
        if (!FALLBACK) return;
        first = begin, images = end;
        begin = 0, end = ceil_div((images - first) * IMAGE_PITCH, STAGE_POSITIONS);
    }
    __device__ __forceinline__ int position(int stage) const {
        constexpr int CONSECUTIVE_STAGES = STAGES_PER_IMAGE > 0 ? STAGES_PER_IMAGE : 1 << 30;
        return (first + stage / CONSECUTIVE_STAGES) * IMAGE_PITCH + stage % CONSECUTIVE_STAGES * STAGE_POSITIONS;
    }
};

// Writes the sums of a row of the window to w or, SPLIT, to the split's sums in scratch; NORMS: the sum of the block's squares.
// Sums that are not finite are recomputed by recompute(filter, channel, tap), because bf16x3 turns infinities into NaN.
template <class Recompute> __device__ __forceinline__ void write(
    const float (&sums)[SUMS], const PositionSplit &split, int row, T *w, const Recompute &recompute) {
    IF(NORMS, T squares = 0;)
    #pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const int filter = split.filter + accumulator_row(i), tap = row * KW + accumulator_column(i) / STAGE_CHANNELS;
        const int channel = split.channel + accumulator_column(i) % STAGE_CHANNELS;
        if (filter >= OUT_CHANNELS || channel >= IN_CHANNELS) continue;
#if NORMS
        const T sum = finite(sums[i]) ? sums[i] : recompute(filter, channel, tap);
        squares = fma(sum, sum, squares);
#else
        const int offset = SPLIT ? split_offset(filter, channel, tap) : (filter * IN_CHANNELS + channel) * TAPS + tap;
        w[blockIdx.y * (int64_t)SPLIT_ELEMENTS + offset] = finite(sums[i]) ? sums[i] : recompute(filter, channel, tap);
#endif
    }
#if NORMS
    __shared__ T of_warp[CONSUMERS / WARP];
    squares = over_lanes<Sum, WARP>(squares);
    if (threadIdx.x % WARP == 0) of_warp[(threadIdx.x - PRODUCERS) / WARP] = squares;
    named_barrier_sync(CONSUMERS);
    if (threadIdx.x != PRODUCERS) return;
    #pragma unroll
    for (int i = 1; i < CONSUMERS / WARP; i++) squares += of_warp[i];
    w[blockIdx.y * gridDim.x + blockIdx.x] = squares;
#endif
}

// Sums the splits to w (O, C, KH, KW) and bias. SUM_SHARES threads share an element; each adds its splits in order. NORMS: sums
// the blocks of each image.
__device__ __forceinline__ void sum_splits(T *w, T *bias, int64_t splits, const T *scratch) {
#if NORMS
    constexpr int BLOCKS =
        (OUT_CHANNELS + FILTERS - 1) / FILTERS * ((IN_CHANNELS + STAGE_CHANNELS - 1) / STAGE_CHANNELS);
    const int image = blockIdx.x * SUM_THREADS + threadIdx.x;
    if (image >= splits) return;
    T sum = 0;
    for (int i = 0; i < BLOCKS; i++) sum += scratch[image * BLOCKS + i];
    w[image] = sum;
#else
    constexpr int ELEMENTS = SUM_THREADS / SUM_SHARES; // of a block
    const int own = threadIdx.x % ELEMENTS, share = threadIdx.x / ELEMENTS;
    const int element = blockIdx.x * ELEMENTS + own;
    __shared__ T sums[SUM_SHARES][ELEMENTS];
    T sum = 0;
    if (element < SIZE + BIAS * OUT_CHANNELS) {
        #pragma unroll 8 // loads in flight
        for (int i = splits * share / SUM_SHARES; i < splits * (share + 1) / SUM_SHARES; i++) {
            const T *split = scratch + (int64_t)i * SPLIT_ELEMENTS + element;
            sum += element < SIZE ? split[0] : split[0] + split[OUT_CHANNELS] + split[2 * OUT_CHANNELS];
        }
    }
    sums[share][own] = sum;
    __syncthreads();
    if (share > 0) return;
    #pragma unroll
    for (int i = 1; i < SUM_SHARES; i++) sum += sums[i][own];
    if (element < SIZE)
        w[element % (OUT_CHANNELS * IN_CHANNELS) * TAPS + element / (OUT_CHANNELS * IN_CHANNELS)] = sum;
    else if (element < SIZE + BIAS * OUT_CHANNELS)
        bias[element - SIZE] = sum;
#endif
}
