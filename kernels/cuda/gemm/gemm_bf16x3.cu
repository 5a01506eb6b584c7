// C = op(A) op(B) by WGMMA in bf16x3 (sm90/bf16x3.cuh), for operands that are not packed. Two producer warpgroups load float32
// with cp.async, split it into three bfloat16 terms, and store these in shared memory. Two consumer warpgroups multiply, each
// half of a tile's rows. The kernel is persistent. With split-K (SPLIT) partial sums go to scratch; gemm/split_k_sum.cu adds
// them.
//
// The products of leading terms are exact. Tensor cores truncate when they add, so they sum over TILE_K of K only; float32
// additions sum the results. The low-order products, 2^-8 of the others, have accumulators of their own.
//
// Macros (Bf16x3Gemm in bf16x3.py): TILE_N, TRANSPOSE_A, TRANSPOSE_B. WIDE_A, WIDE_B: elements per load. WIDE_C, WIDE_TILE:
// elements per store, from accumulators and from a staged tile. ONE_TILE: a block computes one split of one tile.
#include "gemm/gemm.cuh"
#include "sm90/bf16x3.cuh"
#include "sm90/accumulator.cuh"
#include "gemm/staged_epilogue.cuh"

constexpr int TILE_M = 128, ROWS = 64, CONSUMERS = TILE_M / ROWS; // CONSUMERS: warpgroups, of ROWS rows each
constexpr int PRODUCER_THREADS = 2 * WARPGROUP, THREADS = PRODUCER_THREADS + CONSUMERS * WARPGROUP;
constexpr int TILE_K = 32, MMA_K = 16, STAGES = 3; // K of a stage and of an instruction
constexpr int SUMS = TILE_N / 2;                   // accumulators of a thread
constexpr int STAGGER = 2;                         // stages by which a consumer warpgroup starts before the next one

// ROWS rows of op(A), or columns of op(B). Global memory has them as [row][k] if K_MAJOR, else as [k][row], with WIDE elements
// per load. Shared memory has chunks of eight elements that are neighbours in global memory. A plane holds all chunks with the
// same eight k (or rows). Planes are padded so that eight threads write without bank conflicts.
template <int ROWS, bool K_MAJOR, int WIDE> struct Operand {
    static constexpr int PLANES = (K_MAJOR ? TILE_K : ROWS) / CHUNK_ELEMENTS, PLANE_CHUNKS = K_MAJOR ? ROWS : TILE_K;
    static constexpr int PLANE = (PLANE_CHUNKS + (K_MAJOR ? 2 : 1)) * CHUNK_BYTES, TERM = PLANES * PLANE; // bytes
    static constexpr int SIZE = BF16X3_TERMS * TERM; // bytes of a stage
    static constexpr int CHUNKS = PLANES * PLANE_CHUNKS, PER_THREAD = (CHUNKS + PRODUCER_THREADS - 1) / PRODUCER_THREADS;
    static constexpr int STAGING = PER_THREAD * PRODUCER_THREADS * CHUNK_ELEMENTS; // float32 elements before the split
    static_assert(ROWS % CHUNK_ELEMENTS == 0, "whole chunks");

    const T *x;
    int length, k, first; // rows and k of the matrix, and the first row of the tile

    // Starts the copies of a stage from k0 on. Neighbouring lanes of a warp copy neighbours in global memory.
    __device__ __forceinline__ void start(T *staging, int k0) const {
        constexpr int COPIES = CHUNK_ELEMENTS / WIDE;
        constexpr int UNROLL = WIDE == VECTOR && CHUNKS % PRODUCER_THREADS == 0 ? PER_THREAD * COPIES : 1;
        #pragma unroll UNROLL // otherwise the addresses need too many registers
        for (int i = 0; i < PER_THREAD * COPIES; i++) {
            const int copy = i % COPIES * WARP + threadIdx.x % WARP, j = copy % COPIES * WIDE;
            const int at = i / COPIES * PRODUCER_THREADS + threadIdx.x / WARP * WARP + copy / COPIES;
            if (CHUNKS % PRODUCER_THREADS != 0 && at >= CHUNKS) break;
            const int across = at % PLANES * CHUNK_ELEMENTS, down = at / PLANES;
            const int row = first + (K_MAJOR ? down : across), depth = k0 + (K_MAJOR ? across : down);
            const int remaining = row < length && depth < k ? K_MAJOR ? k - depth : length - row : 0;
            const int from = K_MAJOR ? row * k + depth : depth * length + row;
            cp_async<WIDE * sizeof(T)>(staging + swizzled(at, j), x + from + j, remaining > j);
        }
    }

    // Splits the chunks that this warp has copied, and stores them in a stage.
    static __device__ __forceinline__ void split(const T *staging, char *stage) {
        #pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int at = i * PRODUCER_THREADS + threadIdx.x;
            if (CHUNKS % PRODUCER_THREADS != 0 && at >= CHUNKS) break;
            float found[CHUNK_ELEMENTS];
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j += VECTOR) {
                const Vector<T, VECTOR> v = load<T, VECTOR>(staging + swizzled(at, j));
                #pragma unroll
                for (int h = 0; h < VECTOR; h++) found[j + h] = v.lane[h];
            }
            Chunk terms[BF16X3_TERMS];
            split_bf16x3(terms, found);
            #pragma unroll
            for (int p = 0; p < BF16X3_TERMS; p++)
                *(Chunk *)(stage + p * TERM + at % PLANES * PLANE + at / PLANES * CHUNK_BYTES) = terms[p];
        }
    }

    // The descriptor of term 0 and k 0 from row `row` on, and the offset to add for another term and k.
    static __device__ __forceinline__ uint64_t descriptor(const char *stage, int row) {
        return K_MAJOR ? smem_descriptor(stage + row * CHUNK_BYTES, PLANE, CORE_MATRIX_BYTES, NO_SWIZZLE)
                       : smem_descriptor(stage + row / CHUNK_ELEMENTS * PLANE, CORE_MATRIX_BYTES, PLANE, NO_SWIZZLE);
    }
    static __device__ __forceinline__ int offset(int term, int k) {
        return (term * TERM + (K_MAJOR ? k / CHUNK_ELEMENTS * PLANE : k * CHUNK_BYTES)) / CHUNK_BYTES;
    }

  private:
    // The position of element j of chunk `at` in staging. The halves of some chunks are swapped so that eight threads read
    // without bank conflicts.
    static __device__ __forceinline__ int swizzled(int at, int j) {
        return at * CHUNK_ELEMENTS + (j / VECTOR ^ at / 4 % 2) * VECTOR + j % VECTOR;
    }
};
typedef Operand<TILE_M, !TRANSPOSE_A, WIDE_A> OperandA;
typedef Operand<TILE_N, TRANSPOSE_B, WIDE_B> OperandB;
constexpr int STAGE = OperandA::SIZE + OperandB::SIZE, STAGING = OperandA::STAGING + OperandB::STAGING;
typedef StagedTile<TILE_M, TILE_N> Tiled;
#ifdef SHARED_BYTES
static_assert(STAGES * STAGE + (2 * STAGING > TILE_M * Tiled::ROW ? 2 * STAGING : TILE_M * Tiled::ROW) * (int)sizeof(T) == SHARED_BYTES,
    "as `Bf16x3Gemm.shared` in bf16x3.py says");
#endif

// All splits of all tiles of all matrices.
struct Problem {
    const T *a, *b;
    int m, n, k, splits, tiles;

    __device__ Problem(const T *a, const T *b, int64_t batch, int64_t m, int64_t n, int64_t k, int64_t splits)
        : a(a), b(b), m(m), n(n), k(k), splits(splits), tiles(batch * rows() * columns()) {}
    __device__ __forceinline__ int rows() const { return (m + TILE_M - 1) / TILE_M; }
    __device__ __forceinline__ int columns() const { return (n + TILE_N - 1) / TILE_N; }
    __device__ __forceinline__ int count() const { return tiles * splits; }
};

// A split of a tile: stages begin to end of K.
struct TileSplit {
    TileCoord at;
    int split, begin, end;

    __device__ TileSplit(const Problem &problem, int i)
        : at(i % problem.tiles, problem.rows(), problem.columns()), split(i / problem.tiles) {
        const int64_t stages = (problem.k + TILE_K - 1) / TILE_K;
        begin = stages * split / problem.splits;
        end = stages * (split + 1) / problem.splits;
    }
    __device__ __forceinline__ const T *a(const Problem &p) const { return p.a + at.item * p.m * p.k; }
    __device__ __forceinline__ const T *b(const Problem &p) const { return p.b + at.item * p.k * p.n; }
};

// Iterates over the stages of all splits of a block.
struct StageIterator {
    const Problem &problem;
    int i, stage, end;
    OperandA a;
    OperandB b;

    __device__ explicit StageIterator(const Problem &problem) : problem(problem), i(blockIdx.x) { enter(); }
    __device__ __forceinline__ bool more() const { return i < problem.count(); }
    __device__ __forceinline__ void start(T *staging) const {
        a.start(staging, stage * TILE_K);
        b.start(staging + OperandA::STAGING, stage * TILE_K);
    }
    __device__ __forceinline__ void next() {
        if (++stage < end) return;
        i += gridDim.x;
        enter();
    }

  private:
    __device__ __forceinline__ void enter() {
        if (!more()) return;
        const TileSplit work(problem, i);
        stage = work.begin;
        end = work.end;
        a = {work.a(problem), problem.m, problem.k, work.at.row * TILE_M};
        b = {work.b(problem), problem.n, problem.k, work.at.column * TILE_N};
    }
};

// `begun`: the first consumer warpgroup is STAGGER stages ahead.
struct Barriers {
    Pipeline<STAGES> pipeline;
    Mbarrier begun;

    __device__ void init() {
        pipeline.init(PRODUCER_THREADS / WARP, CONSUMERS * WARPGROUP / WARP);
        begun.init(WARPGROUP / WARP);
        fence_mbarrier_init();
    }
};

// Producers. The copies of the next stage are in flight while this one is split.
__device__ __forceinline__ void produce(const Problem &problem, Barriers &barriers, char *shared, T *staging) {
    StageIterator ahead(problem);
    PipelineState<STAGES> state;
    bool any = ahead.more();
    if (any) ahead.start(staging);
    cp_async_commit_group();
    for (int i = 0; any; i++, state.advance()) {
        ahead.next();
        any = ahead.more();
        if (any) ahead.start(staging + (i + 1) % 2 * STAGING);
        cp_async_commit_group();
        cp_async_wait_group<1>();
        barriers.pipeline.wait_empty(state);
        __syncwarp(); // all lanes' copies have landed
        const T *copied = staging + i % 2 * STAGING;
        char *stage = shared + state.stage * STAGE;
        OperandA::split(copied, stage);
        OperandB::split(copied + OperandA::STAGING, stage + OperandA::SIZE);
        fence_proxy_async();
        arrive_per_warp(barriers.pipeline.full[state.stage]); // its __syncwarp() also frees the staging buffer
    }
}

struct Accumulators {
    float main[SUMS], low_order[SUMS];

    // first: the block's first split. Then warpgroup 1 waits until warpgroup 0 is STAGGER stages ahead, so that one runs its
    // epilogue while the other multiplies.
    __device__ __forceinline__ void multiply(Barriers &barriers, const char *shared, const TileSplit &work, int warpgroup,
        bool first, PipelineState<STAGES> &state) {
        if (first && warpgroup > 0) barriers.begun.wait(0);
        float leading[SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        int last = 0;
        for (int i = work.begin; i < work.end; i++, state.advance()) {
            barriers.pipeline.wait_full(state);
            const char *stage = shared + state.stage * STAGE;
            const uint64_t a = OperandA::descriptor(stage, warpgroup * ROWS);
            const uint64_t b = OperandB::descriptor(stage + OperandA::SIZE, 0);
            const auto products = [&](float (&sums)[SUMS], TermPair terms, bool accumulate) {
                #pragma unroll
                for (int k = 0; k < TILE_K; k += MMA_K)
                    wgmma<BFLOAT16, TRANSPOSE_A, !TRANSPOSE_B>(
                        sums, a + OperandA::offset(terms.a, k), b + OperandB::offset(terms.b, k), accumulate || k > 0);
            };
            wgmma_fence();
            products(leading, {0, 0}, false);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            if (i > work.begin) arrive_per_warp(barriers.pipeline.empty[last]);
            if (first && warpgroup == 0 && i == min(work.begin + STAGGER, work.end) - 1) arrive_per_warp(barriers.begun);
            #pragma unroll
            for (int j = 0; j < LOW_ORDER_PAIRS; j++) products(low_order, low_order_pair(j), i + j > work.begin);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            wgmma_fence_operand(leading);
            #pragma unroll
            for (int j = 0; j < SUMS; j++) main[j] += leading[j];
            last = state.stage;
        }
        wgmma_wait_group<0>();
        wgmma_fence_operand(low_order);
        arrive_per_warp(barriers.pipeline.empty[last]);
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] += low_order[i];
    }
};

typedef Operands<TRANSPOSE_A, TRANSPOSE_B> Matrices;
__device__ __noinline__ T dot(const Matrices &matrices, int row, int column, int k0, int k1) {
    return matrices.dot(row, column, k0, k1);
}

// Recomputes by FMA the results that are not finite, because bf16x3 turns infinities into NaN.
__device__ __forceinline__ void recompute_non_finite(
    float (&sums)[SUMS], const Problem &problem, const TileSplit &work, const AccumulatorTile &tile) {
    float zero = 0;
    #pragma unroll
    for (int i = 0; i < SUMS; i++) zero = fma(sums[i], 0.0f, zero);
    if (zero == 0) return;
    const Matrices matrices = {work.a(problem), work.b(problem), problem.m, problem.n, problem.k};
    const int k0 = work.begin * TILE_K, k1 = min(work.end * TILE_K, problem.k);
    #pragma unroll
    for (int i = 0; i < SUMS; i++)
        if (!finite(sums[i]) && tile.inside(i)) sums[i] = dot(matrices, tile.row(i), tile.column(i), k0, k1);
}

// The destination of results: the epilogue; with split-K scratch, one split after another.
#if SPLIT
struct Output {
    T *partial;
    int64_t size;
    __device__ __forceinline__ Store of(const TileSplit &work) const { return {partial + work.split * size}; }
};
#else
struct Output {
    const Epilogue &epilogue;
    __device__ __forceinline__ const Epilogue &of(const TileSplit &) const { return epilogue; }
};
#endif

// A consumer warpgroup: its rows of all splits of the block.
__device__ __forceinline__ void consume(
    const Problem &problem, Barriers &barriers, const char *shared, const Tiled &staged, const Output &output) {
    const int warpgroup = __shfl_sync(~0u, (threadIdx.x - PRODUCER_THREADS) / WARPGROUP, 0); // warp-uniform
    PipelineState<STAGES> state;
    for (int i = blockIdx.x; i < problem.count(); i += gridDim.x) {
        const TileSplit work(problem, i);
        const AccumulatorTile tile = {
            work.at, problem.m, problem.n, work.at.row * TILE_M + warpgroup * ROWS, work.at.column * TILE_N};
        Accumulators sums;
        sums.multiply(barriers, shared, work, warpgroup, i == blockIdx.x, state);
        recompute_non_finite(sums.main, problem, work, tile);
        if (!ONE_TILE) {
            tile.store(output.of(work), sums.main);
            continue;
        }
        #pragma unroll
        for (int j = 0; j < SUMS; j += 2) {
            const T value[] = {sums.main[j], sums.main[j + 1]};
            staged(0, tile.row(j), tile.column(j), 0, value);
        }
    }
}

// With ONE_TILE all threads run the epilogue, with equal numbers of registers.
KERNEL __launch_bounds__(THREADS, 1) gemm_bf16x3(const T *a, const T *b, const Epilogue epilogue, int64_t batch,
    int64_t m, int64_t n, int64_t k, int64_t splits
#if SPLIT
    , char *scratch
#endif
) {
    wait_for_inputs();
    const Problem problem(a, b, batch, m, n, k, splits);
#if SPLIT
    const Output output = {(T *)scratch, batch * m * n};
#else
    const Output output = {epilogue};
#endif
    char *shared = (char *)shared_bytes;
    T *staging = (T *)(shared + STAGES * STAGE);
    const Tiled staged = {staging}; // all copies have been read before
    __shared__ Barriers barriers;
    if (threadIdx.x == 0) barriers.init();
    __syncthreads();
    if (threadIdx.x < PRODUCER_THREADS) {
        warpgroup_reg_dealloc<56>();
        produce(problem, barriers, shared, staging);
        if (ONE_TILE) warpgroup_reg_alloc<128>();
    } else {
        warpgroup_reg_alloc<200>();
        consume(problem, barriers, shared, staged, output);
        if (ONE_TILE) warpgroup_reg_dealloc<128>();
    }
    if (ONE_TILE)
        staged.finish<WIDE_TILE, THREADS>(output.of(TileSplit(problem, blockIdx.x)), m, n, blockIdx.x % problem.tiles);
}
