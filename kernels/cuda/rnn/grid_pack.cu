// Packs weight_hh, and for the first step h0, for rnn/grid_recurrent.cu (GRADIENT 0) and rnn/grid_recurrent_grad.cu (1), and
// sets their counters to 0. A block packs PACK_ROWS packed rows of the weight, for each of which SLICES threads find the scale.
#include "rnn/grid.cuh"

#if GRADIENT
typedef Layout<HIDDEN / TILE_N, SUMS_OF_STEP> Packed;
#else
typedef Layout<SUMS_OF_STEP / TILE_N, HIDDEN> Packed;
#endif

// The row of weight_hh that is row r of packed tile `tile`. Eight units at a time, a tile has their rows of the first gate,
// then of the second one, and so on. So a thread's accumulators hold all gates of its units.
__device__ __forceinline__ int weight_row(int tile, int r) {
    return r / 8 % GATES * HIDDEN + tile * (TILE_N / GATES) + unit_of_column(r / 8 / GATES * 8 + r % 8);
}

constexpr int PACK_THREADS = 256, PACK_ROWS = 8, SLICES = PACK_THREADS / PACK_ROWS;
constexpr int K_CHUNKS = Packed::K_TILES * CHUNKS; // of a row
constexpr float MIN_LARGEST = 0x1p-40f; // input products are multiplied by scales, too, and must not overflow

// Element j of a chunk of a packed row of the weight.
__device__ __forceinline__ T element_of(const T *weight, int row, int chunk, int j) {
#if GRADIENT
    return weight[(int64_t)sum_of_chunk(chunk, j) * HIDDEN + unit_of_column(row)];
#else
    return weight[(int64_t)weight_row(row / TILE_N, row % TILE_N) * HIDDEN + unit_of_chunk(chunk, j)];
#endif
}

KERNEL __launch_bounds__(PACK_THREADS) grid_pack(const T *weight, const T *h0, int64_t rows, char *scratch) {
    wait_for_inputs();
    const Packed layout(rows, scratch);
    for (int64_t i = grid_index(); i < layout.all_counters(); i += grid_size()) ((int *)scratch)[i] = 0;
    // Neighbouring threads read neighbouring elements: the gradient has columns of the weight as packed rows.
    const int own = GRADIENT ? threadIdx.x % PACK_ROWS : threadIdx.x / SLICES;
    const int slice = GRADIENT ? threadIdx.x / PACK_ROWS : threadIdx.x % SLICES;
    __shared__ float largest[PACK_ROWS][SLICES + 1];
    constexpr int ROWS = Packed::PARTS / SPLITS * TILE_N;
    for (int first = blockIdx.x * PACK_ROWS; first < ROWS; first += gridDim.x * PACK_ROWS) {
        const int row = first + own;
        float found = MIN_LARGEST;
        for (int chunk = slice; chunk < K_CHUNKS; chunk += SLICES)
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) found = Max::of(found, fabsf(element_of(weight, row, chunk, j)));
        largest[own][slice] = found;
        __syncthreads();
        for (int i = 0; i < SLICES; i++) found = Max::of(found, largest[own][i]);
        const Scale scale(found);
        if (slice == 0) layout.inverse_scales(0)[row] = scale.inverse;
        for (int chunk = slice; chunk < K_CHUNKS; chunk += SLICES) {
            float x[CHUNK_ELEMENTS];
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) x[j] = element_of(weight, row, chunk, j);
            store_chunk(
                layout.weight(row / TILE_N, chunk / CHUNKS), TERM_B, row % TILE_N, chunk % CHUNKS, x, scale.factor);
        }
        __syncthreads();
    }
#if !GRADIENT
    const int warp = grid_index() / WARP, lane = threadIdx.x % WARP;
    for (int64_t row = warp; row < rows; row += grid_size() / WARP) {
        float largest = 1; // of all hidden states of the row
        for (int i = lane; i < HIDDEN; i += WARP) largest = Max::of(largest, fabsf(h0[row * HIDDEN + i]));
        const Scale scale(over_lanes<Max, WARP>(largest));
        for (int chunk = lane; chunk < K_CHUNKS; chunk += WARP) {
            float x[CHUNK_ELEMENTS];
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) x[j] = h0[row * HIDDEN + unit_of_chunk(chunk, j)];
            store_exchanged(layout.exchanged(row / TILE_ROWS, 0, chunk / CHUNKS), row % TILE_ROWS, chunk % CHUNKS, x,
                scale.factor, scale.inverse);
        }
    }
#endif
}
