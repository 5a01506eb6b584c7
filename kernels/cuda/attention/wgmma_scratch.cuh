// What the launches of attention in bfloat16 by WGMMA share in scratch.
//
// Macros: also BLOCK_Q and BLOCK_K: rows of a tile of queries and of a tile of keys.
#pragma once
#include "attention/wgmma_attention.cuh"

__device__ __forceinline__ int64_t rounded_up(int64_t x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// The packed arrays in scratch, one after another: q, k, v.
struct PackedInputs {
    PackedArray q, k, v;

    __device__ __forceinline__ PackedInputs(char *scratch, int64_t batch, int64_t queries, int64_t keys) {
        q = {scratch, rounded_up(queries, BLOCK_Q)};
        k = {q.end(batch), rounded_up(keys, BLOCK_K)};
        v = {k.end(batch), k.rows};
    }
};

constexpr int BY_Q_TILE = BLOCK_Q * PACKED_WIDTH; // elements

// The gradient in three launches: attention_pack_grad packs q, k, v and the cotangent, and computes the statistics of queries;
// attention_wgmma_grad computes the cotangents of keys and values, and adds up those of the queries; attention_unpack_grad
// writes the latter. A row that does not exist has an infinite logsumexp, so its probabilities are 0.
struct GradientScratch {
    PackedArray q, k, v, ct;
    float *stats; // for each tile of queries logsumexp * log2(e) of its rows, then delta: the sum of ct * out
    float *by_q;  // for each tile of queries the accumulators of its sums, thread by thread
    int *turns;   // for each tile of queries the number of key tiles that have been added

    __device__ __forceinline__ GradientScratch(char *scratch, int64_t batch, int64_t queries, int64_t keys) {
        q = {scratch, rounded_up(queries, BLOCK_Q)};
        ct = {q.end(batch), q.rows};
        k = {ct.end(batch), rounded_up(keys, BLOCK_K)};
        v = {k.end(batch), k.rows};
        stats = (float *)v.end(batch), by_q = stats + 2 * batch * q.rows;
        turns = (int *)(by_q + batch * q.rows * PACKED_WIDTH);
    }
    // The number, among the tiles of all heads, of the tile of queries from `first` on.
    __device__ __forceinline__ int64_t tile(int64_t head, int64_t first) const {
        return (head * q.rows + first) / BLOCK_Q;
    }
};
