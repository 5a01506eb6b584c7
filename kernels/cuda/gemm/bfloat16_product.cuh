// The main loop of products C = A B of operands that are bfloat16 in memory, by WGMMA: of matrices in gemm/bfloat16_gemm.cu, of
// images in conv/bfloat16_conv.cu and conv/bfloat16_gather.cu. Persistent and warp-specialised, as gemm/packed_gemm.cu. Two threads
// issue copies, one for each operand. The consumer warpgroups share a tile, 64 or 128 rows each. With PINGPONG two take tiles in
// turns: one multiplies while the other one stores.
//
// IN_TF32: operands are float32, and TMA rounds them to tf32. wgmma takes such operands only if they are K-major.
//
// GATHER_A, GATHER_B: all threads of the producer warpgroup copy the operand, by cp.async; with IN_TF32 they round it in registers.
// If only one operand is gathered, the first thread also issues the copies of the other one by TMA. The boxes in shared memory are
// the same.
//
// TMA loads TILE_K of K in a stage, as boxes whose rows are BOX_A or BOX_B elements: 128 bytes with the 128-byte swizzle, or 64 with
// the 64-byte swizzle. A box of a K-major operand has all TILE_M or TILE_N rows. A box of an operand that is not K-major (MN_MAJOR_A,
// MN_MAJOR_B) has TILE_K rows of K, and its columns are rows of A or columns of B.
//
// SPLITS > 1: the tiles of the last wave, which do not fill all multiprocessors, are split along K (split-K). Their partial sums go
// to scratch, tile by tile, and add_splits() adds them. `whole` is the number of tiles that are not split.
//
// TERMS > 1: an operand is the sum of several arrays of bfloat16, its terms: two for tf32, three for float32 (bf16x3). A stage has
// the tiles of all terms, one after another. The products of terms that are too small to matter are left out (low_order_pair). With
// three terms wgmma sums the products of first terms over 32 of K only, because tensor cores truncate when they add; float32
// additions sum the results. All other products have an accumulator of their own.
//
// Sums over the rows of the result (Epilogue::SUMS): the number of blocks is a multiple of the columns of tiles, so all tiles of a
// block are in one column. A block adds the addends of all its tiles, and writes its sums to scratch. SPLITS is 1. Another kernel adds
// the sums of all blocks.
//
// What the epilogue reads is loaded before the product of a tile, if registers suffice (EARLY in consume()). Otherwise it is
// prefetched to L2 before the product, if PREFETCHES: then that of all blocks fits into a part of L2.
//
// A class Product describes the operands and the result:
//   int k_tiles(int64_t item)            tiles of K of an item of the batch
//   auto load_a(const TileSplit &), load_b   a function (int k_tile, char *stage, Mbarrier &full) that issues the copies of a stage,
//                                        or this thread's copies if the operand is gathered
//   Stage                                what a stage holds: Boxes, or a class like it
//   void load_once(char *shared)         if operands are gathered: the copies of this thread before the first stage
//   Tile tile(const TileSplit &, int row, int column)   the places of results in memory: an AccumulatorTile, or derived from it
//
// Macros (Bfloat16Product in gemm/bfloat16.py): TILE_M, TILE_N, TILE_K, TILE_STAGES, BLOCK_THREADS, PINGPONG, IN_TF32, TERMS, SPLITS,
// PREFETCHES, MN_MAJOR_*, BOX_*, GATHER_*.
// WIDE_C: maximum elements per store. SUM_THREADS, SUM_COLUMNS: threads of a block, and columns of a thread, that add splits.
#pragma once
#include "sm90/accumulator.cuh"
#include "sm90/tma.cuh"

constexpr int SUMS = TILE_N / 2;
constexpr int THREADS = BLOCK_THREADS, CONSUMERS = THREADS - WARPGROUP, GROUPS = CONSUMERS / WARPGROUP;
constexpr int WGMMA_ROWS = 64, PARTS_M = TILE_M / WGMMA_ROWS / (PINGPONG ? 1 : GROUPS); // of a tile, by a consumer warpgroup
constexpr MmaKind KIND = IN_TF32 ? TF32 : BFLOAT16;
constexpr int ELEMENT = IN_TF32 ? 4 : 2;                                        // bytes
constexpr int STEP_K = 32 / ELEMENT, STEPS = TILE_K / STEP_K;                   // K of a wgmma, and wgmmas of a stage
constexpr int TERM_A = TILE_M * TILE_K * ELEMENT, TERM_B = TILE_N * TILE_K * ELEMENT; // of a term of a stage, in bytes
constexpr int SIZE_A = TERMS * TERM_A, SIZE = SIZE_A + TERMS * TERM_B;          // of a stage
static_assert(TERMS < 3 || PARTS_M == 1, "registers suffice");
static_assert(!IN_TF32 || (TERMS == 1 && !MN_MAJOR_A && !MN_MAJOR_B), "wgmma takes K-major operands in tf32");
constexpr int EARLY_REGISTERS = 160; // for accumulators, and auxiliary inputs that are loaded before the product
constexpr int ALL_CONSUMERS = 1 + GROUPS; // the named barrier of all consumers; barrier 1 + i is that of consumer warpgroup i
constexpr bool GATHERS = GATHER_A || GATHER_B;
static_assert(!GATHERS || TERMS < 3, "multiply_terms() has no fence for what threads copy");
constexpr int WIDE_RESULT = WIDE_C < Epilogue::WIDEST ? WIDE_C : Epilogue::WIDEST;

// A product of term a of A and term b of B.
struct TermPair {
    int a, b;
};
constexpr int PROMOTED_STEPS = 2; // with three terms, the steps after which float32 additions sum the products of first terms
// The products of terms other than {0, 0}, which comes after them. The smallest are first.
constexpr int LOW_ORDER_PAIRS = TERMS == 3 ? 5 : TERMS == 2 ? 2 : 0;
__device__ constexpr TermPair low_order_pair(int i) {
    constexpr TermPair pairs[] = {{0, 2}, {2, 0}, {1, 1}, {0, 1}, {1, 0}};
    return pairs[5 - LOW_ORDER_PAIRS + i];
}

// The work of the grid for a batch of m x n results: whole tiles, and splits of others.
struct Work {
    int m, n, rows, columns, whole, split;

    __device__ Work(int64_t batch, int64_t m, int64_t n, int64_t whole)
        : m(m), n(n), rows((m + TILE_M - 1) / TILE_M), columns((n + TILE_N - 1) / TILE_N), whole(whole),
          split(batch * rows * columns - whole) {}

    // Of several products: `tiles` is the number of all of their tiles.
    __device__ Work(int64_t tiles, int64_t whole) : m(0), n(0), rows(0), columns(0), whole(whole), split(tiles - whole) {}

    __device__ __forceinline__ int count() const { return whole + SPLITS * split; }
};

// Where a tile is, by a product. An overload for several products finds the product of the tile.
template <class Product> __device__ __forceinline__ TileCoord tile_coordinates(const Product &, const Work &work, int tile) {
    return TileCoord(tile, work.rows, work.columns);
}
// The epilogue of a tile. Likewise.
__device__ __forceinline__ const Epilogue &epilogue_at(const Epilogue &epilogue, const TileCoord &) { return epilogue; }

// Item `i` of the work: a tile of the result, over tiles `begin` to `end` of K. row, column: where the tile begins in the result.
// part: the number of its partial sums; -1 for a whole tile.
struct TileSplit {
    TileCoord at;
    int part, row, column, begin, end;

    template <class Product> __device__ __forceinline__ TileSplit(int i, const Work &work, const Product &product)
        : at(coordinates(i, work, product)) {
        row = at.row * TILE_M;
        column = at.column * TILE_N;
        part = -1;
        begin = 0;
        end = product.k_tiles(at.item);
        if (is_whole(i, work)) return;
        const int tile = (i - work.whole) % work.split, number = (i - work.whole) / work.split, k_tiles = end;
        part = tile * SPLITS + number;
        begin = k_tiles * number / SPLITS;
        end = k_tiles * (number + 1) / SPLITS;
    }

  private:
    template <class Product> __device__ __forceinline__ static TileCoord coordinates(
        int i, const Work &work, const Product &product) {
        if constexpr (Epilogue::SUMS > 0) {
            TileCoord at;
            at.item = i / (work.rows * work.columns);
            at.row = i / work.columns % work.rows;
            at.column = i % work.columns;
            return at;
        }
        return tile_coordinates(product, work, is_whole(i, work) ? i : work.whole + (i - work.whole) % work.split);
    }
    __device__ __forceinline__ static bool is_whole(int i, const Work &work) { return SPLITS == 1 || i < work.whole; }
};

// A producer thread: issues its copies in each stage, for all work of this block. start(own) returns the function that issues those
// of a stage.
template <class Product, class Start> __device__ __forceinline__ void produce(const Work &work, const Product &product,
    Pipeline<TILE_STAGES> &pipeline, char *shared, const Start &start) {
    PipelineState<TILE_STAGES> state;
    for (int i = blockIdx.x; i < work.count(); i += gridDim.x) {
        const TileSplit own(i, work, product);
        const auto load = start(own);
        for (int k_tile = own.begin; k_tile < own.end; k_tile++, state.advance()) {
            pipeline.wait_empty(state);
            load(k_tile, shared + state.stage * Product::Stage::BYTES, pipeline.full[state.stage]);
        }
    }
}

// The copies of a stage by TMA, BYTES bytes.
template <int BYTES, class Load> __device__ __forceinline__ auto expecting(const Load &load) {
    return [=](int k_tile, char *stage, Mbarrier &full) {
        full.arrive_expect_tx(BYTES);
        load(k_tile, stage, full);
    };
}

// The producer warps, where operands are gathered.
template <class Product> __device__ __forceinline__ void gather(
    const Work &work, const Product &product, Pipeline<TILE_STAGES> &pipeline, char *shared) {
    product.load_once(shared);
    produce(work, product, pipeline, shared, [&](const TileSplit &own) {
        const auto load_a = product.load_a(own);
        const auto load_b = product.load_b(own);
        return [=](int k_tile, char *stage, Mbarrier &full) {
            if (!GATHER_A && threadIdx.x == 0) expecting<SIZE_A>(load_a)(k_tile, stage, full);
            if (!GATHER_B && threadIdx.x == 0) expecting<SIZE - SIZE_A>(load_b)(k_tile, stage + SIZE_A, full);
            if (GATHER_A) load_a(k_tile, stage, full);
            if (GATHER_B) load_b(k_tile, stage + SIZE_A, full);
            if constexpr (IN_TF32) { // the threads have stored what they rounded
                fence_proxy_async();
                full.arrive();
            } else {
                full.arrive_after_copies();
            }
        };
    });
}

// A tile of a term of an operand in shared memory: ROWS rows of A or columns of B, in boxes whose rows are BOX elements.
template <bool MN_MAJOR, int ROWS, int BOX> struct OperandTile {
    static constexpr int ROW_BYTES = BOX * ELEMENT, BOX_BYTES = (MN_MAJOR ? TILE_K : ROWS) * ROW_BYTES;
    static constexpr int BOXES = (MN_MAJOR ? ROWS : TILE_K) / BOX;
    static constexpr Swizzle SWIZZLE = ROW_BYTES == 128 ? SWIZZLE_128B : SWIZZLE_64B;
    static_assert(ROW_BYTES == 128 || ROW_BYTES == 64, "a row has the length of a swizzle");

    // The descriptor of the elements of a step along K, from row `first` on.
    __device__ __forceinline__ static uint64_t descriptor(const char *tile, int first, int step) {
        if constexpr (MN_MAJOR)
            return smem_descriptor(
                tile + first / BOX * BOX_BYTES + step * STEP_K * ROW_BYTES, BOX_BYTES, 8 * ROW_BYTES, SWIZZLE);
        else
            return smem_descriptor(tile + step / (ROW_BYTES / 32) * BOX_BYTES + first * ROW_BYTES + step % (ROW_BYTES / 32) * 32,
                16, 8 * ROW_BYTES, SWIZZLE);
    }
};
typedef OperandTile<MN_MAJOR_A, TILE_M, BOX_A> TileA;
typedef OperandTile<MN_MAJOR_B, TILE_N, BOX_B> TileB;

// A stage with TILE_K of both operands, in boxes.
struct Boxes {
    static constexpr int BYTES = SIZE, WGMMAS = STEPS; // steps along K

    // Starts the product of two terms for 64 rows, from row `first` on, and the elements of a step along K in stage `at`.
    __device__ __forceinline__ static void start_product(
        float (&sums)[SUMS], const char *shared, int at, int first, int step, TermPair terms, bool add) {
        const char *const stage = shared + at * SIZE;
        wgmma<KIND, MN_MAJOR_A, MN_MAJOR_B>(sums, TileA::descriptor(stage + terms.a * TERM_A, first, step),
            TileB::descriptor(stage + SIZE_A + terms.b * TERM_B, 0, step), add);
    }
};

// By a consumer warpgroup: the products of three terms in stages `begin` to `end` - 1, for 64 rows from row `first` on.
__device__ __forceinline__ void multiply_terms(float (&main)[SUMS], Pipeline<TILE_STAGES> &pipeline,
    PipelineState<TILE_STAGES> &state, const char *shared, int first, int begin, int end) {
    float low_order[SUMS];
    const auto lead = [&](float (&sums)[SUMS], int stage, int part) {
        #pragma unroll
        for (int step = 0; step < PROMOTED_STEPS; step++)
            Boxes::start_product(sums, shared, stage, first, part * PROMOTED_STEPS + step, {0, 0}, step > 0);
    };
    const auto low = [&](float (&sums)[SUMS], int stage, int part, bool add, int) {
        #pragma unroll
        for (int step = 0; step < PROMOTED_STEPS; step++) {
            #pragma unroll
            for (int p = 0; p < LOW_ORDER_PAIRS; p++)
                Boxes::start_product(
                    sums, shared, stage, first, part * PROMOTED_STEPS + step, low_order_pair(p), add || step + p > 0);
        }
    };
    multiply_promoted<STEPS / PROMOTED_STEPS>(main, low_order, pipeline, state, begin, end, lead, low, [](int) {});
    #pragma unroll
    for (int j = 0; j < SUMS; j++) main[j] += low_order[j];
}

typedef ColumnSums<TILE_N, Epilogue::SUMS> BlockSums; // a warp's part

// Adds the sums of the consumer warps, and writes those of the block to block_sums[blockIdx.x / columns of tiles][sum][column].
template <class Stores> __device__ __forceinline__ void write_sums(
    const BlockSums &columns, const Work &work, WarpStaging *stagings, T *block_sums) {
    constexpr int WARPS = CONSUMERS / WARP;
    const int thread = threadIdx.x - WARPGROUP, first = blockIdx.x % work.columns * TILE_N;
    T *const row = block_sums + (int64_t)(blockIdx.x / work.columns) * Epilogue::SUMS * work.n + first;
    #pragma unroll
    for (int n = 0; n < Epilogue::SUMS; n++) {
        float *const own = stagings[thread / WARP][0];
        __syncwarp();
        #pragma unroll
        for (int round = 0; round < TILE_N / ROUND_COLUMNS; round++) own[Stores::summed_column(round)] = columns.of[round][n];
        named_barrier_sync(CONSUMERS, ALL_CONSUMERS);
        for (int column = thread; column < TILE_N && first + column < work.n; column += CONSUMERS) {
            T sum = 0;
            #pragma unroll
            for (int warp = 0; warp < WARPS; warp++) sum += stagings[warp][0][column];
            row[n * work.n + column] = sum;
        }
        named_barrier_sync(CONSUMERS, ALL_CONSUMERS);
    }
}

// A consumer warpgroup.
template <class Product, class Epilogues> __device__ __forceinline__ void consume(const Work &work, const Product &product,
    Pipeline<TILE_STAGES> &pipeline, const char *shared, WarpStaging *stagings, const Epilogues &epilogues, T *partial_sums) {
    typedef typename Product::Stage Stage;
    typedef WarpEpilogue<WIDE_RESULT, Epilogue, typename Product::Tile> Late;
    constexpr int ROUNDS = TILE_N / ROUND_COLUMNS;
    constexpr bool EARLY =
        SPLITS == 1 && TERMS == 1 && PARTS_M * (SUMS + ROUNDS * Late::ROUND_REGISTERS) <= EARLY_REGISTERS;
    typedef WarpEpilogue<WIDE_RESULT, Epilogue, typename Product::Tile, EARLY ? ROUNDS : 0> Stores;
    PipelineState<TILE_STAGES> state;
    WarpStaging &staging = stagings[(threadIdx.x - WARPGROUP) / WARP];
    BlockSums columns;
    const int group = threadIdx.x / WARPGROUP - 1; // the number of this consumer warpgroup
    const int part = PINGPONG ? 0 : group * PARTS_M; // its first 64 rows of a tile
    for (int i = blockIdx.x, turn = 0; i < work.count(); i += gridDim.x, turn++) {
        const TileSplit own(i, work, product);
        if (PINGPONG && turn % GROUPS != group) {
            state.advance(own.end - own.begin);
            continue;
        }
        const Epilogue &epilogue = epilogue_at(epilogues, own.at);
        typename Stores::Loaded loaded[PARTS_M];
        #pragma unroll
        for (int p = 0; p < PARTS_M; p++) {
            const auto tile = product.tile(own, own.row + (part + p) * WGMMA_ROWS, own.column);
            if (EARLY)
                Stores(tile, epilogue, staging, loaded[p]).load_all();
            else if (PREFETCHES)
                Stores::prefetch(tile, epilogue, TILE_N);
        }
        float sums[PARTS_M][SUMS] = {};
        if (PINGPONG && turn > 0) named_barrier_sync(CONSUMERS, 1 + group); // the other warpgroup has multiplied its stages
        if constexpr (TERMS == 3) {
            if (own.begin < own.end)
                multiply_terms(sums[0], pipeline, state, shared, part * WGMMA_ROWS, own.begin, own.end);
        } else if (own.begin < own.end) {
            multiply_stages(sums, pipeline, state, own.begin, own.end, [&](int at, bool add) {
                if (GATHERS && !IN_TF32) fence_proxy_async();
                #pragma unroll
                for (int step = 0; step < Stage::WGMMAS; step++) {
                    #pragma unroll
                    for (int i = 0; i <= LOW_ORDER_PAIRS; i++) {
                        const TermPair terms = i < LOW_ORDER_PAIRS ? low_order_pair(i) : TermPair{0, 0};
                        #pragma unroll
                        for (int p = 0; p < PARTS_M; p++)
                            Stage::start_product(
                                sums[p], shared, at, (part + p) * WGMMA_ROWS, step, terms, add || step + i > 0);
                    }
                }
            });
        }
        if (PINGPONG && i + gridDim.x < work.count()) named_barrier_arrive(CONSUMERS, 1 + (turn + 1) % GROUPS);
        #pragma unroll
        for (int p = 0; p < PARTS_M; p++) {
            const int row = (part + p) * WGMMA_ROWS;
            if (SPLITS == 1 || own.part < 0) {
                const auto tile = product.tile(own, own.row + row, own.column);
                Stores(tile, epilogue, staging, loaded[p]).store(sums[p], columns);
            } else {
                AccumulatorTile sums_tile = {own.at, TILE_M, TILE_N, row, 0};
                sums_tile.at.item = own.part;
                const Store store = {partial_sums};
                typedef WarpEpilogue<Store::WIDEST, Store> StoresSums;
                typename StoresSums::Loaded none;
                StoresSums(sums_tile, store, staging, none).store(sums[p]);
            }
        }
    }
    if constexpr (Epilogue::SUMS > 0) write_sums<Stores>(columns, work, stagings, partial_sums);
}

constexpr int PRODUCER_REGISTERS = GATHERS ? 72 : 40, CONSUMER_REGISTERS = GATHERS ? 216 : 232;
static_assert(GROUPS == 1 || registers_suffice(WARPGROUP, PRODUCER_REGISTERS, CONSUMERS, CONSUMER_REGISTERS));

// The kernel, for a block.
template <class Product, class Epilogues> __device__ __forceinline__ void multiply(
    const Work &work, const Product &product, const Epilogues &epilogues, char *scratch) {
    __shared__ Pipeline<TILE_STAGES> pipeline;
    __shared__ WarpStaging staging[CONSUMERS / WARP];
    const int warp = threadIdx.x / WARP;
    if (threadIdx.x == 0) {
        pipeline.init(GATHERS ? WARPGROUP + (GATHER_A != GATHER_B) : 2, (PINGPONG ? WARPGROUP : CONSUMERS) / WARP);
        fence_mbarrier_init();
    }
    wait_for_inputs(); // nothing before it reads memory
    __syncthreads();
    char *shared = SHARED_STAGES(char[Product::Stage::BYTES], shared_bytes)[0];
    if (warp < WARPGROUP / WARP) {
        if (GROUPS > 1) warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if constexpr (GATHERS)
            gather(work, product, pipeline, shared);
        else if (threadIdx.x == 0)
            produce(work, product, pipeline, shared,
                [&](const TileSplit &own) { return expecting<SIZE_A>(product.load_a(own)); });
        else if (threadIdx.x == WARP)
            produce(work, product, pipeline, shared + SIZE_A,
                [&](const TileSplit &own) { return expecting<SIZE - SIZE_A>(product.load_b(own)); });
    } else {
        if (GROUPS > 1) warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        consume(work, product, pipeline, shared, staging, epilogues, (T *)scratch);
    }
}

// Adds the partial sums of each split tile in order, and calls the epilogue. The thread with index `i` takes SUM_COLUMNS columns.
template <class Product, class Epilogues> __device__ __forceinline__ void add_splits(
    int i, const Work &work, const Product &product, const Epilogues &epilogues, const T *scratch) {
    constexpr int WIDE = WIDE_RESULT < SUM_COLUMNS ? WIDE_RESULT : SUM_COLUMNS;
    constexpr int ROW = TILE_N / SUM_COLUMNS;
    const int number = i / (TILE_M * ROW);
    if (number >= work.split) return;
    const TileSplit own(work.whole + number, work, product);
    const Epilogue &epilogue = epilogue_at(epilogues, own.at);
    const int row = i / ROW % TILE_M, column = i % ROW * SUM_COLUMNS;
    const auto tile = product.tile(own, own.row, own.column);
    const T *partial_sums = scratch + ((int64_t)number * SPLITS * TILE_M + row) * TILE_N + column;
    constexpr int AHEAD = SPLITS < 32 ? SPLITS : 32; // loads before the first sum
    T sums[SUM_COLUMNS] = {};
    #pragma unroll 1
    for (int first = 0; first < SPLITS; first += AHEAD) {
        Vector<T, SUM_COLUMNS> parts[AHEAD];
        #pragma unroll
        for (int s = 0; s < AHEAD; s++)
            if (SPLITS % AHEAD == 0 || first + s < SPLITS)
                parts[s] = load<T, SUM_COLUMNS>(partial_sums + (first + s) * TILE_M * TILE_N);
        #pragma unroll
        for (int s = 0; s < AHEAD; s++) {
            #pragma unroll
            for (int w = 0; w < SUM_COLUMNS; w++)
                if (SPLITS % AHEAD == 0 || first + s < SPLITS) sums[w] += parts[s].lane[w];
        }
    }
    #pragma unroll
    for (int h = 0; h < SUM_COLUMNS; h += WIDE) {
        const int r = own.row + row, c = own.column + column + h;
        if (!tile.inside(r, c)) return;
        T sum[WIDE];
        #pragma unroll
        for (int w = 0; w < WIDE; w++) sum[w] = sums[h + w];
        epilogue(tile.at.item, tile.memory_row(r), tile.memory_column(c), tile.index(r, c), sum);
    }
}
