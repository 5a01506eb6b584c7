// WGMMA accumulators: their positions in C, and the epilogue.
#pragma once
#include "gemm/gemm.cuh"
#include "sm90/wgmma.cuh"

// The accumulators of a thread whose warpgroup computes 64 rows of a tile, from row0 and column0 of the matrix on.
struct AccumulatorTile {
    TileCoord at;
    int m, n, row0, column0;

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
