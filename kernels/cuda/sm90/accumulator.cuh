// WGMMA accumulators: their products, their positions in C, and the epilogue.
#pragma once
#include "gemm/gemm.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/wgmma.cuh"

// By a consumer warpgroup: the products of stages `begin` to `end` - 1. start(stage, add) starts those in a stage of the pipeline;
// without `add` they replace the sums. A stage is released when the products of the next one have begun.
template <class Sums, int STAGES, class Start> __device__ __forceinline__ void multiply_stages(
    Sums &sums, Pipeline<STAGES> &pipeline, PipelineState<STAGES> &state, int begin, int end, const Start &start) {
    int last = 0;
    for (int i = begin; i < end; i++, state.advance()) {
        pipeline.wait_full(state);
        wgmma_fence();
        start(state.stage, i > begin);
        wgmma_commit_group();
        wgmma_wait_group<1>();
        if (i > begin) pipeline.release(last);
        last = state.stage;
    }
    wgmma_wait_group<0>();
    pipeline.release(last);
    wgmma_fence_operand(sums);
}

// By a consumer warpgroup: products of numbers that are sums of terms, in stages `begin` to `end` - 1. WGMMA sums the
// products of leading terms over one of PARTS parts of a stage, and float32 additions add these sums to `main`. WGMMA sums
// the low-order products over all stages in `low_order`. lead(sums, stage, part) starts the leading products, and
// low(sums, stage, part, add, i) the low-order ones. added(i) is called after the additions of stage i.
template <int PARTS, int N, class Stages, int STAGES, class Lead, class Low, class Added>
__device__ __forceinline__ void multiply_promoted(float (&main)[N], float (&low_order)[N], Stages &pipeline,
    PipelineState<STAGES> &state, int begin, int end, const Lead &lead, const Low &low, const Added &added) {
    float leading[N];
    int last = 0;
    for (int i = begin; i < end; i++, state.advance()) {
        pipeline.wait_full(state);
        #pragma unroll
        for (int part = 0; part < PARTS; part++) {
            wgmma_fence();
            lead(leading, state.stage, part);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            if (part == 0 && i > begin) pipeline.release(last);
            low(low_order, state.stage, part, i > begin || part > 0, i);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            wgmma_fence_operand(leading);
            #pragma unroll
            for (int j = 0; j < N; j++) main[j] += leading[j];
        }
        added(i);
        last = state.stage;
    }
    wgmma_wait_group<0>();
    wgmma_fence_operand(low_order);
    pipeline.release(last);
}

// The accumulators of a thread whose warpgroup computes 64 rows of a tile, from row0 and column0 of the matrix on.
struct AccumulatorTile {
    TileCoord at;
    int m, n, row0, column0;

    // Where the result at a row and column of the product is in memory, and whether there is such a result.
    __device__ __forceinline__ int memory_row(int row) const { return row; }
    __device__ __forceinline__ int memory_column(int column) const { return column; }
    __device__ __forceinline__ bool inside(int row, int column) const { return row < m && column < n; }

    __device__ __forceinline__ int row(int i) const { return row0 + accumulator_row(i); }
    __device__ __forceinline__ int column(int i) const { return column0 + accumulator_column(i); }
    __device__ __forceinline__ bool inside(int i) const { return row(i) < m && column(i) < n; }

    __device__ __forceinline__ int64_t index(int row, int column) const {
        return opaque((at.item * m + row) * n + column);
    }

    // Passes accumulator i to the epilogue.
    template <class Out, int COUNT> __device__ __forceinline__ void store(
        const Out &out, const float (&sums)[COUNT], int i) const {
        const T value[] = {sums[i]};
        if (inside(i)) out(at.item, row(i), column(i), index(row(i), column(i)), value);
    }
    // Passes all accumulators. The auxiliary inputs of BATCH elements are loaded before the first is written. Outside the matrix
    // it loads those of the nearest element: a branch would serialise the loads.
    template <class Out, int COUNT> __device__ __forceinline__ void store(
        const Out &out, const float (&sums)[COUNT]) const {
        constexpr int BATCH = 16 * WIDE_C;
        #pragma unroll
        for (int first = 0; first < COUNT; first += BATCH) {
            typename Out::template Aux<WIDE_C> aux[BATCH / WIDE_C];
            #pragma unroll
            for (int i = first; i < first + BATCH && i < COUNT; i += WIDE_C) {
                const int r = min(row(i), m - 1), c = min(column(i), n - WIDE_C);
                aux[(i - first) / WIDE_C] = out.template load_aux<WIDE_C>(at.item, r, c, index(r, c));
            }
            #pragma unroll
            for (int i = first; i < first + BATCH && i < COUNT; i += WIDE_C) {
                if (WIDE_C == 1 && !inside(i)) continue; // predicates of single elements would take too many registers
                T value[WIDE_C];
                #pragma unroll
                for (int h = 0; h < WIDE_C; h++) value[h] = sums[i + h];
                out.write(aux[(i - first) / WIDE_C], index(row(i), column(i)), value, inside(i));
            }
        }
    }
};

// An epilogue through shared memory, for WGMMA accumulators. A lane's accumulators are pairs of columns. Each warp transposes its
// 16 rows through shared memory, ROUND_COLUMNS columns in a round, so that a lane passes wider vectors to the epilogue and
// neighbouring lanes access neighbouring memory. Auxiliary inputs are loaded AHEAD rounds before they are used, or all of them by
// load_all() before the product. Registers limit both.
//
// Tile: an AccumulatorTile, or a class derived from it whose results have other places in memory.
// EARLY: the rounds of a tile if load_all() is called, otherwise 0.
constexpr int ROUND_COLUMNS = 32, ROUND_PADDING = 8; // padding against bank conflicts
typedef float WarpStaging[16][ROUND_COLUMNS + ROUND_PADDING];

// The sums of an epilogue (Out::SUMS) over the rows that a warp has stored. A lane has those of one column of each round.
template <int COLUMNS, int SUMS> struct ColumnSums {
    float of[COLUMNS / ROUND_COLUMNS][SUMS > 0 ? SUMS : 1] = {};
};

template <int WIDE, class Out, class Tile = AccumulatorTile, int EARLY = 0> struct WarpEpilogue {
    static constexpr int ROW_LANES = ROUND_COLUMNS / WIDE, ROWS = WARP / ROW_LANES, VECTORS = 16 / ROWS; // of a round
    typedef typename Out::template Aux<WIDE> Aux;
    static constexpr int ROUND_REGISTERS = sizeof(Aux) / sizeof(float) * VECTORS; // for the auxiliary inputs of a round
    static constexpr int AHEAD = ROUND_REGISTERS <= 16 ? 3 : Out::SUMS > 0 && ROUND_REGISTERS > 24 ? 0 : 1; // rounds
    typedef Aux Loaded[EARLY > 0 ? EARLY : AHEAD + 1][VECTORS];

    const Tile &tile;
    const Out &out;
    WarpStaging &staging;
    Loaded &aux;

    __device__ __forceinline__ WarpEpilogue(const Tile &tile, const Out &out, WarpStaging &staging, Loaded &aux)
        : tile(tile), out(out), staging(staging), aux(aux) {}

    __device__ __forceinline__ void load_all() {
        #pragma unroll
        for (int round = 0; round < EARLY; round++) start(round);
    }

    // Prefetches the auxiliary inputs to L2. Each thread of half a warpgroup prefetches a row.
    __device__ __forceinline__ static void prefetch(const Tile &tile, const Out &out, int columns) {
        const int thread = threadIdx.x % WARPGROUP, row = tile.row0 + thread;
        if (thread < WARPGROUP / 2 && row < tile.m)
            out.prefetch(tile.index(row, tile.column0), min(columns, tile.n - tile.column0));
    }

    template <int COUNT> __device__ __forceinline__ void store(const float (&sums)[COUNT]) {
        ColumnSums<2 * COUNT, 0> none;
        store(sums, none);
    }
    // Also adds the addends of the epilogue's sums to `columns`.
    template <int COUNT> __device__ __forceinline__ void store(
        const float (&sums)[COUNT], ColumnSums<2 * COUNT, Out::SUMS> &columns) {
        constexpr int ROUNDS = 2 * COUNT / ROUND_COLUMNS;
        static_assert(EARLY == 0 || EARLY == ROUNDS);
        #pragma unroll
        for (int round = 0; round < AHEAD && round < ROUNDS && EARLY == 0; round++) start(round);
        #pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            if (round + AHEAD < ROUNDS && EARLY == 0) start(round + AHEAD);
            __syncwarp();
            #pragma unroll
            for (int i = 0; i < ROUND_COLUMNS / 2; i += 2) {
                const int row = i / 2 % 2 * 8 + threadIdx.x % WARP / 4, column = i / 4 * 8 + threadIdx.x % 4 * 2;
                const float *pair = sums + round * (ROUND_COLUMNS / 2) + i;
                *(Vector<float, 2> *)&staging[row][column] = {pair[0], pair[1]};
            }
            __syncwarp();
            float own[Out::SUMS > 0 ? Out::SUMS : 1][WIDE] = {}; // sums over the rows of this lane
            #pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                const int row = this->row(i), column = this->column(round);
                const Vector<float, WIDE> v = load_staged(&staging[i * ROWS + lane_row()][lane_column()]);
                if (tile.inside(row, column)) write(loaded(round)[i], row, column, v.lane, own);
            }
            #pragma unroll
            for (int n = 0; n < Out::SUMS; n++) columns.of[round][n] += over_rows(own[n]);
        }
    }
    // The column of a round whose sums this lane has.
    __device__ __forceinline__ static int summed_column(int round) {
        return round * ROUND_COLUMNS + lane_column() + lane_row();
    }

  private:
    __device__ __forceinline__ static int lane_row() { return threadIdx.x % WARP / ROW_LANES; }
    __device__ __forceinline__ static int lane_column() { return threadIdx.x % ROW_LANES * WIDE; }
    __device__ __forceinline__ Aux (&loaded(int round))[VECTORS] { return aux[EARLY > 0 ? round : round % (AHEAD + 1)]; }
    // Passes a vector to the epilogue, and adds the addends of its sums to `own`.
    template <int COUNT> __device__ __forceinline__ void write(
        const Aux &aux, int row, int column, const float (&value)[WIDE], float (&own)[COUNT][WIDE]) {
        if constexpr (Out::SUMS == 0) {
            out.write(aux, index(row, column), value);
        } else {
            float addends[COUNT][WIDE];
            out.write(aux, index(row, column), tile.memory_column(column), value, addends);
            #pragma unroll
            for (int k = 0; k < COUNT * WIDE; k++) own[k / WIDE][k % WIDE] += addends[k / WIDE][k % WIDE];
        }
    }
    // Adds over the lanes that have the same columns. Of these, the lane in row r returns the sum of column r.
    __device__ __forceinline__ static float over_rows(float (&v)[WIDE]) {
        #pragma unroll
        for (int half = WIDE / 2; half > 0; half /= 2) {
            const bool upper = lane_row() & half;
            #pragma unroll
            for (int k = 0; k < half; k++) {
                const float sent = upper ? v[k] : v[k + half], kept = upper ? v[k + half] : v[k];
                v[k] = kept + __shfl_xor_sync(FULL_MASK, sent, half * ROW_LANES);
            }
        }
        return v[0];
    }
    __device__ __forceinline__ int row(int i) const {
        return tile.row0 + threadIdx.x % WARPGROUP / WARP * 16 + i * ROWS + lane_row();
    }
    __device__ __forceinline__ int column(int round) const {
        return tile.column0 + round * ROUND_COLUMNS + lane_column();
    }
    __device__ __forceinline__ int64_t index(int row, int column) const { return tile.index(row, column); }
    __device__ __forceinline__ static Vector<float, WIDE> load_staged(const float *from) {
        constexpr int STEP = WIDE < 4 ? WIDE : 4;
        Vector<float, WIDE> v;
        #pragma unroll
        for (int i = 0; i < WIDE; i += STEP) {
            const Vector<float, STEP> part = load<float, STEP>(from + i);
            #pragma unroll
            for (int h = 0; h < STEP; h++) v.lane[i + h] = part.lane[h];
        }
        return v;
    }
    // Loads the auxiliary inputs of a round. Outside of the matrix it loads those of another vector, because a branch would
    // serialise the loads.
    __device__ __forceinline__ void start(int round) {
        #pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int r = min(row(i), tile.m - 1), c = min(column(round), tile.n - WIDE);
            loaded(round)[i] =
                out.template load_aux<WIDE>(tile.at.item, tile.memory_row(r), tile.memory_column(c), index(r, c));
        }
    }
};
