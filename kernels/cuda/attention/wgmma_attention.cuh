// Attention by WGMMA in bfloat16, and its gradient in fp16x2: what the kernels share. J. Shah et al., "FlashAttention-3", 2024.
//
// Arrays are float32 or bfloat16 in memory (S). If DIRECT they are bfloat16, and TMA reads tiles of a head as they are. Otherwise
// a first launch (wgmma_pack.cu) rounds q, k and v, and for the gradient the cotangent of the output, to
// bfloat16 and packs them into scratch. A packed array is [head][segment][row]: a segment of a row has 64 columns, 128 bytes, in
// the 128-byte swizzle. So eight rows, or any multiple, are contiguous, and one bulk copy brings them into shared memory as WGMMA
// reads them. Padding is 0. Short sequences are not packed: see wgmma_short_forward.cu.
//
// In fp16x2 (docs/gpu.md) 64 rows have one scale, and a row is split into two rows of float16, the terms.
// The first segment of a row has its high terms, the second its low terms.
//
// by_q, by_k, by_v and by_scores: the cotangents of q, k, v and the scores. In kernels the arrays of k begin `step` elements after
// their pointers, and those of v 2 step elements.
//
// Macros (wgmma.py): HEAD_WIDTH, PACKED_WIDTH (64 or 128), CAUSAL (0 or 1), DIRECT (0 or 1), OPERAND_TERMS (1: bfloat16,
// 2: fp16x2).
#pragma once
#include "common/collectives.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

typedef StoredAs<U>::type S;

constexpr int SEGMENT_WIDTH = 64, ROW_BYTES = 128; // ROW_BYTES: of a segment
constexpr int SEGMENTS = OPERAND_TERMS * PACKED_WIDTH / SEGMENT_WIDTH;
constexpr float LOG2_E = 1.4426950408889634f;

// A packed array in scratch.
struct PackedArray {
    char *at;
    int64_t rows;

    __device__ __forceinline__ char *row(int64_t head, int segment, int64_t row) const {
        return at + ((head * SEGMENTS + segment) * rows + row) * ROW_BYTES;
    }
    __device__ __forceinline__ char *end(int64_t batch) const { return at + batch * SEGMENTS * rows * ROW_BYTES; }

    // Starts to copy ROWS rows of all segments; `full` must expect TILE_BYTES<ROWS>.
    template <int ROWS> __device__ __forceinline__ void load(char *to, int64_t head, int64_t first, Mbarrier &full) const {
        #pragma unroll
        for (int segment = 0; segment < SEGMENTS; segment++)
            bulk_copy<ROWS * ROW_BYTES>(to + segment * ROWS * ROW_BYTES, row(head, segment, first), full);
    }
};

// An array as it is in memory, of which TMA loads rows of a head. A row has the heads of an example.
struct ArrayOfHeads {
    const TensorMap &map;
    int heads;

    // The same as PackedArray::load.
    template <int ROWS> __device__ __forceinline__ void load(char *to, int head, int first, Mbarrier &full) const {
        #pragma unroll
        for (int segment = 0; segment < SEGMENTS; segment++)
            map.load(to + segment * ROWS * ROW_BYTES, head % heads * HEAD_WIDTH + segment * SEGMENT_WIDTH, first, head / heads,
                full);
    }
};

// Bytes of a tile in shared memory: its segments one after another.
template <int ROWS> constexpr int TILE_BYTES = ROWS * SEGMENTS * ROW_BYTES;

// By the producer thread: starts to copy ROWS rows of an array, from `first` on, to a stage of `tiles`.
template <int ROWS, class Array, int STAGES> __device__ __forceinline__ void load_stage(const Array &array,
    Pipeline<STAGES> &pipeline, const PipelineState<STAGES> &at, char *tiles, int64_t head, int64_t first) {
    Mbarrier &full = pipeline.expect(at, TILE_BYTES<ROWS>);
    array.template load<ROWS>(tiles + at.stage * TILE_BYTES<ROWS>, head, first, full);
}

// Descriptors of operands in a tile of ROWS rows. along_width: the width is K, and rows from `first` (a multiple of eight) on
// are M or N. along_rows: the rows are K, and the width is M or N. `i`: the step of 16 along K.
template <int ROWS> __device__ __forceinline__ uint64_t along_width(const char *tile, int i, int first = 0) {
    return smem_descriptor(tile) + ((i / 4 * ROWS + first) * ROW_BYTES >> 4) + i % 4 * DESCRIPTOR_K_STEP;
}
template <int ROWS> __device__ __forceinline__ uint64_t along_rows(const char *tile, int i) {
    return smem_descriptor(tile, ROWS * ROW_BYTES, 8 * ROW_BYTES, SWIZZLE_128B) + (i * 16 * ROW_BYTES >> 4);
}

// By a warpgroup: starts scores = a times the transpose of b, along the width, for 64 rows of `a` from `first` on.
template <int ROWS_A, int ROWS_B, int SCORES>
__device__ __forceinline__ void start_scores(float (&scores)[SCORES], const char *a, int first, const char *b) {
    wgmma_fence();
    #pragma unroll
    for (int i = 0; i < PACKED_WIDTH / 16; i++)
        wgmma<BFLOAT16>(scores, along_width<ROWS_A>(a, i, first), along_width<ROWS_B>(b, i), i > 0);
    wgmma_commit_group();
}
// Starts sums = (add ? sums : 0) + weights tile, where `weights` has the words of a tile of scores.
template <int ROWS, int SUMS, int WORDS> __device__ __forceinline__ void start_sums(
    float (&sums)[SUMS], const uint32_t (&weights)[WORDS], const char *tile, bool add) {
    wgmma_fence();
    #pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
        wgmma_registers<BFLOAT16, true>(sums, weights + 4 * i, along_rows<ROWS>(tile, i), add || i > 0);
    wgmma_commit_group();
}

// Accumulators as the bfloat16 operand A of the next product.
template <int SUMS> __device__ __forceinline__ void to_bfloat16(const float (&sums)[SUMS], uint32_t (&words)[SUMS / 2]) {
    #pragma unroll
    for (int i = 0; i < SUMS / 2; i++) words[i] = Format<BFLOAT16>::packed(sums[2 * i], sums[2 * i + 1]);
}

// The number of the tile that this block computes in a round of all blocks. Causal tiles are numbered from the longest to the
// shortest. Every second round gives them to the blocks in reverse, so that all blocks get about the same work.
__device__ __forceinline__ int tile_of_round(int round) {
    const int blocks = gridDim.x, block = blockIdx.x;
    return round * blocks + (CAUSAL && round % 2 == 1 ? blocks - 1 - block : block);
}

// Stores two neighbouring elements of a row of HEAD_WIDTH elements.
__device__ __forceinline__ void store_pair(S *row, int column, float first, float second) {
    if constexpr (HEAD_WIDTH % 2 == 0) {
        if (column < HEAD_WIDTH) store(row, column, Vector<S, 2>{{S(first), S(second)}});
    } else {
        if (column < HEAD_WIDTH) row[column] = S(first);
        if (column + 1 < HEAD_WIDTH) row[column + 1] = S(second);
    }
}

// The softmax of attention by WGMMA, on accumulators: 64 queries of a warpgroup, some keys at a time.

constexpr int OUTPUTS = PACKED_WIDTH / 2; // accumulators of a thread

// Excludes keys that do not exist or come after a row's query: rows are queries from `first` on, columns keys from `begin` on.
template <int SCORES>
__device__ __forceinline__ void mask(float (&scores)[SCORES], int first, int begin, int keys) {
    const int end = begin + 2 * SCORES;
    if (end <= keys && (!CAUSAL || end <= first + 1)) return;
    #pragma unroll
    for (int i = 0; i < SCORES; i++) {
        const int last = CAUSAL ? min(keys, first + accumulator_row(i) + 1) : keys;
        if (accumulator_column(i) >= last - begin) scores[i] = -INFINITY;
    }
}

// The running softmax of two rows: maximum of the scores, this thread's part of the sum, factor of what was summed before.
template <int SCORES> struct RunningSoftmax {
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, factor[2];

    // Turns scores into probabilities up to the factor 1 / sum. `scale` includes log2(e).
    __device__ __forceinline__ void update(float (&scores)[SCORES], float scale) {
        float shift[2];
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            float highest = top[r];
            #pragma unroll
            for (int i = 0; i < SCORES; i++)
                if (i / 2 % 2 == r) highest = fmaxf(highest, scores[i]);
            highest = fmaxf(highest, shuffle_xor(highest, 1));
            highest = fmaxf(highest, shuffle_xor(highest, 2));
            shift[r] = highest == -INFINITY ? 0 : highest * scale; // no key yet
            factor[r] = exp2_approximate(top[r] * scale - shift[r]);
            top[r] = highest;
            sum[r] *= factor[r];
        }
        #pragma unroll
        for (int i = 0; i < SCORES; i++) {
            scores[i] = exp2_approximate(scores[i] * scale - shift[i / 2 % 2]);
            sum[i / 2 % 2] += scores[i];
        }
    }
    __device__ __forceinline__ void rescale(float (&outputs)[OUTPUTS]) const {
        #pragma unroll
        for (int i = 0; i < OUTPUTS; i++) outputs[i] *= factor[i / 2 % 2];
    }
    // Stores the outputs and the logsumexp of 64 queries from `first` on. A query without a key gets 0 and infinity.
    __device__ __forceinline__ void store_results(const float (&outputs)[OUTPUTS], float scale, int first, int queries, S *out,
        int64_t out_row, T *logsumexp) const {
        const float sums[] = {over_lanes<Sum, 4>(sum[0]), over_lanes<Sum, 4>(sum[1])};
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const int query = first + accumulator_row(2 * r);
            if (query >= queries) continue;
            const float inverse = sums[r] == 0 ? 0 : 1 / sums[r];
            if (threadIdx.x % 4 == 0)
                logsumexp[query] = sums[r] == 0 ? INFINITY : logf(sums[r]) + top[r] * (scale / LOG2_E);
            #pragma unroll
            for (int i = 2 * r; i < OUTPUTS; i += 4)
                store_pair(out + query * out_row, accumulator_column(i), outputs[i] * inverse, outputs[i + 1] * inverse);
        }
    }
};
