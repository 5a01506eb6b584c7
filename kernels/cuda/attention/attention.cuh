// Scaled dot-product attention: what the kernels by FMA (fma.cu, any dtype) and by mma.sync (mma_*.cu, float32) share. Those
// by WGMMA have wgmma_attention.cuh. T. Dao, "FlashAttention-2", 2023.
//
// A block computes the results of a tile of queries of one head and loops over tiles of keys, or the other way round. No array
// of queries x keys is stored.
//
// by_q, by_k, by_v and by_scores: the cotangents of q, k, v and the scores. In kernels the arrays of k begin `step` elements after
// their pointers, and those of v 2 step elements.
//
// Macros of both forms: WIDTH (of a head), CAUSAL, MASKED, STARTS and DROPOUT (0 or 1), MANTISSA (common/rounding.cuh).
#pragma once
#include "common/collectives.cuh"
#include "common/common.cuh"
#include "common/rounding.cuh"

extern __shared__ __align__(16) unsigned char shared_bytes[];

// Optional arguments that are absent. A present one is a kernel parameter of the same name.
#if !MASKED
constexpr const bool *mask = nullptr;
#endif
#if !STARTS
constexpr const int32_t *starts = nullptr;
#endif
#if !DROPOUT
constexpr const uint32_t *rng = nullptr;
#endif

// A head and the options of the attention. Head `number` is head number % heads of example number / heads; `batch` of a kernel
// counts the heads of all examples. An array in memory is [example][query or key][head][WIDTH], with `row` elements between
// the rows of q, k and v, and `out_row` between those of the output. `starts`: the first key of each query of the example. They
// do not decrease, so a tile of queries has its first key from its first query.
struct Head {
    const bool *mask;
    const int32_t *starts;
    const uint32_t *rng;
    int64_t number, heads, queries, keys, row, out_row;
    T scale, keep_scale;
    float dropout;
    uint32_t stream;

    // The offset of this head in an array of `length` rows for each example.
    __device__ __forceinline__ int64_t before(int64_t length, int64_t row) const {
        return number / heads * length * row + number % heads * WIDTH;
    }

    __device__ __forceinline__ bool attends(int64_t query, int64_t key) const {
        return key < keys && (!CAUSAL || key <= query) && (!MASKED || mask[number * keys + key]) && key >= first_key(query);
    }

    // The first key that a query attends to; 0 past the last query.
    __device__ __forceinline__ int64_t first_key(int64_t query) const {
        if (!STARTS || query >= queries) return 0;
        const int64_t found = starts[query];
        return found < 0 ? 0 : found < query ? found : query;
    }

    // The factor of a probability by dropout: 0 or 1 / (1 - dropout).
    __device__ __forceinline__ T kept(int64_t query, int64_t key) const {
        if (!DROPOUT) return 1;
        const uint64_t element = ((uint64_t)number * queries + query) * keys + key;
        uint32_t words[4];
        philox(rng, stream, (uint32_t)(element / 4), words);
        const int k = element % 4;
        const uint32_t word = k == 0 ? words[0] : k == 1 ? words[1] : k == 2 ? words[2] : words[3];
        return (float)(word >> 8) * (float)(1.0 / (1 << 24)) < dropout ? (T)0 : keep_scale;
    }
};

// The head with this number. Neighbouring blocks compute one tile of neighbouring heads.
__device__ __forceinline__ Head head_of(const bool *mask, const int32_t *starts, const uint32_t *rng, int64_t number,
    int64_t heads, int64_t queries, int64_t keys, int64_t row, int64_t out_row, double scale, double dropout, int64_t stream) {
    const int32_t *const own_starts = starts ? starts + number / heads * queries : nullptr;
    return {mask, own_starts, rng, number, heads, queries, keys, row, out_row, (T)scale, (T)(1 / (1 - dropout)), (float)dropout,
        (uint32_t)stream};
}
