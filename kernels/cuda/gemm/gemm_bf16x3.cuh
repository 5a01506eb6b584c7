// Products by WGMMA in bf16x3 (sm90/bf16x3.cuh), for operands that are not packed: the pipeline of a persistent block. A copying
// warpgroup loads float32 into buffers in shared memory with cp.async. A splitting warpgroup splits it into three bfloat16 terms,
// and stores these in stages. Two multiplying warpgroups multiply: each half of a tile's rows, or of a tile of ROWS rows every
// other stage of K (sliced-K).
//
// The products of leading terms are exact. Tensor cores truncate when they add, so they sum over TILE_K of K only; float32
// additions sum the results. The low-order products, 2^-8 of the others, have accumulators of their own.
//
// Macros: TILE_M, TILE_N, TRANSPOSE_A, TRANSPOSE_B. WIDE_A, WIDE_B: elements per load.
//
// A Schedule lists the work of a block: next(work) puts the next TileSplit into `work`, and returns false after the last one. If it
// has ROW_SUMS, row_sums(work) returns where the sums of the rows of op(A) over the split go, or null.
#pragma once
#include "gemm/split_operand.cuh"
#include "sm90/accumulator.cuh"

constexpr int ROWS = 64, MULTIPLIERS = 2;           // of a multiplying warpgroup; warpgroups
constexpr int SLICES = MULTIPLIERS * ROWS / TILE_M; // warpgroups with the same rows, which take turns at the stages
static_assert(TILE_M == ROWS || TILE_M == MULTIPLIERS * ROWS, "rows of the multiplying warpgroups");
constexpr int GEMM_THREADS = (2 + MULTIPLIERS) * WARPGROUP;
constexpr int STAGES = 3, MMA_K = 16;                  // MMA_K: K of an instruction
constexpr int BUFFERS = TILE_M + TILE_N > 192 ? 2 : 3; // of float32
constexpr int SUMS = TILE_N / 2;                       // accumulators of a thread
constexpr int STAGGER = 2;                             // stages by which a multiplying warpgroup starts before the next one

// Stages begin to end of the K of a tile; the first one follows the last one. `slot`: where its sums go, if they are not the result.
struct TileSplit {
    Operands<TRANSPOSE_A, TRANSPOSE_B> matrices;
    TileCoord at;
    int begin, end, slot;

    // The first k of a stage.
    __device__ __forceinline__ int depth(int stage) const {
        const int stages = (matrices.k + TILE_K - 1) / TILE_K;
        return (stage < stages ? stage : stage - stages) * TILE_K;
    }
};

// `copies`: of the buffers; `terms`: of the stages; `begun`: the first multiplying warpgroup is STAGGER stages ahead.
struct Barriers {
    Pipeline<BUFFERS> copies;
    Pipeline<STAGES> terms;
    Mbarrier begun;

    __device__ void init() {
        copies.init(WARPGROUP, WARPGROUP / WARP);
        terms.init(WARPGROUP / WARP, MULTIPLIERS / SLICES * WARPGROUP / WARP);
        begun.init(WARPGROUP / WARP);
        fence_mbarrier_init();
    }
};

// The copying warpgroup.
template <class Schedule> __device__ __forceinline__ void copy_stages(Schedule schedule, Barriers &barriers, T *buffers) {
    PipelineState<BUFFERS> state;
    for (TileSplit work; schedule.next(work);) {
        const OperandA a = {work.matrices.a, work.matrices.m, work.matrices.k, work.at.row * TILE_M};
        const OperandB b = {work.matrices.b, work.matrices.n, work.matrices.k, work.at.column * TILE_N};
        #pragma unroll 1
        for (int i = work.begin; i < work.end; i++, state.advance()) {
            barriers.copies.wait_empty(state);
            T *buffer = buffers + state.stage * BUFFER;
            a.start(buffer, work.depth(i));
            b.start(buffer + OperandA::BUFFER, work.depth(i));
            cp_async_arrive(barriers.copies.full[state.stage]);
        }
    }
    cp_async_commit_group();
    cp_async_wait_group<0>(); // before the threads end
}

// The splitting warpgroup.
template <class Schedule> __device__ __forceinline__ void split_stages(
    Schedule schedule, Barriers &barriers, char *stages, const T *buffers) {
    PipelineState<BUFFERS> from;
    PipelineState<STAGES> to;
    RowSums<false> none;
    for (TileSplit work; schedule.next(work);) {
        RowSums<Schedule::ROW_SUMS> sums;
        #pragma unroll 1
        for (int i = work.begin; i < work.end; i++, from.advance(), to.advance()) {
            const T *buffer = buffers + from.stage * BUFFER;
            char *stage = stages + to.stage * STAGE;
            barriers.copies.wait_full(from);
            barriers.terms.wait_empty(to);
            OperandA::split(buffer, stage, sums);
            OperandB::split(buffer + OperandA::BUFFER, stage + OperandA::SIZE, none);
            arrive_per_warp(barriers.copies.empty[from.stage]);
            fence_proxy_async();
            arrive_per_warp(barriers.terms.full[to.stage]);
        }
        if constexpr (Schedule::ROW_SUMS) sums.finish(schedule.row_sums(work));
    }
}

struct Accumulators {
    float main[SUMS], low_order[SUMS];

    // stagger: warpgroup 1 waits until warpgroup 0 is STAGGER stages ahead, so that one runs its epilogue while the other
    // multiplies.
    __device__ __forceinline__ void multiply(Barriers &barriers, const char *shared, const TileSplit &work, int warpgroup,
        bool stagger, PipelineState<STAGES> &state) {
        if (stagger && warpgroup > 0) barriers.begun.wait(0);
        const int row = warpgroup * ROWS % TILE_M, slice = warpgroup * ROWS / TILE_M;
        float leading[SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        if (work.begin + slice >= work.end) return;
        int last = 0;
        for (int i = work.begin; i < work.end; i++, state.advance()) {
            if ((i - work.begin) % SLICES != slice) continue;
            const bool first = i - work.begin == slice;
            barriers.terms.wait_full(state);
            const char *stage = shared + state.stage * STAGE;
            const uint64_t a = OperandA::descriptor(stage, row);
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
            if (!first) arrive_per_warp(barriers.terms.empty[last]);
            if (stagger && warpgroup == 0 && i == min(work.begin + STAGGER, work.end) - 1) arrive_per_warp(barriers.begun);
            #pragma unroll
            for (int j = 0; j < LOW_ORDER_PAIRS; j++) products(low_order, low_order_pair(j), !first || j > 0);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            wgmma_fence_operand(leading);
            #pragma unroll
            for (int j = 0; j < SUMS; j++) main[j] += leading[j];
            last = state.stage;
        }
        wgmma_wait_group<0>();
        wgmma_fence_operand(low_order);
        arrive_per_warp(barriers.terms.empty[last]);
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] += low_order[i];
    }
};

// An element by FMA: its sum over the stages of a slice.
__device__ __noinline__ T dot(const TileSplit &work, int slice, int row, int column) {
    T sum = 0;
    for (int stage = work.begin + slice; stage < work.end; stage += SLICES) {
        const int k = work.depth(stage);
        sum += work.matrices.dot(row, column, k, min(k + TILE_K, work.matrices.k));
    }
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

// A multiplying warpgroup: its rows of all splits of the block, which it passes to store(work, tile, warpgroup, sums). SEVERAL: a
// block may have several splits.
template <bool SEVERAL, class Schedule, class Store>
__device__ __forceinline__ void multiply_stages(Schedule schedule, Barriers &barriers, const char *shared, const Store &store) {
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP - 2, 0); // warp-uniform
    PipelineState<STAGES> state;
    TileSplit work;
    for (bool first = true; schedule.next(work); first = false) {
        const int row = work.at.row * TILE_M + warpgroup * ROWS % TILE_M;
        const AccumulatorTile tile = {work.at, work.matrices.m, work.matrices.n, row, work.at.column * TILE_N};
        Accumulators sums;
        sums.multiply(barriers, shared, work, warpgroup, SEVERAL && first, state);
        recompute_non_finite(sums.main, work, warpgroup * ROWS / TILE_M, tile);
        store(work, tile, warpgroup, sums.main);
    }
}

// By all threads of a block. REGISTERS: registers of a thread after the call, if the block has one split; 0 if it has several, and
// the kernel then ends.
template <int REGISTERS, class Schedule, class Store> __device__ __forceinline__ void multiply_splits(
    const Schedule &schedule, Barriers &barriers, char *shared, const Store &store) {
    if (threadIdx.x == 0) barriers.init();
    __syncthreads();
    T *const buffers = (T *)(shared + STAGES * STAGE);
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<56>();
        copy_stages(schedule, barriers, buffers);
        if (REGISTERS > 0) warpgroup_reg_alloc<REGISTERS>();
    } else if (threadIdx.x < 2 * WARPGROUP) {
        warpgroup_reg_dealloc<56>();
        split_stages(schedule, barriers, shared, buffers);
        if (REGISTERS > 0) warpgroup_reg_alloc<REGISTERS>();
    } else {
        warpgroup_reg_alloc<200>();
        multiply_stages<REGISTERS == 0>(schedule, barriers, shared, store);
        if (REGISTERS > 0) warpgroup_reg_dealloc<REGISTERS>();
    }
}
