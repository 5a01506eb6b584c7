// Several products A^T B with a long K, in bf16x3 (gemm_bf16x3.cuh), by some blocks of a launch. The stages of all tiles are one
// sequence, which the blocks divide evenly (stream-K: M. Osama et al., 2023). A block stores its sums of a tile in scratch;
// gemm/grouped_sum.cuh adds the sums of several blocks. If GROUPED_ROW_SUMS, blocks also add the rows of A^T over K.
//
// Macros: those of gemm_bf16x3.cuh and gemm/grouped_sum.cuh.
#pragma once
#include "gemm/grouped_sum.cuh"
#include "gemm/gemm_bf16x3.cuh"

static_assert(TILE_M == GROUPED_M && TILE_K == GROUPED_K, "tiles and stages as gemm/grouped_sum.cuh counts them");

constexpr int PIPELINE_BYTES = STAGES * STAGE + BUFFERS * STAGING * sizeof(T);

// Sums over K of the rows of A^T, in place of NoRowSums. The tiles of a row of tiles load the same rows; only the first tile adds
// them. A producer thread adds the chunks that it splits. Its sums are in shared memory, because it has no registers to spare.
struct RowSums {
    static constexpr int PLANES = CHUNK_ELEMENTS / VECTOR, BYTES = PRODUCER_THREADS * CHUNK_ELEMENTS * sizeof(T);
    static constexpr int LANES = OperandA::PLANES; // the chunks of lane i, and of lane i + LANES, are of the same rows
    static_assert(TRANSPOSE_A && WARP % LANES == 0 && OperandA::CHUNKS % PRODUCER_THREADS == 0, "each thread has whole rows");
    static_assert(PRODUCER_THREADS / WARP == ROW_SUMS_WARPS, "as gemm/grouped_sum.cuh reads them");

    T *scratch;

    // The number of the split's slot, counted from 1; 0 if this tile adds no rows.
    static __device__ __forceinline__ int place(const TileSplit &work) { return work.at.column == 0 ? work.slot + 1 : 0; }

    static __device__ __forceinline__ void clear() {
        #pragma unroll
        for (int p = 0; p < PLANES; p++) *(Vector<T, VECTOR> *)plane(p) = {};
    }
    static __device__ __forceinline__ void add(int place, const T *staging) {
        if (place == 0) return;
        #pragma unroll 1
        for (int p = 0; p < PLANES; p++) {
            Vector<T, VECTOR> sum = load<T, VECTOR>(plane(p));
            #pragma unroll
            for (int i = 0; i < OperandA::PER_THREAD; i++) {
                const Vector<T, VECTOR> v = load<T, VECTOR>(
                    staging + OperandA::swizzled(threadIdx.x, p * VECTOR) + i * PRODUCER_THREADS * CHUNK_ELEMENTS);
                #pragma unroll
                for (int j = 0; j < VECTOR; j++) sum.lane[j] += v.lane[j];
            }
            *(Vector<T, VECTOR> *)plane(p) = sum;
        }
    }
    // Stores the sums of each warp, and sets them to zero.
    __device__ __forceinline__ void finish(int place) const {
        if (place == 0) return;
        T *const to = scratch + row_sums_at(place - 1) + threadIdx.x / WARP * TILE_M + threadIdx.x % LANES * CHUNK_ELEMENTS;
        #pragma unroll 1
        for (int p = 0; p < PLANES; p++) {
            Vector<T, VECTOR> v = load<T, VECTOR>(plane(p));
            #pragma unroll
            for (int j = 0; j < VECTOR; j++)
                #pragma unroll
                for (int i = LANES; i < WARP; i *= 2) v.lane[j] += __shfl_xor_sync(FULL_MASK, v.lane[j], i);
            if (threadIdx.x % WARP < LANES) *(Vector<T, VECTOR> *)(to + p * VECTOR) = v;
        }
        clear();
    }

  private:
    // This thread's VECTOR elements of a plane.
    static __device__ __forceinline__ T *plane(int p) {
        return (T *)(shared_bytes + PIPELINE_BYTES) + (p * PRODUCER_THREADS + threadIdx.x) * VECTOR;
    }
};

static_assert(PIPELINE_BYTES + (GROUPED_ROW_SUMS ? RowSums::BYTES : 0) == SHARED_BYTES, "_shared in grouped_products.py");

// A and B of each product.
typedef const T *const (&Factors)[GROUPED_COUNT][2];

// The stage of K at which a tile of a product starts: `shift` stages after the start of the tile before. So blocks that are
// `blocks` apart read the same K at the same time. The rows of a factor that both need come from device memory once, then from the
// L2 cache.
__device__ __forceinline__ int first_stage_of_tile(const Product &product, int tile) {
    const int of_block = stages_before(GROUPED_COUNT) / GROUPED_BLOCKS, blocks = product.stages / max(of_block, 1);
    const int shift = blocks > 0 ? product.stages - blocks * of_block : 0;
    return tile * shift % product.stages;
}

// Whether B of some product is narrow (NarrowB).
__device__ constexpr bool has_narrow() {
    constexpr int lengths[][3] = {GROUPED_LENGTHS};
    for (int i = 0; i < GROUPED_COUNT; i++)
        if (lengths[i][1] < NARROW) return true;
    return false;
}

// The stages of a block: numbers `at` to `end` - 1 of the sequence.
struct GroupSchedule {
    static constexpr bool HAS_NARROW = has_narrow();
    Factors factors;
    T *scratch;
    int block, at, end;

    __device__ __forceinline__ auto row_sums() const {
        if constexpr (GROUPED_ROW_SUMS)
            return RowSums{scratch};
        else
            return NoRowSums{};
    }

    __device__ __forceinline__ bool next(TileSplit &work) {
        if (at >= end) return false;
        int first = 0, tile = 0, i = 0; // the first stage and tile of product i
        Product product(0);
        while (at >= first + product.stages * product.tiles()) {
            first += product.stages * product.tiles();
            tile += product.tiles();
            product = Product(++i);
        }
        const int within = (at - first) / product.stages;
        work.matrices = {factors[0][0], factors[0][1], product.m, product.n, product.k};
        #pragma unroll // by constant indices, so that the pointers are not copied to local memory
        for (int j = 1; j < GROUPED_COUNT; j++)
            if (i == j) work.matrices.a = factors[j][0], work.matrices.b = factors[j][1];
        work.at = TileCoord(within, product.rows(), product.columns());
        const int from = (at - first) % product.stages, count = min(product.stages - from, end - at);
        work.begin = (from + first_stage_of_tile(product, within)) % product.stages;
        work.end = work.begin + count;
        work.slot = tile + within + block;
        at += count;
        return true;
    }
};

// The work of block `block` of GROUPED_BLOCKS blocks of GEMM_THREADS threads.
__device__ __forceinline__ void multiply_group(Factors factors, char *scratch, int block) {
    const GroupSchedule schedule = {factors, (T *)scratch, block, first_stage(block), first_stage(block + 1)};
    __shared__ Barriers barriers;
    if (GROUPED_ROW_SUMS && threadIdx.x < PRODUCER_THREADS) RowSums::clear();
    multiply_splits<0>(schedule, barriers, (char *)shared_bytes,
        [&](const TileSplit &work, const AccumulatorTile &, int warpgroup, const float (&sums)[SUMS]) {
            const AccumulatorTile whole = {TileCoord(0, 1, 1), TILE_M, TILE_N, warpgroup * ROWS, 0};
            whole.store(Store{(T *)scratch + (int64_t)work.slot * TILE_M * TILE_N}, sums);
        });
}
