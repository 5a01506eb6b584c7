// The softmax of attention by WGMMA, on accumulators: 64 queries of a warpgroup, some keys at a time.
#pragma once
#include "attention/wgmma_attention.cuh"

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
