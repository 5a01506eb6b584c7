// Packs weight_hh, and for the first step h0, for rnn/grid_recurrent.cu (GRADIENT 0) and rnn/grid_recurrent_grad.cu (1), and
// sets their counters to 0. A thread packs chunks of eight neighbours along K.
#include "rnn/grid.cuh"

#if GRADIENT
typedef Layout<HIDDEN / TILE_N, SUMS_OF_STEP> Packed;
#else
typedef Layout<SUMS_OF_STEP / TILE_N, HIDDEN> Packed;
#endif

// The row of weight_hh that is row r of packed tile `tile`. Eight units at a time, a tile has their rows of the first gate,
// then of the second one, and so on. So a thread's accumulators hold all gates of its units.
__device__ __forceinline__ int weight_row(int tile, int r) {
    return r / 8 % GATES * HIDDEN + tile * (TILE_N / GATES) + r / 8 / GATES * 8 + r % 8;
}

KERNEL __launch_bounds__(256) grid_pack(const T *weight, const T *h0, int64_t rows, char *scratch) {
    wait_for_inputs();
    const Packed layout(rows, scratch);
    for (int64_t i = grid_index(); i < layout.groups * Packed::COUNTERS; i += grid_size()) ((int *)scratch)[i] = 0;
    constexpr int CHUNKS = Packed::K_TILES * 8; // of a row
    constexpr int ROWS = (int)(Packed::WEIGHT / TILE_B / Packed::K_TILES) * TILE_N;
    for (int64_t i = grid_index(); i < (int64_t)ROWS * CHUNKS; i += grid_size()) {
        float x[CHUNK_ELEMENTS];
#if GRADIENT
        const int row = i % ROWS, chunk = i / ROWS; // neighbouring threads read neighbouring columns
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) x[j] = weight[(int64_t)unit_of_chunk(chunk, j) * HIDDEN + row];
#else
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++)
            x[j] = weight[(int64_t)weight_row(row / TILE_N, row % TILE_N) * HIDDEN + unit_of_chunk(chunk, j)];
#endif
        store_chunk(layout.weight(row / TILE_N, chunk / 8), TERM_B, row % TILE_N, chunk % 8, x);
    }
#if !GRADIENT
    for (int64_t i = grid_index(); i < rows * CHUNKS; i += grid_size()) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        float x[CHUNK_ELEMENTS];
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) x[j] = h0[(int64_t)row * HIDDEN + unit_of_chunk(chunk, j)];
        store_chunk(layout.exchanged(row / TILE_ROWS, 0, chunk / 8), TERM_A, row % TILE_ROWS, chunk % 8, x);
    }
#endif
}
