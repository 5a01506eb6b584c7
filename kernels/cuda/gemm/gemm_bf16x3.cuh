// Products by WGMMA in bf16x3 (sm90/bf16x3.cuh), for operands that are not packed: the pipeline of a persistent block. Two producer
// warpgroups load float32 with cp.async. They split op(B) into three bfloat16 terms, and store these in shared memory. Two consumer
// warpgroups split op(A) in registers, and multiply: each half of a tile's rows, or of a tile of ROWS rows every other stage of K
// (sliced-K).
//
// Tensor cores truncate when they add, so they sum over TILE_K of K only, the products of leading terms last; float32 additions
// sum the results.
//
// Macros: TILE_M, TILE_N, TRANSPOSE_A, TRANSPOSE_B. WIDE_A, WIDE_B: elements per load.
//
// A Schedule lists the work of a block: next(work) puts the next TileSplit into `work`, and returns false after the last one. If it
// has ROW_SUMS, row_sums(work) returns where the sums of the rows of op(A) over the split go, or null.
#pragma once
#include "gemm/gemm.cuh"
#include "sm90/bf16x3.cuh"
#include "sm90/accumulator.cuh"

constexpr int ROWS = 64, CONSUMERS = 2;          // of a consumer warpgroup; warpgroups
constexpr int SLICES = CONSUMERS * ROWS / TILE_M; // warpgroups with the same rows, which take turns at the stages
static_assert(TILE_M == ROWS || TILE_M == CONSUMERS * ROWS, "rows of the consumer warpgroups");
constexpr int PRODUCER_THREADS = 2 * WARPGROUP, GEMM_THREADS = PRODUCER_THREADS + CONSUMERS * WARPGROUP;
constexpr int TILE_K = 32, MMA_K = 16, STAGES = 4;  // K of a stage and of an instruction
constexpr int AHEAD = 1, BUFFERS = AHEAD + 1;       // stages that are copied ahead of the split; buffers for float32 of op(B)
constexpr int SUMS = TILE_N / 2;                    // accumulators of a thread
constexpr int STAGGER = 2;                          // stages by which a consumer warpgroup starts before the next one

// A tile of ROWS rows of op(A), or columns of op(B), in global memory: [row][k] if K_MAJOR, else [k][row], with WIDE elements per
// load. A chunk is eight elements that are neighbours there.
template <int ROWS, bool K_MAJOR, int WIDE> struct GlobalTile {
    static constexpr int PLANES = (K_MAJOR ? TILE_K : ROWS) / CHUNK_ELEMENTS; // chunks that are neighbours
    static constexpr int CHUNKS = ROWS * TILE_K / CHUNK_ELEMENTS, PER_THREAD = (CHUNKS + PRODUCER_THREADS - 1) / PRODUCER_THREADS;
    static_assert(ROWS % CHUNK_ELEMENTS == 0, "whole chunks");

    const T *x;
    int length, k, first; // rows and k of the matrix, and the first row of the tile

    // Starts the copies of a stage from k0 on: element j of chunk `at` goes to to[position(at, j)]. Neighbouring lanes of a warp
    // copy neighbours in global memory.
    template <class Position> __device__ __forceinline__ void start(T *to, int k0, const Position &position) const {
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
            cp_async<WIDE * sizeof(T)>(to + position(at, j), x + from + j, remaining > j);
        }
    }
};

// op(A). A stage holds float32 as global memory does, so that the reads of words() have no bank conflicts: if K-major, the
// chunks of four rows are swapped; else rows are padded.
struct OperandA : GlobalTile<TILE_M, !TRANSPOSE_A, WIDE_A> {
    static constexpr int PITCH = TRANSPOSE_A ? TILE_M + VECTOR : TILE_K;                   // elements
    static constexpr int SIZE = (TRANSPOSE_A ? TILE_K : TILE_M) * PITCH * (int)sizeof(T); // bytes of a stage

    __device__ __forceinline__ void start(char *stage, int k0) const {
        GlobalTile::start((T *)stage, k0, [](int at, int j) {
            const int across = at % PLANES, down = at / PLANES;
            return down * PITCH + (TRANSPOSE_A ? across : across ^ down % 4) * CHUNK_ELEMENTS + j;
        });
    }
    // Two neighbours of K, from `k` on.
    static __device__ __forceinline__ Vector<T, 2> pair(const char *stage, int row, int k) {
        const T *const tile = (const T *)stage;
        if constexpr (TRANSPOSE_A) return {{tile[k * PITCH + row], tile[(k + 1) * PITCH + row]}};
        return load<T, 2>(tile + row * PITCH + (k / CHUNK_ELEMENTS ^ row % 4) * CHUNK_ELEMENTS + k % CHUNK_ELEMENTS);
    }
};

// op(B). Shared memory holds chunks. A plane holds all chunks with the same eight k (or columns). Planes are padded so that eight
// threads write without bank conflicts.
struct OperandB : GlobalTile<TILE_N, TRANSPOSE_B, WIDE_B> {
    static constexpr bool K_MAJOR = TRANSPOSE_B;
    static constexpr int PLANE = (CHUNKS / PLANES + (K_MAJOR ? 2 : 1)) * CHUNK_BYTES, TERM = PLANES * PLANE; // bytes
    static constexpr int SIZE = BF16X3_TERMS * TERM;                              // bytes of a stage
    static constexpr int STAGING = PER_THREAD * PRODUCER_THREADS * CHUNK_ELEMENTS; // float32 elements before the split

    __device__ __forceinline__ void start(T *staging, int k0) const { GlobalTile::start(staging, k0, swizzled); }

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

    // The descriptor of term 0 and k 0, and the offset to add for another term and k.
    static __device__ __forceinline__ uint64_t descriptor(const char *stage) {
        return K_MAJOR ? smem_descriptor(stage, PLANE, CORE_MATRIX_BYTES, NO_SWIZZLE)
                       : smem_descriptor(stage, CORE_MATRIX_BYTES, PLANE, NO_SWIZZLE);
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
constexpr int STAGE = OperandA::SIZE + OperandB::SIZE;
constexpr int PIPELINE_BYTES = STAGES * STAGE + BUFFERS * OperandB::STAGING * (int)sizeof(T);

// Stages begin to end of the K of a tile. `slot`: where its sums go, if they are not the result.
struct TileSplit {
    Operands<TRANSPOSE_A, TRANSPOSE_B> matrices;
    TileCoord at;
    int begin, end, slot;
};

// Iterates over the stages of all splits of a block.
template <class Schedule> struct StageIterator {
    Schedule schedule;
    bool more;
    int stage, end;
    OperandA a;
    OperandB b;

    __device__ explicit StageIterator(const Schedule &schedule) : schedule(schedule) { enter(); }
    __device__ __forceinline__ void start(char *to, T *staging) const {
        a.start(to, stage * TILE_K);
        b.start(staging, stage * TILE_K);
    }
    __device__ __forceinline__ void next() {
        if (++stage == end) enter();
    }

  private:
    __device__ __forceinline__ void enter() {
        TileSplit work;
        more = schedule.next(work);
        if (!more) return;
        stage = work.begin;
        end = work.end;
        a = {work.matrices.a, work.matrices.m, work.matrices.k, work.at.row * TILE_M};
        b = {work.matrices.b, work.matrices.n, work.matrices.k, work.at.column * TILE_N};
    }
};

// `begun`: the first consumer warpgroup is STAGGER stages ahead.
struct Barriers {
    Pipeline<STAGES> pipeline;
    Mbarrier begun;

    __device__ void init() {
        pipeline.init(PRODUCER_THREADS / WARP, CONSUMERS / SLICES * WARPGROUP / WARP);
        begun.init(WARPGROUP / WARP);
        fence_mbarrier_init();
    }
};

// Producers. The copies of the next stages are in flight while a stage is split.
template <class Schedule> __device__ __forceinline__ void produce(
    const Schedule &schedule, Barriers &barriers, char *shared, T *staging) {
    StageIterator<Schedule> next(schedule);
    PipelineState<STAGES> copied, split;
    int into = 0, from = 0; // buffers of `staging`
    #pragma unroll 1
    for (int i = 0, ended = 0; ended < AHEAD; i++) {
        if (next.more) {
            barriers.pipeline.wait_empty(copied);
            next.start(shared + copied.stage * STAGE, staging + into * OperandB::STAGING);
            next.next();
            copied.advance();
            into = into + 1 == BUFFERS ? 0 : into + 1;
        } else {
            ended++;
        }
        cp_async_commit_group();
        if (i < AHEAD) continue;
        cp_async_wait_group<AHEAD>();
        __syncwarp(); // all lanes' copies have landed
        OperandB::split(staging + from * OperandB::STAGING, shared + split.stage * STAGE + OperandA::SIZE);
        fence_proxy_async();
        arrive_per_warp(barriers.pipeline.full[split.stage]); // its __syncwarp() also frees the staging buffer
        split.advance();
        from = from + 1 == BUFFERS ? 0 : from + 1;
    }
}

// The terms of a consumer thread's elements of op(A) in a stage, as operands of WGMMA.
struct WordsOfA {
    static constexpr int STEPS = TILE_K / MMA_K, ROWS = 2; // instructions along K; rows of a thread
    uint32_t terms[BF16X3_TERMS][STEPS][2 * ROWS];

    // From row `row` of the tile on. Adds the elements to `sums` of their rows.
    template <class Sums> __device__ __forceinline__ WordsOfA(const char *stage, int row, Sums &sums) {
        #pragma unroll
        for (int step = 0; step < STEPS; step++)
            #pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float x[4];
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int k = step * MMA_K + h * 8 + threadIdx.x % 4 * 2;
                    const Vector<T, 2> found = OperandA::pair(stage, row + accumulator_row(2 * r), k);
                    x[2 * h] = rounded(found.lane[0]), x[2 * h + 1] = rounded(found.lane[1]);
                }
                sums.add(r, x[0] + x[1] + (x[2] + x[3]));
                uint32_t words[BF16X3_TERMS][2];
                Format<BF16X3>::convert(x, words);
                #pragma unroll
                for (int p = 0; p < BF16X3_TERMS; p++) terms[p][step][r] = words[p][0], terms[p][step][ROWS + r] = words[p][1];
            }
    }
};

// The sums of the rows of op(A) over a split, each by the four threads that share a row.
template <bool ON> struct RowSums {
    float totals[WordsOfA::ROWS] = {};

    __device__ __forceinline__ void add(int row, float x) { totals[row] += x; }
    // Stores those of all rows of the tile, unless `to` is null.
    __device__ __forceinline__ void finish(T *to, int row) const {
        #pragma unroll
        for (int r = 0; r < WordsOfA::ROWS; r++) {
            float total = totals[r];
            total += __shfl_xor_sync(FULL_MASK, total, 1);
            total += __shfl_xor_sync(FULL_MASK, total, 2);
            if (to && threadIdx.x % 4 == 0) to[row + accumulator_row(2 * r)] = total;
        }
    }
};
template <> struct RowSums<false> {
    __device__ __forceinline__ void add(int, float) {}
};

// The sums of a consumer warpgroup's split: its rows from `row` of the tile on, and the stages of its slice. stagger: warpgroup 1
// waits until warpgroup 0 is STAGGER stages ahead, so that one runs its epilogue while the other multiplies.
template <class Sums> __device__ __forceinline__ void multiply(float (&sums)[SUMS], Sums &row_sums, Barriers &barriers,
    const char *shared, const TileSplit &work, int warpgroup, bool stagger, PipelineState<STAGES> &state) {
    if (stagger && warpgroup > 0) barriers.begun.wait(0);
    const int row = warpgroup * ROWS % TILE_M, slice = warpgroup * ROWS / TILE_M;
    #pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
    for (int i = work.begin; i < work.end; i++, state.advance()) {
        if ((i - work.begin) % SLICES != slice) continue;
        barriers.pipeline.wait_full(state);
        const char *stage = shared + state.stage * STAGE;
        const WordsOfA a(stage, row, row_sums);
        const uint64_t b = OperandB::descriptor(stage + OperandA::SIZE);
        float part[SUMS];
        const auto products = [&](TermPair terms, bool accumulate) {
            #pragma unroll
            for (int step = 0; step < WordsOfA::STEPS; step++)
                wgmma_registers<BFLOAT16, !TRANSPOSE_B>(
                    part, a.terms[terms.a][step], b + OperandB::offset(terms.b, step * MMA_K), accumulate || step > 0);
        };
        wgmma_fence();
        #pragma unroll
        for (int j = 0; j < LOW_ORDER_PAIRS; j++) products(low_order_pair(j), j > 0);
        products({0, 0}, LOW_ORDER_PAIRS > 0);
        wgmma_commit_group();
        if (stagger && warpgroup == 0 && i == min(work.begin + STAGGER, work.end) - 1) arrive_per_warp(barriers.begun);
        wgmma_wait_group<0>();
        wgmma_fence_operand(part);
        arrive_per_warp(barriers.pipeline.empty[state.stage]);
        #pragma unroll
        for (int j = 0; j < SUMS; j++) sums[j] += part[j];
    }
}

// An element by FMA: its sum over the stages of a slice.
__device__ __noinline__ T dot(const TileSplit &work, int slice, int row, int column) {
    const int run = SLICES > 1 ? 1 : work.end - work.begin; // neighbouring stages of a slice
    T sum = 0;
    for (int stage = work.begin + slice; stage < work.end; stage += SLICES * run)
        sum += work.matrices.dot(row, column, stage * TILE_K, min((stage + run) * TILE_K, work.matrices.k));
    return sum;
}

// Recomputes the sums of a slice that are not finite, because bf16x3 turns infinities into NaN.
__device__ __forceinline__ void recompute_non_finite(
    float (&sums)[SUMS], const TileSplit &work, int slice, const AccumulatorTile &tile) {
    float zero = 0;
    #pragma unroll
    for (int i = 0; i < SUMS; i++) zero = fma(sums[i], 0.0f, zero);
    if (zero == 0) return;
    #pragma unroll
    for (int i = 0; i < SUMS; i++)
        if (!finite(sums[i]) && tile.inside(i)) sums[i] = dot(work, slice, tile.row(i), tile.column(i));
}

// A consumer warpgroup: its rows of all splits of the block, which it passes to store(work, tile, warpgroup, sums). SEVERAL: a
// block may have several splits.
template <bool SEVERAL, class Schedule, class Store>
__device__ __forceinline__ void consume(Schedule schedule, Barriers &barriers, const char *shared, const Store &store) {
    const int warpgroup = __shfl_sync(~0u, (threadIdx.x - PRODUCER_THREADS) / WARPGROUP, 0); // warp-uniform
    PipelineState<STAGES> state;
    TileSplit work;
    for (bool first = true; schedule.next(work); first = false) {
        const int row = work.at.row * TILE_M + warpgroup * ROWS % TILE_M;
        const AccumulatorTile tile = {work.at, work.matrices.m, work.matrices.n, row, work.at.column * TILE_N};
        float sums[SUMS];
        RowSums<Schedule::ROW_SUMS> row_sums;
        multiply(sums, row_sums, barriers, shared, work, warpgroup, SEVERAL && first, state);
        if constexpr (Schedule::ROW_SUMS) row_sums.finish(schedule.row_sums(work), warpgroup * ROWS);
        recompute_non_finite(sums, work, warpgroup * ROWS / TILE_M, tile);
        store(work, tile, warpgroup, sums);
    }
}

// The producers and consumers of a block; all of its threads call it. REGISTERS: registers of a thread after the call, if the
// block has one split; 0 if it has several, and the kernel then ends.
template <int REGISTERS, class Schedule, class Store> __device__ __forceinline__ void multiply_splits(
    const Schedule &schedule, Barriers &barriers, char *shared, const Store &store) {
    if (threadIdx.x == 0) barriers.init();
    __syncthreads();
    if (threadIdx.x < PRODUCER_THREADS) {
        warpgroup_reg_dealloc<72>();
        produce(schedule, barriers, shared, (T *)(shared + STAGES * STAGE));
        if (REGISTERS > 0) warpgroup_reg_alloc<REGISTERS>();
    } else {
        warpgroup_reg_alloc<184>();
        consume<REGISTERS == 0>(schedule, barriers, shared, store);
        if (REGISTERS > 0) warpgroup_reg_dealloc<REGISTERS>();
    }
}
