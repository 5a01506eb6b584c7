// C = op(A) op(B) of large matrices by WGMMA, from packed operands: see gemm/packed.cuh. Persistent and warp-specialised: one
// block per multiprocessor goes from tile to tile; one thread issues copies, two consumer warpgroups multiply, each half of a tile's rows.
//
// With SPLITS > 1 the partial sums go to scratch; gemm/split_k_sum.cu adds them.
//
// Macros (PackedGemm in packed.py): MMA_KIND, TILE_N, TILE_STAGES, DIRECT_*, SPLITS. WIDE_C: elements per store; for TF32
// and BFLOAT16 the maximum.
#include "gemm/packed.cuh"
#include "sm90/accumulator.cuh"
#include "sm90/bf16x3.cuh"

constexpr int SUMS = TILE_N / 2; // accumulators of a thread
constexpr int CONSUMER_THREADS = 2 * WARPGROUP, THREADS = WARPGROUP + CONSUMER_THREADS;
typedef Pipeline<TILE_STAGES> TilePipeline;

// 0 or 1: the half of the tile's rows that this consumer warpgroup computes.
__device__ __forceinline__ int consumer_half() { return threadIdx.x / WARPGROUP - 1; }

// A stage in shared memory: a packed tile of op(A) with TERMS terms, then COLUMNS_OF_TILE rows of TILES_N packed tiles of op(B).
template <int TERMS> struct Stage {
    static constexpr int SIZE_A = TERMS * PACKED_BYTES, SIZE_B = SIZE_A / PACKED_ROWS * COLUMNS_OF_TILE; // SIZE_B: of one tile
    static constexpr int SIZE = SIZE_A + TILES_N * SIZE_B;
    const char *at;

    __device__ __forceinline__ Stage(const char *shared, int stage) : at(shared + stage * SIZE) {}

    // Descriptors of a term: of this warpgroup's half of the rows, and of the columns.
    __device__ __forceinline__ uint64_t a(int term = 0) const {
        return smem_descriptor(at + term * PACKED_BYTES + consumer_half() * (PACKED_BYTES / 2));
    }
    __device__ __forceinline__ uint64_t b(int term = 0) const {
        return smem_descriptor(at + SIZE_A + term * (SIZE_B / TERMS));
    }
};

// Item `i` of the work: a tile of the result, over packed tiles `begin` to `end` of K.
struct TileSplit {
    int tile, split, begin, end;

    __device__ __forceinline__ TileSplit(int i, const PackedLayout &layout) {
        split = SPLITS > 1 ? i / (int)layout.tiles : 0;
        tile = i - split * (int)layout.tiles;
        begin = SPLITS > 1 ? layout.k_tiles * split / SPLITS : 0;
        end = SPLITS > 1 ? layout.k_tiles * (split + 1) / SPLITS : layout.k_tiles;
    }
};

// The accumulators of a thread in tile `tile`.
__device__ __forceinline__ AccumulatorTile accumulator_tile(int tile, const PackedLayout &layout) {
    const TileCoord at(tile, layout.rows_a, layout.tiles_n);
    return {at, (int)layout.m, (int)layout.n, at.row * PACKED_ROWS + consumer_half() * 64, at.column * TILE_N};
}

// The accumulation of scaled operands in FP16X2 or BF16X3, and the choice of results for gemm/fp32_fallback.cu, which computes
// them by sequential FMA where that may be more exact.
//
// Tensor cores truncate when they add. So they sum the products of leading terms over 64 k only; float32 additions sum the
// results. All other products have low-order accumulators.
//
// The fallback computes results that are not finite; in BF16X3 the rows and columns marked `fallback`; and in FP16X2 results
// - in which the errors of small elements may be visible (RowStats::error_floor);
// - with too few effective products, because rows are sparse or have huge elements (RowStats::participation): sequential FMA has
//   almost no rounding error there;
// - whose running sum stays small over the first CHECKED_TILES packed tiles (RowStats::cancellation_level): where neighbours
//   cancel, sequential FMA has almost no rounding error, but FP16X2 has lost the operands' last bits.

// Two float16 terms; products with a low term have the unit LOW_SCALE.
struct Fp16x2Terms {
    static constexpr int COUNT = 2, STAGES = TILE_STAGES, LOW_ORDER = 2;
    static constexpr MmaKind FORMAT = FP16X2;
    static constexpr float LOW_ORDER_UNIT = LOW_SCALE;
    __device__ static constexpr TermPair pair(int i) { return i == 0 ? TermPair{0, 1} : TermPair{1, 0}; }
};

// Three bfloat16 terms.
struct Bf16x3Terms {
    static constexpr int COUNT = BF16X3_TERMS, STAGES = TILE_STAGES * 2 / 3, LOW_ORDER = LOW_ORDER_PAIRS;
    static constexpr MmaKind FORMAT = BFLOAT16;
    static constexpr float LOW_ORDER_UNIT = 1;
    __device__ static constexpr TermPair pair(int i) { return low_order_pair(i); }
};

// selected: a bit for each accumulator. FP16X2: while multiplying, it is set while the running sum stays below the level.
template <class Terms> struct Accumulators {
    static constexpr bool CHECKS_CANCELLATION = Terms::FORMAT == FP16X2;
    float main[SUMS], low_order[SUMS];
    uint32_t selected[SUMS / 32];

    // level: the cancellation levels of this thread's two rows.
    __device__ __forceinline__ void multiply(TilePipeline &pipeline, PipelineState<Terms::STAGES> &state,
        const char *shared, int k_tiles, const float (&level)[2]) {
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        #pragma unroll
        for (uint32_t &word : selected) word = CHECKS_CANCELLATION ? ~0u : 0;
        const auto lead = [&](float (&sums)[SUMS], int at, int) {
            const Stage<Terms::COUNT> stage(shared, at);
            #pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma<Terms::FORMAT>(sums, stage.a() + k * DESCRIPTOR_K_STEP, stage.b() + k * DESCRIPTOR_K_STEP, k > 0);
        };
        const auto low = [&](float (&sums)[SUMS], int at, int, bool add, int) {
            const Stage<Terms::COUNT> stage(shared, at);
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                #pragma unroll
                for (int p = 0; p < Terms::LOW_ORDER; p++) {
                    const TermPair pair = Terms::pair(p);
                    wgmma<Terms::FORMAT>(sums, stage.a(pair.a) + k * DESCRIPTOR_K_STEP,
                        stage.b(pair.b) + k * DESCRIPTOR_K_STEP, add || k + p > 0);
                }
            }
        };
        const auto check = [&](int i) {
            if (CHECKS_CANCELLATION && i < CHECKED_TILES && __any_sync(~0u, bits() != 0)) { // usually none after a dozen tiles
                #pragma unroll
                for (int j = 0; j < SUMS; j++) {
                    if (fabsf(main[j]) >= level[j / 2 % 2]) selected[j / 32] &= ~(1u << j % 32);
                }
            }
        };
        multiply_promoted<1>(main, low_order, pipeline, state, 0, k_tiles, lead, low, check);
    }

    // Undoes the scaling. Returns a bit for each accumulator that the fallback computes.
    __device__ __forceinline__ uint64_t finish(
        const AccumulatorTile &tile, const RowStats (&rows)[2], const RowStats *columns) {
        const bool many_products = rows[0].participation * columns[0].participation >= 1;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const RowStats &row = rows[i / 2 % 2], &column = columns[accumulator_column(i)];
            const uint32_t bit = 1u << i % 32;
            const float sum = main[i] + low_order[i] * Terms::LOW_ORDER_UNIT;
            main[i] = sum * row.inverse_scale * column.inverse_scale;
            bool exact = fabsf(main[i]) < INFINITY;
            if (CHECKS_CANCELLATION) {
                if ((sum == 0) | row.skip_cancellation | column.skip_cancellation) selected[i / 32] &= ~bit;
                exact &= many_products && fabsf(sum) >= row.error_floor + column.error_floor;
            } else {
                exact &= !(row.fallback | column.fallback);
            }
            if (!exact) selected[i / 32] |= bit;
        }
        if (bits()) { // rare; some may be outside the matrix
            #pragma unroll
            for (int i = 0; i < SUMS; i++)
                if (!tile.inside(i)) selected[i / 32] &= ~(1u << i % 32);
        }
        return bits();
    }

  private:
    __device__ __forceinline__ uint64_t bits() const {
        return SUMS > 32 ? (uint64_t)selected[SUMS / 32 - 1] << 32 | selected[0] : selected[0];
    }
};

typedef char FullStage[Stage<MMA_KIND == FP16X2 ? 2 : 1>::SIZE];
static_assert(MMA_KIND != FP16X2 || Bf16x3Terms::STAGES * Stage<BF16X3_TERMS>::SIZE <= TILE_STAGES * sizeof(FullStage),
    "the stages of three terms fit into those of two");

// The producer thread: issues the copies for all tiles of this block.
template <int TERMS, int STAGES> __device__ __forceinline__ void produce(
    const PackedLayout &layout, TilePipeline &pipeline, char *shared, const TensorMaps &maps) {
    constexpr int SIZE_A = Stage<TERMS>::SIZE_A, SIZE_B = Stage<TERMS>::SIZE_B, SIZE = Stage<TERMS>::SIZE;
    constexpr int COPIES = COLUMNS_OF_TILE < PACKED_ROWS ? TERMS : 1; // one for each term of half a packed tile of op(B)
    PipelineState<STAGES> state;
    for (int work = blockIdx.x; work < SPLITS * layout.tiles; work += gridDim.x) {
        const TileSplit own(work, layout);
        const TileCoord at(own.tile, layout.rows_a, layout.tiles_n);
        const int column = at.column * TILE_N;
        const char *a = layout.packed_tile(at.item * layout.rows_a + at.row, 0, TERMS);
        const char *b = layout.packed_tile(layout.blocks_a + at.item * layout.rows_b + column / PACKED_ROWS, 0, TERMS);
        b += column % PACKED_ROWS * (PACKED_BYTES / PACKED_ROWS);
        for (int i = own.begin; i < own.end; i++, state.advance()) {
            pipeline.wait_empty(state);
            char *to = shared + state.stage * SIZE;
            Mbarrier &full = pipeline.full[state.stage];
            full.arrive_expect_tx(SIZE);
            if (DIRECT_A)
                maps.a.load(to, i * PACKED_K, at.row * PACKED_ROWS, at.item, full);
            else
                bulk_copy<SIZE_A>(to, a + (int64_t)i * SIZE_A, full);
            if (DIRECT_B) maps.b.load(to + SIZE_A, i * PACKED_K, column, at.item, full);
            #pragma unroll
            for (int j = 0; j < TILES_N && !DIRECT_B; j++) {
                const char *from = b + (j * (int64_t)layout.k_tiles + i) * SIZE_A;
                #pragma unroll
                for (int p = 0; p < COPIES; p++)
                    bulk_copy<SIZE_B / COPIES>(
                        to + SIZE_A + j * SIZE_B + p * (SIZE_B / COPIES), from + p * PACKED_BYTES, full);
            }
        }
    }
}

// A consumer warpgroup with scaled operands. counts: the lengths of the fallback lists of three tiles in rotation, initially 0.
template <class Terms> __device__ __forceinline__ void consume_scaled(const PackedLayout &layout,
    TilePipeline &pipeline, const char *shared, const Epilogue &out, int (&counts)[3]) {
    PipelineState<Terms::STAGES> state;
    for (int tile = blockIdx.x, round = 0; tile < layout.tiles; tile += gridDim.x, round++) {
        const AccumulatorTile own = accumulator_tile(tile, layout);
        const RowStats *stats_a = layout.stats + own.at.item * layout.rows_a * PACKED_ROWS;
        const RowStats *stats_b =
            layout.stats + (layout.blocks_a + own.at.item * layout.rows_b) * PACKED_ROWS + own.column0;
        Accumulators<Terms> sums;
        sums.multiply(pipeline, state, shared, layout.k_tiles,
            {stats_a[own.row(0)].cancellation_level, stats_a[own.row(2)].cancellation_level});
        const RowStats rows[2] = {stats_a[own.row(0)], stats_a[own.row(2)]};
        const uint64_t fallback = sums.finish(own, rows, stats_b);

        int &count = counts[round % 3];
        int mine = fallback ? atomicAdd(&count, __popcll(fallback)) : 0;
        named_barrier_sync(CONSUMER_THREADS);
        const int all = count;
        FallbackList &list = layout.fallback[tile];
        if (threadIdx.x == WARPGROUP) {
            counts[(round + 2) % 3] = 0; // all have read it before this barrier, and add to it after the next one
            list.count = all;
        }
        if (all > FALLBACK_CAPACITY) continue;
        if (fallback == 0) {
            own.store(out, sums.main);
            continue;
        }
        #pragma unroll
        for (int i = 0; i < SUMS; i++) {
            if (fallback >> i & 1)
                list.elements[mine++] = own.row(i) % PACKED_ROWS * PACKED_ROWS + own.column(i) % TILE_N;
            else
                own.store(out, sums.main, i);
        }
    }
}

// A consumer warpgroup with operands in TF32 or BFLOAT16. partial: the partial sums of split-K.
__device__ __forceinline__ void consume_rounded(
    const PackedLayout &layout, TilePipeline &pipeline, const char *shared, const Epilogue &epilogue, T *partial) {
#if SPLITS > 1
    typedef Store Out;
#else
    typedef Epilogue Out;
#endif
    typedef WarpEpilogue<(WIDE_C < Out::WIDEST ? WIDE_C : Out::WIDEST), Out> Stores;
    __shared__ WarpStaging staging[CONSUMER_THREADS / WARP];
    PipelineState<TILE_STAGES> state;
    for (int work = blockIdx.x; work < SPLITS * layout.tiles; work += gridDim.x) {
        const TileSplit own(work, layout);
#if SPLITS > 1
        const Out out = {partial + own.split * layout.batch * layout.m * layout.n};
#else
        const Out &out = epilogue;
#endif
        const AccumulatorTile tile = accumulator_tile(own.tile, layout);
        Stores::prefetch(tile, out, TILE_N);
        float sums[SUMS];
        multiply_stages(sums, pipeline, state, own.begin, own.end, [&](int at, bool add) {
            const Stage<1> stage(shared, at);
            #pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma<(MmaKind)MMA_KIND>(
                    sums, stage.a() + k * DESCRIPTOR_K_STEP, stage.b() + k * DESCRIPTOR_K_STEP, add || k > 0);
        });
        Stores::Loaded loaded;
        Stores(tile, out, staging[threadIdx.x / WARP - WARPGROUP / WARP], loaded).store(sums);
    }
}

KERNEL __launch_bounds__(THREADS, 1) packed_gemm(const T *a, const T *b, const Epilogue epilogue, int64_t batch,
    int64_t m, int64_t n, int64_t k, char *scratch) {
    const PackedLayout layout(batch, m, n, k, scratch);
    char *shared = SHARED_STAGES(FullStage, shared_bytes)[0];
    __shared__ TilePipeline pipeline;
    __shared__ int counts[3];
    if (threadIdx.x == 0) {
        pipeline.init(1, CONSUMER_THREADS / WARP);
        fence_mbarrier_init();
        counts[0] = counts[1] = counts[2] = 0;
    }
    const bool bf16x3 = MMA_KIND == FP16X2 && layout.use_bf16x3(); // row_stats has ended, see wait_for_inputs()
    wait_for_inputs();
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x >= (DIRECT_A || DIRECT_B ? WARP : 1)) return;
        TensorMaps &maps = layout.maps[blockIdx.x];
#if DIRECT_A || DIRECT_B
        __shared__ TensorMaps in_shared;
        if (DIRECT_A) maps.a.encode(in_shared.a, a, k, m, batch, PACKED_ROWS);
        if (DIRECT_B) maps.b.encode(in_shared.b, b, k, n, batch, TILE_N);
        if (threadIdx.x > 0) return;
#endif
        if constexpr (MMA_KIND != FP16X2)
            produce<1, TILE_STAGES>(layout, pipeline, shared, maps);
        else if (bf16x3)
            produce<Bf16x3Terms::COUNT, Bf16x3Terms::STAGES>(layout, pipeline, shared, maps);
        else
            produce<Fp16x2Terms::COUNT, Fp16x2Terms::STAGES>(layout, pipeline, shared, maps);
    } else {
        warpgroup_reg_alloc<240>();
        if constexpr (MMA_KIND != FP16X2)
            consume_rounded(layout, pipeline, shared, epilogue, (T *)scratch);
        else if (bf16x3)
            consume_scaled<Bf16x3Terms>(layout, pipeline, shared, epilogue, counts);
        else
            consume_scaled<Fp16x2Terms>(layout, pipeline, shared, epilogue, counts);
    }
}
