// Products by WGMMA in bf16x3 (sm90/bf16x3.cuh), for operands that are not packed: the pipeline of a persistent block. Two producer
// warpgroups load float32 with cp.async, split it into three bfloat16 terms, and store these in shared memory. Two consumer
// warpgroups multiply, each half of a tile's rows.
//
// The products of leading terms are exact. Tensor cores truncate when they add, so they sum over TILE_K of K only; float32
// additions sum the results. The low-order products, 2^-8 of the others, have accumulators of their own.
//
// Macros: TILE_N, TRANSPOSE_A, TRANSPOSE_B. WIDE_A, WIDE_B: elements per load.
//
// A Schedule lists the work of a block: next(work) puts the next TileSplit into `work`, and returns false after the last one.
// row_sums() returns NoRowSums, or an object with the same functions that adds the rows of op(A) while producers split them.
// HAS_NARROW: whether some B are narrow (NarrowB).
#pragma once
#include "gemm/gemm.cuh"
#include "sm90/bf16x3.cuh"
#include "sm90/accumulator.cuh"

constexpr int TILE_M = 128, ROWS = 64, CONSUMERS = TILE_M / ROWS; // CONSUMERS: warpgroups, of ROWS rows each
constexpr int PRODUCER_THREADS = 2 * WARPGROUP, GEMM_THREADS = PRODUCER_THREADS + CONSUMERS * WARPGROUP;
constexpr int TILE_K = 32, MMA_K = 16, STAGES = 3; // K of a stage and of an instruction
constexpr int AHEAD = 1, BUFFERS = AHEAD + 1;      // stages that are copied ahead of the split; buffers for float32
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

    // The position of element j of chunk `at` in staging. In chunks 4 to 7 of each eight the two halves are swapped: eight
    // threads read without bank conflicts.
    static __device__ __forceinline__ int swizzled(int at, int j) {
        return at * CHUNK_ELEMENTS + (j / VECTOR ^ at / 4 % 2) * VECTOR + j % VECTOR;
    }
    // The byte of a chunk in a term of a stage.
    static __device__ __forceinline__ int byte_of(int at) { return at % PLANES * PLANE + at / PLANES * CHUNK_BYTES; }

    // Starts the copies of a stage from k0 on. Neighbouring lanes of a warp copy neighbours in global memory.
    __device__ __forceinline__ void start(T *staging, int k0) const {
        constexpr int COPIES = CHUNK_ELEMENTS / WIDE;
        constexpr int UNROLL = WIDE == VECTOR && CHUNKS % PRODUCER_THREADS == 0 ? PER_THREAD * COPIES : 1;
        constexpr bool EVEN = WARP / COPIES % PLANES == 0 && WIDE == VECTOR; // all copies of a thread have the same `across`
        const int own = threadIdx.x / WARP * WARP + threadIdx.x % WARP / COPIES, j = threadIdx.x % COPIES * WIDE;
        T *const to = staging + swizzled(own, j);
        #pragma unroll UNROLL // otherwise the addresses need too many registers
        for (int i = 0; i < PER_THREAD * COPIES; i++) {
            const int more = i / COPIES * PRODUCER_THREADS + i % COPIES * (WARP / COPIES), at = own + more;
            if (CHUNKS % PRODUCER_THREADS != 0 && at >= CHUNKS) break;
            const int across = (EVEN ? own : at) % PLANES * CHUNK_ELEMENTS;
            const int down = EVEN ? own / PLANES + more / PLANES : at / PLANES;
            const int row = first + (K_MAJOR ? down : across), depth = k0 + (K_MAJOR ? across : down);
            const int remaining = row < length && depth < k ? K_MAJOR ? k - depth : length - row : 0;
            const int from = K_MAJOR ? row * k + depth : depth * length + row;
            cp_async<WIDE * sizeof(T)>(
                WIDE == VECTOR ? to + more * CHUNK_ELEMENTS : staging + swizzled(at, j), x + from + j, remaining > j);
        }
    }

    // Splits the chunks that this warp has copied, and stores them in a stage, where a term has TERM_BYTES.
    template <int TERM_BYTES = TERM> static __device__ __forceinline__ void split(const T *staging, char *stage) {
        #pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int more = i * PRODUCER_THREADS, at = more + threadIdx.x;
            if (CHUNKS % PRODUCER_THREADS != 0 && at >= CHUNKS) break;
            float found[CHUNK_ELEMENTS];
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j += VECTOR) {
                const Vector<T, VECTOR> v = load<T, VECTOR>(staging + swizzled(threadIdx.x, j) + more * CHUNK_ELEMENTS);
                #pragma unroll
                for (int h = 0; h < VECTOR; h++) found[j + h] = v.lane[h];
            }
            Chunk terms[BF16X3_TERMS];
            split_bf16x3(terms, found);
            const int to = PRODUCER_THREADS % PLANES == 0 ? byte_of(threadIdx.x) + more / PLANES * CHUNK_BYTES : byte_of(at);
            #pragma unroll
            for (int p = 0; p < BF16X3_TERMS; p++) *(Chunk *)(stage + to + p * TERM_BYTES) = terms[p];
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
};
typedef Operand<TILE_M, !TRANSPOSE_A, WIDE_A> OperandA;
typedef Operand<TILE_N, TRANSPOSE_B, WIDE_B> OperandB;
constexpr int STAGE = OperandA::SIZE + OperandB::SIZE, STAGING = OperandA::STAGING + OperandB::STAGING;

// A B of fewer than NARROW columns, in global memory as [k][column]. A copy has one element, so rows need no alignment. Shared
// memory has the first columns of an OperandB. Its other columns have old values, which no stored result depends on.
constexpr int NARROW = 64;
struct NarrowB : Operand<NARROW, false, 1> {
    // Starts the copies of a stage from k0 on. Lane i of a warp copies columns i and i + WARP of the rows of the warp's chunks.
    __device__ __forceinline__ void start(T *staging, int k0) const {
        static_assert(CHUNKS == PRODUCER_THREADS && NARROW == 2 * WARP, "each thread copies as many elements as a chunk has");
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, depth = k0 + warp * (WARP / PLANES);
        const T *const from = x + depth * length + lane;
        #pragma unroll
        for (int i = 0; i < CHUNK_ELEMENTS; i++) {
            const int down = i / 2, across = i % 2 * WARP, chunk = down * PLANES + (across + lane) / CHUNK_ELEMENTS;
            T *const to = staging + warp * (WARP * CHUNK_ELEMENTS) + swizzled(chunk, lane % CHUNK_ELEMENTS);
            cp_async<sizeof(T)>(to, from + down * length + across, depth + down < k && across + lane < length);
        }
    }
    static __device__ __forceinline__ void split(const T *staging, char *stage) {
        Operand::split<OperandB::TERM>(staging, stage);
    }
};

// Stages `begin` to `end` - 1 of the K of a tile, modulo its number of stages. `slot`: where the sums go, if they are not the
// result.
struct TileSplit {
    Operands<TRANSPOSE_A, TRANSPOSE_B> matrices;
    TileCoord at;
    int begin, end, slot;
};

// Does not add the rows of op(A). place(): where the sums of a split go; 0: the split has none. add(): called by each producer
// thread for the chunks of op(A) in a stage. finish(): called after the last stage of a split.
struct NoRowSums {
    static __device__ __forceinline__ int place(const TileSplit &) { return 0; }
    static __device__ __forceinline__ void add(int, const T *) {}
    static __device__ __forceinline__ void finish(int) {}
};

// Iterates over the stages of all splits of a block.
template <class Schedule> struct StageIterator {
    Schedule schedule;
    bool more, narrow;
    int stage, remaining; // of the split
    int place;            // where the row sums of the split go
    OperandA a;
    OperandB b;

    __device__ explicit StageIterator(const Schedule &schedule) : schedule(schedule) { enter(); }
    __device__ __forceinline__ void start(T *staging) const {
        a.start(staging, stage * TILE_K);
        if (narrow)
            NarrowB{b.x, b.length, b.k, b.first}.start(staging + OperandA::STAGING, stage * TILE_K);
        else
            b.start(staging + OperandA::STAGING, stage * TILE_K);
    }
    __device__ __forceinline__ void next() {
        if (--remaining == 0)
            enter();
        else if (++stage * TILE_K >= a.k)
            stage = 0;
    }

  private:
    __device__ __forceinline__ void enter() {
        TileSplit work;
        more = schedule.next(work);
        if (!more) return;
        stage = work.begin;
        remaining = work.end - work.begin;
        place = schedule.row_sums().place(work);
        narrow = Schedule::HAS_NARROW && work.matrices.n < NARROW;
        a = {work.matrices.a, work.matrices.m, work.matrices.k, work.at.row * TILE_M};
        b = {work.matrices.b, work.matrices.n, work.matrices.k, work.at.column * TILE_N};
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

// Producers. The copies of the next stage are in flight while a stage is split.
template <class Schedule> __device__ __forceinline__ void produce(
    const Schedule &schedule, Barriers &barriers, char *shared, T *staging) {
    static_assert(AHEAD == 1, "the stage that was copied before is split");
    StageIterator<Schedule> next(schedule);
    const auto row_sums = schedule.row_sums();
    PipelineState<STAGES> state;
    T *buffer = staging;
    int ended = 0;
    int copied_place = 0; // of the stage that was copied before
    bool copied_last = false, copied_narrow = false;
    #pragma unroll 1
    for (int i = -AHEAD;; i++) {
        const int place = copied_place; // of the stage that is split in this round
        const bool last = copied_last, narrow = copied_narrow;
        copied_place = next.place, copied_last = next.remaining == 1, copied_narrow = next.narrow;
        if (next.more) {
            next.start(buffer);
            next.next();
        } else if (ended++ == AHEAD) {
            return;
        }
        cp_async_commit_group();
        buffer = buffer == staging + AHEAD * STAGING ? staging : buffer + STAGING; // the buffer of stage i
        if (i < 0) continue;
        cp_async_wait_group<AHEAD>();
        barriers.pipeline.wait_empty(state);
        __syncwarp(); // all lanes' copies have landed
        char *stage = shared + state.stage * STAGE;
        OperandA::split(buffer, stage);
        if (narrow)
            NarrowB::split(buffer + OperandA::STAGING, stage + OperandA::SIZE);
        else
            OperandB::split(buffer + OperandA::STAGING, stage + OperandA::SIZE);
        fence_proxy_async();
        row_sums.add(place, buffer);
        arrive_per_warp(barriers.pipeline.full[state.stage]); // its __syncwarp() also frees the staging buffer
        if (last) row_sums.finish(place);
        state.advance();
    }
}

struct Accumulators {
    float main[SUMS], low_order[SUMS];

    // first: the block's first split. Then warpgroup 1 waits until warpgroup 0 is STAGGER stages ahead, so that one runs its
    // epilogue while the other multiplies.
    __device__ __forceinline__ void multiply(Barriers &barriers, const char *shared, const TileSplit &work, int warpgroup,
        bool first, PipelineState<STAGES> &state) {
        if (first && warpgroup > 0) barriers.begun.wait(0);
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        const auto products = [&](float (&sums)[SUMS], int at, TermPair terms, bool add) {
            const char *stage = shared + at * STAGE;
            const uint64_t a = OperandA::descriptor(stage, warpgroup * ROWS);
            const uint64_t b = OperandB::descriptor(stage + OperandA::SIZE, 0);
            #pragma unroll
            for (int k = 0; k < TILE_K; k += MMA_K)
                wgmma<BFLOAT16, TRANSPOSE_A, !TRANSPOSE_B>(
                    sums, a + OperandA::offset(terms.a, k), b + OperandB::offset(terms.b, k), add || k > 0);
        };
        const auto lead = [&](float (&sums)[SUMS], int stage, int) { products(sums, stage, {0, 0}, false); };
        const auto low = [&](float (&sums)[SUMS], int stage, int, bool add, int i) {
            if (first && warpgroup == 0 && i == min(work.begin + STAGGER, work.end) - 1) arrive_per_warp(barriers.begun);
            #pragma unroll
            for (int j = 0; j < LOW_ORDER_PAIRS; j++) products(sums, stage, low_order_pair(j), add || j > 0);
        };
        multiply_promoted<1>(main, low_order, barriers.pipeline, state, work.begin, work.end, lead, low, [](int) {});
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] += low_order[i];
    }
};

// An element by FMA, summed over stages `begin` to `end` - 1, modulo the number of stages.
__device__ __noinline__ T dot(
    const Operands<TRANSPOSE_A, TRANSPOSE_B> &matrices, int row, int column, int begin, int end) {
    const int k = matrices.k, wrapped = end * TILE_K - (k + TILE_K - 1) / TILE_K * TILE_K;
    const T sum = matrices.dot(row, column, begin * TILE_K, min(end * TILE_K, k));
    return wrapped > 0 ? sum + matrices.dot(row, column, 0, wrapped) : sum;
}

// A consumer warpgroup: its rows of all splits of the block, which it passes to store(work, tile, warpgroup, sums).
template <class Schedule, class Store>
__device__ __forceinline__ void consume(Schedule schedule, Barriers &barriers, const char *shared, const Store &store) {
    const int warpgroup = __shfl_sync(~0u, (threadIdx.x - PRODUCER_THREADS) / WARPGROUP, 0); // warp-uniform
    PipelineState<STAGES> state;
    TileSplit work;
    for (bool first = true; schedule.next(work); first = false) {
        const AccumulatorTile tile = {
            work.at, work.matrices.m, work.matrices.n, work.at.row * TILE_M + warpgroup * ROWS, work.at.column * TILE_N};
        Accumulators sums;
        sums.multiply(barriers, shared, work, warpgroup, first, state);
        recompute_non_finite(sums.main, [&](int i) {
            const bool inside = tile.inside(i);
            return inside ? dot(work.matrices, tile.row(i), tile.column(i), work.begin, work.end) : sums.main[i];
        });
        store(work, tile, warpgroup, sums.main);
    }
}

// The producers and consumers of a block; all of its threads call it. REGISTERS: registers of a thread after the call; 0 if the
// kernel then ends.
template <int REGISTERS, class Schedule, class Store> __device__ __forceinline__ void multiply_splits(
    const Schedule &schedule, Barriers &barriers, char *shared, const Store &store) {
    if (threadIdx.x == 0) barriers.init();
    __syncthreads();
    if (threadIdx.x < PRODUCER_THREADS) {
        warpgroup_reg_dealloc<56>();
        produce(schedule, barriers, shared, (T *)(shared + STAGES * STAGE));
        if (REGISTERS > 0) warpgroup_reg_alloc<REGISTERS>();
    } else {
        warpgroup_reg_alloc<200>();
        consume(schedule, barriers, shared, store);
        if (REGISTERS > 0) warpgroup_reg_dealloc<REGISTERS>();
    }
}
