// What the kernels of gradients of convolutions by their weights share: stride 1, a kernel of 3 x 3, operands in terms.
// Read conv/shifted.cuh first.
//
// A block takes FILTERS filters, STAGE_CHANNELS channels, all elements of the window, and a split of the positions, which are k.
// Some warps bring STAGE_POSITIONS positions of the gradients and those of the images under their windows, in terms; three
// warpgroups multiply, each a row of the window. An element of such a row is a position further on: of the images, which
// lie as lines of a position's channels, so many lines beginning one after another are one operand.
//
// Stages run on from image to image, or, where there are STAGES_PER_IMAGE, so many begin with each image, and the rest of what lies
// between images is left out. IMAGE_PITCH is then no less than their positions.
//
// FALLBACK: of each split, which are images then, only what conv/shifted_weight_grad_fp16x2.cu has left.
#pragma once
#ifndef FALLBACK
#define FALLBACK 0
#endif
#ifndef STAGES_PER_IMAGE
#define STAGES_PER_IMAGE 0
#endif
#ifndef BIAS
#define BIAS 0
#define SUM_SHARES 8
#endif
#include "conv/shifted.cuh"

constexpr int FILTERS = 64, CONSUMERS = KH * WARPGROUP;
constexpr int PRODUCERS = 2 * WARPGROUP, THREADS = PRODUCERS + CONSUMERS, SUM_THREADS = 256; // SUM_THREADS: of a block of sum_weight_grad_splits
constexpr int SIZE = OUT_CHANNELS * IN_CHANNELS * TAPS;
constexpr int SPLIT_ELEMENTS = SIZE + BIAS * BF16X3_TERMS * OUT_CHANNELS; // with that of the bias in terms
constexpr int STAGES = 2, SUMS = KW * STAGE_CHANNELS / 2; // SUMS: of a thread
static_assert(KH == 3 && KW == 3 && STAGE_CHANNELS == 32, "what the registers are scratch_layout for");

// Lines of 64 bytes, a position's channels, whose words are buffer.
struct ImageLayout {
    static constexpr int ROWS = (STAGE_POSITIONS + REACH + 7) / 8 * 8, GROUPS = STAGE_CHANNELS / CHUNK_ELEMENTS;
    static constexpr int LINE = STAGE_CHANNELS * 2, TERM_BYTES = ROWS * LINE, SIZE = BF16X3_TERMS * TERM_BYTES; // bytes
    static __device__ __forceinline__ int offset(int term, int plane, int line) {
        return term * TERM_BYTES + line * LINE + (plane ^ line / 2 % 4) * CHUNK_BYTES;
    }
};

// What a block takes: filters and channels from the first ones on, and stages from begin to end, of images below `images`.
// FALLBACK the split's first image is `first`.
struct PositionSplit {
    int filter, channel, first = 0, begin, end, images;

    __device__ PositionSplit(int batch, int splits) : images(batch) {
        constexpr int across = (IN_CHANNELS + STAGE_CHANNELS - 1) / STAGE_CHANNELS;
        filter = blockIdx.x / across * FILTERS;
        channel = blockIdx.x % across * STAGE_CHANNELS;
        const int64_t all = FALLBACK ? batch : STAGES_PER_IMAGE > 0 ? batch * STAGES_PER_IMAGE : ceil_div(batch * IMAGE_PITCH, STAGE_POSITIONS);
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

// Writes the sums of a row of the window to w or, SPLIT, to scratch each of the parts. Pieces make NaN of infinities: what
// is not finite `recompute` (filter, channel, element of the window) computes again.
template <class Recompute> __device__ __forceinline__ void write(
    const float (&sums)[SUMS], const PositionSplit &split, int row, T *w, const Recompute &recompute) {
    #pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const int filter = split.filter + accumulator_row(i), tap = row * KW + accumulator_column(i) / STAGE_CHANNELS;
        const int channel = split.channel + accumulator_column(i) % STAGE_CHANNELS;
        if (filter >= OUT_CHANNELS || channel >= IN_CHANNELS) continue;
        const int place = SPLIT ? split_offset(filter, channel, tap) : (filter * IN_CHANNELS + channel) * TAPS + tap;
        w[blockIdx.y * (int64_t)SPLIT_ELEMENTS + place] = finite(sums[i]) ? sums[i] : recompute(filter, channel, tap);
    }
}

// w: (O, C, KH, KW), and bias, the sums of the parts: of an element SUM_SHARES threads of a block add some of them each, in their
// order.
__device__ __forceinline__ void sum_splits(T *w, T *bias, int64_t splits, const T *scratch) {
    constexpr int ELEMENTS = SUM_THREADS / SUM_SHARES; // of a block
    const int own = threadIdx.x % ELEMENTS, share = threadIdx.x / ELEMENTS;
    const int element = blockIdx.x * ELEMENTS + own;
    __shared__ T sums[SUM_SHARES][ELEMENTS];
    T sum = 0;
    if (element < SIZE + BIAS * OUT_CHANNELS) {
        #pragma unroll 8 // reads that are under way at once
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
}
