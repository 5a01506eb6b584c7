// What the launches of attention by WGMMA share in scratch.
//
// Macros: also BLOCK_Q and BLOCK_K: rows of a tile of queries and of a tile of keys.
#pragma once
#include "attention/wgmma_attention.cuh"

__device__ __forceinline__ int64_t rounded_up(int64_t x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

#ifdef SCRATCH_Q // forward
// The packed arrays in scratch.
struct PackedInputs {
    PackedArray q, k, v;

    __device__ __forceinline__ PackedInputs(char *scratch, int64_t batch, int64_t queries, int64_t keys) {
        const int64_t of_q = rounded_up(queries, BLOCK_Q), of_k = rounded_up(keys, BLOCK_K);
        const int64_t q_rows = batch * of_q, k_rows = batch * of_k; // of all heads
        q = {SCRATCH_Q(char, scratch, q_rows, k_rows), of_q}, k = {SCRATCH_K(char, scratch, q_rows, k_rows), of_k};
        v = {SCRATCH_V(char, scratch, q_rows, k_rows), of_k};
    }
};
#else
constexpr int BY_Q_TILE = BLOCK_Q * PACKED_WIDTH; // elements
// In fp16x2: the rows with one scale, and the exponent of the scale of probabilities.
constexpr int GROUP = 64, PROBABILITY_EXPONENT = OPERAND_TERMS == 2 ? 14 : 0;
// Numbers of a tile in `stats` that are not of a row: two, padded to the 16 bytes of bulk copies. All numbers of a tile.
constexpr int SCALES = OPERAND_TERMS == 2 ? 4 : 0, STATS = 2 * BLOCK_Q + SCALES;

// The gradient in three launches: attention_pack_grad packs q, k, v and the cotangent, and computes the statistics of queries;
// attention_wgmma_grad computes the cotangents of keys and values, and adds up those of the queries; attention_unpack_grad
// writes the latter. A row that does not exist has an infinite shift, so its probabilities are 0.
struct GradientScratch {
    PackedArray q, k, v, ct;
    // For each tile of queries: the shifts of its rows, logsumexp * log2(e) - PROBABILITY_EXPONENT; their deltas, the sums of
    // ct * out; in fp16x2 the inverses of the scales of q and ct.
    float *stats;
    float *by_q;     // for each tile of queries the accumulators of its sums, thread by thread
    float *inverses; // in fp16x2: for each GROUP keys the inverses of the scales of k and v
    int *turns;      // for each tile of queries how often sums have been added

    __device__ __forceinline__ GradientScratch(char *scratch, int64_t batch, int64_t queries, int64_t keys) {
        q = {scratch, rounded_up(queries, BLOCK_Q)};
        ct = {q.end(batch), q.rows};
        k = {ct.end(batch), rounded_up(keys, BLOCK_K)};
        v = {k.end(batch), k.rows};
        stats = (float *)v.end(batch), by_q = stats + 2 * batch * q.rows + batch * q.rows / BLOCK_Q * SCALES;
        inverses = by_q + batch * q.rows * PACKED_WIDTH;
        turns = (int *)(inverses + (OPERAND_TERMS == 2 ? batch * k.rows / GROUP * 2 : 0));
    }
    // The number, among the tiles of all heads, of the tile of queries from `first` on.
    __device__ __forceinline__ int64_t tile(int64_t head, int64_t first) const {
        return (head * q.rows + first) / BLOCK_Q;
    }
    // Writes the shift and the delta of a query.
    __device__ __forceinline__ void set_stats(
        int64_t head, int64_t query, int64_t queries, const T *logsumexp, float delta) const {
        float *const of_query = stats + tile(head, query) * STATS + query % BLOCK_Q;
        const bool exists = query < queries;
        of_query[0] = exists ? logsumexp[head * queries + query] * LOG2_E - PROBABILITY_EXPONENT : INFINITY;
        of_query[BLOCK_Q] = delta;
    }
};
#endif
