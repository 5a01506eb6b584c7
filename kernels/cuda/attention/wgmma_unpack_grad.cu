// The last launch of the gradient: see wgmma_scratch.cuh.
#include "attention/wgmma_scratch.cuh"

constexpr int PARTS = BY_Q_TILE / (32 * WARPGROUP); // of a tile: 64 columns or 64 rows each

// Writes the cotangents of the queries from the accumulators of the warpgroups.
KERNEL attention_unpack_grad(
    S *by_q, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t row, double scale, char *scratch) {
    wait_for_inputs();
    const GradientScratch packed(scratch, batch, queries, keys);
    for (int64_t i = grid_index(); i < batch * packed.q.rows * PACKED_WIDTH / 4; i += grid_size()) {
        const Vector<float, 4> sums = load<float, 4>(packed.by_q + 4 * i);
        // Four accumulators of a thread: two columns of two rows.
        const int thread = i % WARPGROUP, four = i / WARPGROUP % 8, part = i / WARPGROUP / 8 % PARTS;
        const int64_t tile = i / (BY_Q_TILE / 4), tiles = packed.q.rows / BLOCK_Q, head = tile / tiles;
        const int column = four * 8 + thread % 4 * 2 + (BLOCK_Q == 64 ? part * 64 : 0);
        const int64_t first = tile % tiles * BLOCK_Q + thread / WARP * 16 + thread % WARP / 4 + (BLOCK_Q == 64 ? 0 : part * 64);
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const int64_t query = first + 8 * r;
            S *const to = by_q + (head / heads * queries + query) * row + head % heads * HEAD_WIDTH;
            if (query < queries)
                store_pair(to, column, sums.lane[2 * r] * (float)scale, sums.lane[2 * r + 1] * (float)scale);
        }
    }
}
