// Computes by FMA the elements that gemm/packed_gemm.cu has marked. There is a block for each tile of the result. Its threads
// compute the elements of the tile's list together, one after another; if the list is full, the whole tile. Most lists are empty.
//
// Macros as in gemm/pack.cu; WIDE_C: elements per store.
#include "gemm/gemm.cuh"
#include "common/collectives.cuh"
#include "gemm/packed.cuh"

typedef Tile<PACKED_ROWS, TILE_N, 8, 1, 4, Fma<64, TILE_N / 2>, SHARED_BYTES> FmaTile;
constexpr int UNROLL = 32; // elements of each operand that a thread loads at once

// The dot product of a row and a column, by a block; thread 0 gets it.
template <class Operands> __device__ __forceinline__ T dot(const Operands &operands, int row, int column) {
    __shared__ T sums[FmaTile::THREADS / WARP];
    T sum = 0;
    for (int first = threadIdx.x; first < operands.k; first += UNROLL * FmaTile::THREADS) {
        T a[UNROLL], b[UNROLL];
        #pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int h = first + i * FmaTile::THREADS;
            a[i] = h < operands.k ? operands.load_a(row, h) : 0;
            b[i] = h < operands.k ? operands.load_b(h, column) : 0;
        }
        #pragma unroll
        for (int i = 0; i < UNROLL; i++) sum = fma(a[i], b[i], sum);
    }
    sum = over_lanes<Sum, WARP>(sum);
    __syncthreads(); // the sums of the previous element have been read
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    T all = sums[0];
    #pragma unroll
    for (int i = 1; i < FmaTile::THREADS / WARP; i++) all += sums[i];
    return all;
}

KERNEL __launch_bounds__(FmaTile::THREADS, 2) fp32_fallback(const T *a, const T *b, const Epilogue epilogue,
    int64_t batch, int64_t m, int64_t n, int64_t k, char *scratch) {
    wait_for_inputs();
    const PackedLayout layout(batch, m, n, k, scratch);
    const FallbackList &list = layout.fallback[blockIdx.x];
    const int count = list.count;
    if (count > FALLBACK_CAPACITY) {
        gemm_block<FmaTile, TRANSPOSE_A, TRANSPOSE_B, TRANSPOSE_A ? WIDE_A : 1, TRANSPOSE_B ? 1 : WIDE_B, WIDE_C>(
            a, b, epilogue, m, n, k, 1, blockIdx.x, 0);
        return;
    }
    const TileCoord at(blockIdx.x, layout.rows_a, layout.tiles_n);
    const Operands<TRANSPOSE_A, TRANSPOSE_B> operands = {
        a + at.item * m * k, b + at.item * k * n, (int)m, (int)n, (int)k};
    for (int i = 0; i < count; i++) {
        const int row = at.row * PACKED_ROWS + list.elements[i] / PACKED_ROWS;
        const int column = at.column * TILE_N + list.elements[i] % PACKED_ROWS;
        const T sum[1] = {dot(operands, row, column)};
        if (threadIdx.x == 0) epilogue(at.item, row, column, (at.item * m + row) * n + column, sum);
    }
}
