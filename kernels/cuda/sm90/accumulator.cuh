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
// neighbouring lanes access neighbouring memory. Auxiliary inputs are loaded AHEAD rounds before they are used.
//
// Tile: an AccumulatorTile, or a class derived from it whose results have other places in memory.
constexpr int ROUND_COLUMNS = 32, ROUND_PADDING = 8; // padding against bank conflicts
typedef float WarpStaging[16][ROUND_COLUMNS + ROUND_PADDING];

template <int WIDE, class Out, class Tile = AccumulatorTile> struct WarpEpilogue {
    static constexpr int ROW_LANES = ROUND_COLUMNS / WIDE, ROWS = WARP / ROW_LANES, VECTORS = 16 / ROWS; // of a round
    typedef typename Out::template Aux<WIDE> Aux;
    static constexpr int AHEAD = sizeof(Aux) * VECTORS <= 64 ? 3 : 1; // rounds; registers limit them

    const Tile &tile;
    const Out &out;
    WarpStaging &staging;
    Aux aux[AHEAD + 1][VECTORS];

    __device__ __forceinline__ WarpEpilogue(const Tile &tile, const Out &out, WarpStaging &staging)
        : tile(tile), out(out), staging(staging) {}

    // Prefetches the auxiliary inputs to L2. Each thread of half a warpgroup prefetches a row.
    __device__ __forceinline__ static void prefetch(const Tile &tile, const Out &out, int columns) {
        const int thread = threadIdx.x % WARPGROUP, row = tile.row0 + thread;
        if (thread < WARPGROUP / 2 && row < tile.m)
            out.prefetch(tile.index(row, tile.column0), min(columns, tile.n - tile.column0));
    }

    template <int COUNT> __device__ __forceinline__ void store(const float (&sums)[COUNT]) {
        constexpr int ROUNDS = 2 * COUNT / ROUND_COLUMNS;
        #pragma unroll
        for (int round = 0; round < AHEAD && round < ROUNDS; round++) start(round);
        #pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            if (round + AHEAD < ROUNDS) start(round + AHEAD);
            __syncwarp();
            #pragma unroll
            for (int i = 0; i < ROUND_COLUMNS / 2; i += 2) {
                const int row = i / 2 % 2 * 8 + threadIdx.x % WARP / 4, column = i / 4 * 8 + threadIdx.x % 4 * 2;
                const float *pair = sums + round * (ROUND_COLUMNS / 2) + i;
                *(Vector<float, 2> *)&staging[row][column] = {pair[0], pair[1]};
            }
            __syncwarp();
            #pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                const int row = this->row(i), column = this->column(round);
                const Vector<float, WIDE> v = load_staged(&staging[i * ROWS + lane_row()][lane_column()]);
                if (tile.inside(row, column)) out.write(aux[round % (AHEAD + 1)][i], index(row, column), v.lane);
            }
        }
    }

  private:
    __device__ __forceinline__ static int lane_row() { return threadIdx.x % WARP / ROW_LANES; }
    __device__ __forceinline__ static int lane_column() { return threadIdx.x % ROW_LANES * WIDE; }
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
            aux[round % (AHEAD + 1)][i] =
                out.template load_aux<WIDE>(tile.at.item, tile.memory_row(r), tile.memory_column(c), index(r, c));
        }
    }
};
