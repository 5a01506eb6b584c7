// C = op(A) op(B) in bf16x3 (gemm_bf16x3.cuh). With split-K (SPLIT) partial sums go to scratch; gemm/split_k_sum.cu adds them.
//
// Macros (Bf16x3Gemm in bf16x3.py): those of gemm_bf16x3.cuh. TILE_BYTES: of a staged tile. WIDE_C, WIDE_TILE: elements per
// store, from accumulators and from a staged tile. ONE_TILE: a block computes one split of one tile.
#ifndef LENGTHS
#define LENGTHS m, n, k, splits // a fused equation defines constants here
#endif
#include "gemm/gemm_bf16x3.cuh"
#include "gemm/gemm.cuh"

typedef StagedTile<TILE_M, TILE_N, TILE_BYTES> Tiled;

// All splits of all tiles of all matrices; block b computes numbers b, b + gridDim.x, ...
struct Schedule {
    static constexpr bool HAS_NARROW = false;
    Operands<TRANSPOSE_A, TRANSPOSE_B> of;
    int splits, tiles, i;

    __device__ Schedule(const T *a, const T *b, int64_t batch, int64_t m, int64_t n, int64_t k, int64_t splits)
        : of{a, b, (int)m, (int)n, (int)k}, splits(splits), tiles(batch * rows() * columns()), i(blockIdx.x) {}
    __device__ __forceinline__ int rows() const { return (of.m + TILE_M - 1) / TILE_M; }
    __device__ __forceinline__ int columns() const { return (of.n + TILE_N - 1) / TILE_N; }
    __device__ __forceinline__ NoRowSums row_sums() const { return {}; }

    __device__ __forceinline__ bool next(TileSplit &work) {
        if (i >= tiles * splits) return false;
        const int stages = (of.k + TILE_K - 1) / TILE_K;
        work.slot = i / tiles;
        work.at = TileCoord(i % tiles, rows(), columns());
        work.begin = stages * work.slot / splits;
        work.end = stages * (work.slot + 1) / splits;
        work.matrices = {of.a + work.at.item * of.m * of.k, of.b + work.at.item * of.k * of.n, of.m, of.n, of.k};
        i += gridDim.x;
        return true;
    }
};

// The destination of results: the epilogue; with split-K scratch, one split after another.
#if SPLIT
struct Output {
    T *partial;
    int64_t size;
    __device__ __forceinline__ Store of(int split) const { return {partial + split * size}; }
};
#else
struct Output {
    const Epilogue &epilogue;
    __device__ __forceinline__ const Epilogue &of(int) const { return epilogue; }
};
#endif

// With ONE_TILE all threads run the epilogue, with equal numbers of registers.
KERNEL __launch_bounds__(GEMM_THREADS, 1) gemm_bf16x3(const T *a, const T *b, const Epilogue epilogue, int64_t batch,
    int64_t m, int64_t n, int64_t k, int64_t splits IF(SPLIT, , char *scratch)) {
    wait_for_inputs();
    const Schedule schedule(a, b, batch, LENGTHS);
#if SPLIT
    const Output output = {(T *)scratch, batch * m * n};
#else
    const Output output = {epilogue};
#endif
    char *shared = *SHARED_STAGES(char[STAGE], shared_bytes);
    const Tiled staged = {(T *)SHARED_TILE(char, shared_bytes)}; // over the buffers of float32, which have all been read
    __shared__ Barriers barriers;
    multiply_splits<ONE_TILE ? 128 : 0>(schedule, barriers, shared,
        [&](const TileSplit &work, const AccumulatorTile &tile, int, const float (&sums)[SUMS]) {
            if (!ONE_TILE) {
                tile.store(output.of(work.slot), sums);
                return;
            }
            #pragma unroll
            for (int j = 0; j < SUMS; j += 2) {
                const T value[] = {sums[j], sums[j + 1]};
                staged(0, tile.row(j), tile.column(j), 0, value);
            }
        });
    if (ONE_TILE)
        staged.finish<WIDE_TILE, GEMM_THREADS>(
            output.of(blockIdx.x / schedule.tiles), schedule.of.m, schedule.of.n, blockIdx.x % schedule.tiles);
}
