// C = op(A) op(B) of matrices that are bfloat16 in memory, by WGMMA. Persistent and warp-specialised, as gemm/packed_gemm.cu: two
// threads issue copies, one of each operand, so that both tensor maps are encoded at the same time. Each consumer warpgroup
// multiplies 64 rows of a tile.
//
// TMA loads tiles of 64 k with the 128-byte swizzle. A K-major operand is a box of rows with 128 bytes of k each. Of an operand
// that is not K-major (MN_MAJOR_A, MN_MAJOR_B) a box has 64 rows of k, each with 128 bytes of rows of op(A) or columns of op(B).
//
// SPLITS > 1: the tiles of the last wave, which do not fill all multiprocessors, are split along K (split-K). Their partial sums go
// to scratch, tile by tile, and sum_bfloat16_splits adds them. `whole`: the number of tiles that are not split.
//
// Macros (Bfloat16Gemm in bfloat16.py): TILE_M, TILE_N, TILE_K, TILE_STAGES, BLOCK_THREADS, SPLITS, MN_MAJOR_*. WIDE_C: maximum
// elements per store. SUM_THREADS, SUM_COLUMNS: threads of a block, and columns of a thread, that add splits.
#include "sm90/accumulator.cuh"
#include "sm90/tma.cuh"

constexpr int ROW_BYTES = TILE_K * 2, SUMS = TILE_N / 2;
constexpr int CONSUMER_ROWS = 64; // of a consumer warpgroup
constexpr int THREADS = BLOCK_THREADS, CONSUMERS = THREADS - WARPGROUP;
constexpr int SIZE_A = TILE_M * ROW_BYTES, SIZE = SIZE_A + TILE_N * ROW_BYTES; // of a stage
constexpr int BOX_ROWS = 64, BOX_BYTES = BOX_ROWS * ROW_BYTES;                 // of an operand that is not K-major

struct alignas(128) TensorMaps {
    TensorMap a, b;
};

// The work of the grid: whole tiles of the results, and splits of others.
struct Work {
    int m, n, rows, columns, k_tiles, whole, split;

    __device__ Work(int64_t batch, int64_t m, int64_t n, int64_t k, int64_t whole)
        : m(m), n(n), rows((m + TILE_M - 1) / TILE_M), columns((n + TILE_N - 1) / TILE_N),
          k_tiles((k + TILE_K - 1) / TILE_K), whole(whole), split(batch * rows * columns - whole) {}

    __device__ __forceinline__ int items() const { return whole + SPLITS * split; }
};

// Item `i` of the work: a tile of the result, over tiles `begin` to `end` of K. row, column: where the tile begins in the matrix.
// part: the number of its partial sums; -1 for a whole tile.
struct Item {
    TileCoord at;
    int part, row, column, begin, end;

    __device__ __forceinline__ Item(int i, const Work &work)
        : at(is_whole(i, work) ? i : work.whole + (i - work.whole) % work.split, work.rows, work.columns) {
        row = at.row * TILE_M;
        column = at.column * TILE_N;
        part = -1;
        begin = 0;
        end = work.k_tiles;
        if (is_whole(i, work)) return;
        const int tile = (i - work.whole) % work.split, number = (i - work.whole) / work.split;
        part = tile * SPLITS + number;
        begin = work.k_tiles * number / SPLITS;
        end = work.k_tiles * (number + 1) / SPLITS;
    }

  private:
    __device__ __forceinline__ static bool is_whole(int i, const Work &work) { return SPLITS == 1 || i < work.whole; }
};

// Starts to load ROWS rows of op(A) or columns of op(B), from `first` on, and TILE_K of K.
template <bool MN_MAJOR, int ROWS> __device__ __forceinline__ void load_tile(
    const TensorMap &map, char *to, int first, int k, int item, Mbarrier &full) {
    if constexpr (MN_MAJOR) {
        #pragma unroll
        for (int i = 0; i < ROWS / BOX_ROWS; i++) map.load(to + i * BOX_BYTES, first + i * BOX_ROWS, k, item, full);
    } else {
        map.load(to, k, first, item, full);
    }
}

// The producer thread of an operand: load(item, k_tile, stage, full) issues the copies of BYTES bytes, for all items of this block.
template <int BYTES, class Load> __device__ __forceinline__ void produce(
    const Work &work, Pipeline<TILE_STAGES> &pipeline, char *shared, const Load &load) {
    PipelineState<TILE_STAGES> state;
    for (int i = blockIdx.x; i < work.items(); i += gridDim.x) {
        const Item item(i, work);
        for (int k_tile = item.begin; k_tile < item.end; k_tile++, state.advance()) {
            pipeline.wait_empty(state);
            Mbarrier &full = pipeline.full[state.stage];
            full.arrive_expect_tx(BYTES);
            load(item, k_tile, shared + state.stage * SIZE, full);
        }
    }
}

// The descriptor of 16 k of a tile: step `step` of four.
template <bool MN_MAJOR> __device__ __forceinline__ uint64_t descriptor(const char *tile, int step) {
    if constexpr (MN_MAJOR)
        return smem_descriptor(tile + step * 16 * ROW_BYTES, BOX_BYTES, 8 * ROW_BYTES, SWIZZLE_128B);
    else
        return smem_descriptor(tile) + step * DESCRIPTOR_K_STEP;
}

// A consumer warpgroup.
__device__ __forceinline__ void consume(const Work &work, Pipeline<TILE_STAGES> &pipeline, const char *shared,
    WarpStaging &staging, const Epilogue &epilogue, T *partial_sums) {
    typedef WarpEpilogue<(WIDE_C < Epilogue::WIDEST ? WIDE_C : Epilogue::WIDEST), Epilogue> Stores;
    PipelineState<TILE_STAGES> state;
    const int group = threadIdx.x / WARPGROUP - 1; // the number of this consumer warpgroup
    for (int i = blockIdx.x; i < work.items(); i += gridDim.x) {
        const Item item(i, work);
        const AccumulatorTile tile = {item.at, work.m, work.n, item.row + group * CONSUMER_ROWS, item.column};
        Stores::prefetch(tile, epilogue, TILE_N);
        float sums[SUMS];
        multiply_stages(sums, pipeline, state, item.begin, item.end, [&](int at, bool add) {
            const char *stage = shared + at * SIZE;
            #pragma unroll
            for (int step = 0; step < TILE_K / 16; step++)
                wgmma<BFLOAT16, MN_MAJOR_A, MN_MAJOR_B>(sums,
                    descriptor<MN_MAJOR_A>(stage + group * CONSUMER_ROWS * ROW_BYTES, step),
                    descriptor<MN_MAJOR_B>(stage + SIZE_A, step), add || step > 0);
        });
        if (SPLITS == 1 || item.part < 0) {
            Stores(tile, epilogue, staging).store(sums);
        } else {
            AccumulatorTile part = {item.at, TILE_M, TILE_N, group * CONSUMER_ROWS, 0};
            part.at.item = item.part;
            const Store store = {partial_sums};
            WarpEpilogue<Store::WIDEST, Store>(part, store, staging).store(sums);
        }
    }
}

KERNEL __launch_bounds__(THREADS, 1) bfloat16_gemm(const uint16_t *a, const uint16_t *b, const Epilogue epilogue,
    int64_t batch, int64_t m, int64_t n, int64_t k, int64_t whole, char *scratch) {
    __shared__ Pipeline<TILE_STAGES> pipeline;
    __shared__ TensorMaps in_shared;
    __shared__ WarpStaging staging[CONSUMERS / WARP];
    const int warp = threadIdx.x / WARP;
    if (warp == 0) in_shared.a.make(a, MN_MAJOR_A ? m : k, MN_MAJOR_A ? k : m, batch, MN_MAJOR_A ? TILE_K : TILE_M);
    if (warp == 1) in_shared.b.make(b, MN_MAJOR_B ? n : k, MN_MAJOR_B ? k : n, batch, MN_MAJOR_B ? TILE_K : TILE_N);
    if (threadIdx.x == 2 * WARP) {
        pipeline.init(2, CONSUMERS / WARP);
        fence_mbarrier_init();
    }
    wait_for_inputs(); // nothing before it reads memory
    __syncthreads();
    const Work work(batch, m, n, k, whole);
    char *shared = SHARED_STAGES(char[SIZE], shared_bytes)[0];
    if (warp < WARPGROUP / WARP) {
        if (TILE_M > CONSUMER_ROWS) warpgroup_reg_dealloc<40>();
        TensorMaps &maps = SCRATCH_MAPS(TensorMaps, scratch, (int64_t)work.split)[blockIdx.x];
        if (warp == 0) {
            maps.a.copy_from(in_shared.a);
            if (threadIdx.x == 0)
                produce<SIZE_A>(work, pipeline, shared, [&](const Item &item, int k_tile, char *stage, Mbarrier &full) {
                    load_tile<MN_MAJOR_A, TILE_M>(maps.a, stage, item.row, k_tile * TILE_K, item.at.item, full);
                });
        } else if (warp == 1) {
            maps.b.copy_from(in_shared.b);
            if (threadIdx.x == WARP)
                produce<SIZE - SIZE_A>(work, pipeline, shared, [&](const Item &item, int k_tile, char *stage, Mbarrier &full) {
                    load_tile<MN_MAJOR_B, TILE_N>(maps.b, stage + SIZE_A, item.column, k_tile * TILE_K, item.at.item, full);
                });
        }
    } else {
        if (TILE_M > CONSUMER_ROWS) warpgroup_reg_alloc<232>();
        consume(work, pipeline, shared, staging[warp - WARPGROUP / WARP], epilogue, (T *)scratch);
    }
}

// Adds the partial sums of each split tile in order, and calls the epilogue.
KERNEL __launch_bounds__(SUM_THREADS) sum_bfloat16_splits(const uint16_t *a, const uint16_t *b, const Epilogue epilogue,
    int64_t batch, int64_t m, int64_t n, int64_t k, int64_t whole, char *scratch) {
    wait_for_inputs();
    constexpr int WIDEST = WIDE_C < Epilogue::WIDEST ? WIDE_C : Epilogue::WIDEST;
    constexpr int WIDE = WIDEST < SUM_COLUMNS ? WIDEST : SUM_COLUMNS;
    constexpr int ROW = TILE_N / SUM_COLUMNS;
    const Work work(batch, m, n, k, whole);
    const int i = blockIdx.x * SUM_THREADS + threadIdx.x, tile = i / (TILE_M * ROW);
    const TileCoord at(work.whole + tile, work.rows, work.columns);
    const int tile_row = i / ROW % TILE_M, tile_column = i % ROW * SUM_COLUMNS, row = at.row * TILE_M + tile_row;
    if (tile >= work.split || row >= work.m) return;
    const T *partial_sums = (const T *)scratch + ((int64_t)tile * SPLITS * TILE_M + tile_row) * TILE_N + tile_column;
    Vector<T, SUM_COLUMNS> parts[SPLITS];
    #pragma unroll
    for (int s = 0; s < SPLITS; s++) parts[s] = load<T, SUM_COLUMNS>(partial_sums + s * TILE_M * TILE_N);
    #pragma unroll
    for (int h = 0; h < SUM_COLUMNS; h += WIDE) {
        const int column = at.column * TILE_N + tile_column + h;
        if (column >= work.n) return;
        T sum[WIDE] = {};
        #pragma unroll
        for (int s = 0; s < SPLITS; s++) {
            #pragma unroll
            for (int w = 0; w < WIDE; w++) sum[w] += parts[s].lane[h + w];
        }
        epilogue(at.item, row, column, (at.item * work.m + row) * work.n + column, sum);
    }
}
