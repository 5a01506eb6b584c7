// What the kernels of gradients of convolutions by their weights share: stride 1, a kernel of 3 x 3, operands in pieces.
// Read conv/shifted.cuh first.
//
// A block takes FILTERS filters, CHANNELS channels, all elements of the window, and a part of the positions, which are k.
// Some warps bring POSITIONS positions of the gradients and those of the images under their windows, in pieces; three
// warpgroups multiply, each a row of the window. An element of such a row is a position further on: of the images, which
// lie as lines of a position's channels, so many lines beginning one after another are one operand.
//
// Stages run on from image to image, or, where there are OF_IMAGE, so many begin with each image, and the rest of what lies
// between images is left out. IMAGE is then no less than their positions.
//
// REST: of each part, which are images then, only what conv/shifted_weight_grad_fp16x2.cu has left.
#pragma once
#ifndef REST
#define REST 0
#endif
#ifndef OF_IMAGE
#define OF_IMAGE 0
#endif
#ifndef BIAS
#define BIAS 0
#define SHARES 8
#endif
#include "conv/shifted.cuh"

constexpr int FILTERS = 64, CONSUMERS = KH * WARPGROUP;
constexpr int BRINGING = 2 * WARPGROUP, THREADS = BRINGING + CONSUMERS, SUMMING = 256; // SUMMING: of a block of sum_parts
constexpr int SIZE = OUT_CHANNELS * IN_CHANNELS * TAPS;
constexpr int PART = SIZE + BIAS * BF16X3_TERMS * OUT_CHANNELS; // with that of the bias in pieces
constexpr int STAGES = 2, SUMS = KW * CHANNELS / 2; // SUMS: of a thread
static_assert(KH == 3 && KW == 3 && CHANNELS == 32, "what the registers are made for");

// Lines of 64 bytes, a position's channels, whose words are exchanged.
struct OfImages {
    static constexpr int LINES = (POSITIONS + REACH + 7) / 8 * 8, PLANES = CHANNELS / CHUNK_ELEMENTS;
    static constexpr int LINE = CHANNELS * 2, PIECE = LINES * LINE, SIZE = BF16X3_TERMS * PIECE; // bytes
    static __device__ __forceinline__ int offset(int piece, int plane, int line) {
        return piece * PIECE + line * LINE + (plane ^ line / 2 % 4) * CHUNK_BYTES;
    }
};

struct Stages {
    Mbarrier full[STAGES], empty[STAGES];

    __device__ void init() {
        for (int i = 0; i < STAGES; i++) {
            full[i].init(BRINGING / WARP);
            empty[i].init(CONSUMERS / WARP);
        }
        fence_mbarrier_init();
    }
};

// What a block takes: filters and channels from the first ones on, and stages from begin to end, of images below `images`.
// REST the part's first image is `first`.
struct Part {
    int filter, channel, first = 0, begin, end, images;

    __device__ Part(int batch, int splits) : images(batch) {
        constexpr int across = (IN_CHANNELS + CHANNELS - 1) / CHANNELS;
        filter = blockIdx.x / across * FILTERS;
        channel = blockIdx.x % across * CHANNELS;
        const int64_t all = REST ? batch : OF_IMAGE > 0 ? batch * OF_IMAGE : parts(batch * IMAGE, POSITIONS);
        begin = all * blockIdx.y / splits;
        end = all * (blockIdx.y + 1) / splits;
        if (!REST) return;
        first = begin, images = end;
        begin = 0, end = parts((images - first) * IMAGE, POSITIONS);
    }
    __device__ __forceinline__ int position(int stage) const {
        constexpr int IN_A_ROW = OF_IMAGE > 0 ? OF_IMAGE : 1 << 30;
        return (first + stage / IN_A_ROW) * IMAGE + stage % IN_A_ROW * POSITIONS;
    }
};

// Writes the sums of a row of the window to w or, SPLIT, to scratch each of the parts. Pieces make NaN of infinities: what
// is not finite `plain` (filter, channel, element of the window) computes again.
template <class Plain> __device__ __forceinline__ void write(
    const float (&sums)[SUMS], const Part &part, int row, T *w, const Plain &plain) {
    #pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const int filter = part.filter + accumulator_row(i), tap = row * KW + accumulator_column(i) / CHANNELS;
        const int channel = part.channel + accumulator_column(i) % CHANNELS;
        if (filter >= OUT_CHANNELS || channel >= IN_CHANNELS) continue;
        const int place = SPLIT ? place_in_part(filter, channel, tap) : (filter * IN_CHANNELS + channel) * TAPS + tap;
        w[blockIdx.y * (int64_t)PART + place] = finite(sums[i]) ? sums[i] : plain(filter, channel, tap);
    }
}

// w: (O, C, KH, KW), and bias, the sums of the parts: of an element SHARES threads of a block add some of them each, in their
// order.
__device__ __forceinline__ void add_parts(T *w, T *bias, int64_t splits, const T *scratch) {
    constexpr int ELEMENTS = SUMMING / SHARES; // of a block
    const int own = threadIdx.x % ELEMENTS, share = threadIdx.x / ELEMENTS;
    const int element = blockIdx.x * ELEMENTS + own;
    __shared__ T sums[SHARES][ELEMENTS];
    T sum = 0;
    if (element < SIZE + BIAS * OUT_CHANNELS) {
        #pragma unroll 8 // reads that are under way at once
        for (int i = splits * share / SHARES; i < splits * (share + 1) / SHARES; i++) {
            const T *part = scratch + (int64_t)i * PART + element;
            sum += element < SIZE ? part[0] : part[0] + part[OUT_CHANNELS] + part[2 * OUT_CHANNELS];
        }
    }
    sums[share][own] = sum;
    __syncthreads();
    if (share > 0) return;
    #pragma unroll
    for (int i = 1; i < SHARES; i++) sum += sums[i][own];
    if (element < SIZE)
        w[element % (OUT_CHANNELS * IN_CHANNELS) * TAPS + element / (OUT_CHANNELS * IN_CHANNELS)] = sum;
    else if (element < SIZE + BIAS * OUT_CHANNELS)
        bias[element - SIZE] = sum;
}
