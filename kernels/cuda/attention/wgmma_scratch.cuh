// What the launches of attention by WGMMA share in scratch.
//
// Macros: also BLOCK_Q and BLOCK_K: rows of a tile of queries and of a tile of keys.
#pragma once
#include "attention/wgmma_attention.cuh"

__device__ __forceinline__ int64_t rounded_up(int64_t x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// The tensor maps of a block.
struct HeadMaps {
    TensorMap q, k, v, ct;
};
static_assert(sizeof(HeadMaps) == 512, "MAPS_BYTES of wgmma.py");

// Makes the map of an array in shared memory, by a warp: BLOCK_ROWS rows of a head, of `batch` heads with `length` rows each.
template <int BLOCK_ROWS> __device__ __forceinline__ void make_map(
    TensorMap &map, const S *from, int64_t batch, int64_t heads, int64_t length, int64_t row) {
    map.make((const uint16_t *)from, row, length, batch / heads, BLOCK_ROWS);
}

#if defined(SCRATCH_Q) || defined(SCRATCH_MAPS) // forward
#if DIRECT
// The arrays in memory. In scratch are the tensor maps of each block, which warp 0 copies from shared memory.
struct Inputs {
    ArrayOfHeads q, k, v;

    __device__ __forceinline__ Inputs(HeadMaps &maps, const HeadMaps &in_shared, int heads)
        : q{maps.q, heads}, k{maps.k, heads}, v{maps.v, heads} {
        maps.q.copy_from(in_shared.q), maps.k.copy_from(in_shared.k), maps.v.copy_from(in_shared.v);
    }
};
#else
// The packed arrays in scratch.
struct Inputs {
    PackedArray q, k, v;

    __device__ __forceinline__ Inputs(char *scratch, int64_t batch, int64_t queries, int64_t keys) {
        const int64_t of_q = rounded_up(queries, BLOCK_Q), of_k = rounded_up(keys, BLOCK_K);
        const int64_t q_rows = batch * of_q, k_rows = batch * of_k; // of all heads
        q = {SCRATCH_Q(char, scratch, q_rows, k_rows), of_q}, k = {SCRATCH_K(char, scratch, q_rows, k_rows), of_k};
        v = {SCRATCH_V(char, scratch, q_rows, k_rows), of_k};
    }
};
#endif
#else
constexpr int BY_Q_TILE = BLOCK_Q * PACKED_WIDTH; // elements
// In fp16x2: the rows with one scale, and the exponent of the scale of probabilities.
constexpr int GROUP = 64, PROBABILITY_EXPONENT = OPERAND_TERMS == 2 ? 14 : 0;
// Numbers of a tile in `stats` that are not of a row: two, padded to the 16 bytes of bulk copies. All numbers of a tile.
constexpr int SCALES = OPERAND_TERMS == 2 ? 4 : 0, STATS = 2 * BLOCK_Q + SCALES;

// The gradient in two launches: attention_pack_grad packs q, k, v and the cotangent, if not DIRECT, and computes the statistics
// of queries; attention_wgmma_grad computes the cotangents. A row that does not exist has an infinite shift, so its
// probabilities are 0.
struct GradientScratch {
    PackedArray q, k, v, ct; // if DIRECT only the numbers of rows
    // For each tile of queries: the shifts of its rows, logsumexp * log2(e) - PROBABILITY_EXPONENT; their deltas, the sums of
    // ct * out; in fp16x2 the inverses of the scales of q and ct.
    float *stats;
    float *by_q;     // for each tile of queries the accumulators of its sums, thread by thread
    float *inverses; // in fp16x2: for each GROUP keys the inverses of the scales of k and v
    int *turns;      // for each tile of queries how often sums have been added

    __device__ __forceinline__ GradientScratch(char *scratch, int64_t batch, int64_t queries, int64_t keys) {
        q = {scratch, rounded_up(queries, BLOCK_Q)};
        ct = {DIRECT ? scratch : q.end(batch), q.rows};
        k = {DIRECT ? scratch : ct.end(batch), rounded_up(keys, BLOCK_K)};
        v = {DIRECT ? scratch : k.end(batch), k.rows};
        stats = (float *)(DIRECT ? scratch + MAP_BLOCKS * sizeof(HeadMaps) : v.end(batch)), by_q = stats + 2 * batch * q.rows + batch * q.rows / BLOCK_Q * SCALES;
        inverses = by_q + batch * q.rows * PACKED_WIDTH;
        turns = (int *)(inverses + (OPERAND_TERMS == 2 ? batch * k.rows / GROUP * 2 : 0));
    }
    // The tensor maps of this block.
    __device__ __forceinline__ HeadMaps &maps() const { return ((HeadMaps *)q.at)[blockIdx.x]; }
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
