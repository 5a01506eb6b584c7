// The first and the last launch of the gradient: see wgmma_scratch.cuh.
#include "attention/wgmma_pack.cuh"
#include "attention/wgmma_scratch.cuh"

// k and v begin `step` and 2 step elements after their pointers. blockIdx.y numbers the arrays.
KERNEL attention_pack_grad(const T *q, const T *k, const T *v, const T *out, const T *logsumexp, const T *ct,
    int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t row, int64_t out_row, int64_t step, char *scratch) {
    wait_for_inputs();
    const GradientScratch packed(scratch, batch, queries, keys);
    if (blockIdx.y == 0) {
        pack_array(q, batch, heads, queries, row, packed.q);
        for (int64_t i = grid_index(); i < batch * packed.q.rows / BLOCK_Q; i += grid_size()) packed.turns[i] = 0;
    } else if (blockIdx.y == 1) {
        pack_array(k + step, batch, heads, keys, row, packed.k);
    } else if (blockIdx.y == 2) {
        pack_array(v + 2 * step, batch, heads, keys, row, packed.v);
    } else {
        for (int64_t i = grid_index(); i < batch * packed.ct.rows * CHUNKS; i += grid_size()) { // whole warps
            const PackedChunk chunk(packed.ct, i);
            float x[CHUNK], y[CHUNK], sum = 0;
            chunk.load_from(ct, heads, queries, out_row, x);
            chunk.load_from(out, heads, queries, out_row, y);
            chunk.store_to(packed.ct, x); // delta has to fit the rounded cotangent that the products read
            #pragma unroll
            for (int j = 0; j < CHUNK; j++) sum += x[j] * y[j];
            sum = over_lanes<Sum, CHUNKS>(sum);
            if (chunk.chunk == 0) {
                float *const stats = packed.stats + packed.tile(chunk.head, chunk.at) * 2 * BLOCK_Q + chunk.at % BLOCK_Q;
                const bool exists = chunk.at < queries;
                stats[0] = exists ? logsumexp[chunk.head * queries + chunk.at] * LOG2_E : INFINITY;
                stats[BLOCK_Q] = sum;
            }
        }
    }
}

// Writes the cotangents of the queries from the accumulators of the warpgroups.
KERNEL attention_unpack_grad(
    T *by_q, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t row, double scale, char *scratch) {
    wait_for_inputs();
    const GradientScratch packed(scratch, batch, queries, keys);
    for (int64_t i = grid_index(); i < batch * packed.q.rows * PACKED_WIDTH / 4; i += grid_size()) {
        const Vector<float, 4> sums = load<float, 4>(packed.by_q + 4 * i);
        // Four accumulators of a thread: two columns of two rows.
        const int thread = i % WARPGROUP, four = i / WARPGROUP % 8, warpgroup = i / WARPGROUP / 8 % 2;
        const int64_t tile = i / (BY_Q_TILE / 4), tiles = packed.q.rows / BLOCK_Q, head = tile / tiles;
        const int column = four * 8 + thread % 4 * 2 + (BLOCK_Q == 64 ? warpgroup * 64 : 0);
        const int64_t first = tile % tiles * BLOCK_Q + thread / WARP * 16 + thread % WARP / 4 + (BLOCK_Q == 64 ? 0 : warpgroup * 64);
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const int64_t query = first + 8 * r;
            T *const to = by_q + (head / heads * queries + query) * row + head % heads * HEAD_WIDTH;
            if (query < queries)
                store_pair(to, column, sums.lane[2 * r] * (float)scale, sums.lane[2 * r + 1] * (float)scale);
        }
    }
}
