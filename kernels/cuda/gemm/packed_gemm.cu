// C = op(A) op(B) of large matrices by WGMMA, from packed operands: see gemm/packed.cuh. Persistent and warp-specialised: one
// block per multiprocessor goes from tile to tile; one thread issues copies, two consumer warpgroups multiply.
//
// With SPLITS > 1 the partial sums go to scratch; gemm/split_k_sum.cu adds them.
//
// Macros (PackedGemm in packed.py): MMA_KIND, TILE_N, TILE_STAGES, DIRECT_*, SPLITS. WIDE_C: elements per store; for TF32
// and BFLOAT16 the maximum.
#include "gemm/packed_accumulate.cuh"
#include "sm90/warp_epilogue.cuh"

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
        int last = 0;
        for (int i = own.begin; i < own.end; i++) {
            pipeline.wait_full(state);
            const Stage<1> stage(shared, state.stage);
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma<(MmaKind)MMA_KIND>(
                    sums, stage.a() + k * DESCRIPTOR_K_STEP, stage.b() + k * DESCRIPTOR_K_STEP, i + k > own.begin);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            if (i > own.begin) release(pipeline, last);
            last = state.stage;
            state.advance();
        }
        wgmma_wait_group<0>();
        release(pipeline, last);
        wgmma_fence_operand(sums);
        Stores(tile, out, staging[threadIdx.x / WARP - WARPGROUP / WARP]).store(sums);
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
