// The first launch of the gradient in bfloat16: see wgmma_scratch.cuh.
#include "attention/wgmma_pack.cuh"
#include "attention/wgmma_scratch.cuh"

__device__ __forceinline__ void clear_turns(const GradientScratch &packed, int64_t batch) {
    for (int64_t i = grid_index(); i < batch * packed.q.rows / BLOCK_Q; i += grid_size()) packed.turns[i] = 0;
}

// Computes the statistics of queries, and packs the cotangent if not DIRECT.
__device__ __forceinline__ void pack_cotangent(const GradientScratch &packed, const S *out, const T *logsumexp, const S *ct,
    int64_t batch, int64_t heads, int64_t queries, int64_t out_row) {
    for (int64_t i = grid_index(); i < batch * packed.ct.rows * CHUNKS; i += grid_size()) { // whole warps
        const PackedChunk chunk(packed.ct, i);
        float x[CHUNK], y[CHUNK], sum = 0;
        chunk.load_from(ct, heads, queries, out_row, x);
        chunk.load_from(out, heads, queries, out_row, y);
        if (!DIRECT) chunk.store_to(packed.ct, x); // delta has to fit the rounded cotangent that the products read
        #pragma unroll
        for (int j = 0; j < CHUNK; j++) sum += x[j] * y[j];
        sum = over_lanes<Sum, CHUNKS>(sum);
        if (chunk.chunk == 0) packed.set_stats(chunk.head, chunk.at, queries, logsumexp, sum);
    }
}

// blockIdx.y numbers the arrays.
KERNEL attention_pack_grad(const S *q, const S *k, const S *v, const S *out, const T *logsumexp, const S *ct,
    int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t row, int64_t out_row, int64_t step, char *scratch) {
    wait_for_inputs();
    const GradientScratch packed(scratch, batch, queries, keys);
    if (blockIdx.y == 0) {
        pack_array(q, batch, heads, queries, row, packed.q);
        clear_turns(packed, batch);
    } else if (blockIdx.y == 1) {
        pack_array(k + step, batch, heads, keys, row, packed.k);
    } else if (blockIdx.y == 2) {
        pack_array(v + 2 * step, batch, heads, keys, row, packed.v);
    } else {
        pack_cotangent(packed, out, logsumexp, ct, batch, heads, queries, out_row);
    }
}

// The same if DIRECT.
KERNEL attention_statistics(const S *out, const T *logsumexp, const S *ct, int64_t batch, int64_t heads, int64_t queries,
    int64_t keys, int64_t out_row, char *scratch) {
    wait_for_inputs();
    const GradientScratch packed(scratch, batch, queries, keys);
    clear_turns(packed, batch);
    pack_cotangent(packed, out, logsumexp, ct, batch, heads, queries, out_row);
}
