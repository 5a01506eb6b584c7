// Where the sums of a tile on Hopper's matrix units belong, and how they are handed to an epilogue.
#pragma once
#include "gemm/gemm.cuh"
#include "sm90/wgmma.cuh"

// The elements of a tile that a thread of a warpgroup holds, which has the tile's 64 rows from row0 on.
struct Place {
    TileAt at;
    int m, n, row0, column0;

    __device__ __forceinline__ int row(int i) const { return row0 + sum_row(i); }
    __device__ __forceinline__ int column(int i) const { return column0 + sum_column(i); }
    __device__ __forceinline__ bool inside(int i) const { return row(i) < m && column(i) < n; }

    __device__ __forceinline__ int64_t index(int row, int column) const { return (at.item * m + row) * n + column; }

    // Hands sum i to the epilogue.
    template <class Out, int COUNT> __device__ __forceinline__ void give(
        const Out &out, const float (&sums)[COUNT], int i) const {
        const T value[] = {sums[i]};
        if (inside(i)) out(at.item, row(i), column(i), index(row(i), column(i)), value);
    }
    // All of them. What it reads beside several of them is on its way before the first one is written; outside the
    // matrix the nearest element's, as a branch would keep back the reads behind it.
    template <class Out, int COUNT> __device__ __forceinline__ void give(
        const Out &out, const float (&sums)[COUNT]) const {
        constexpr int AT_ONCE = 16 * WIDE_C;
        #pragma unroll
        for (int first = 0; first < COUNT; first += AT_ONCE) {
            typename Out::template Beside<WIDE_C> beside[AT_ONCE / WIDE_C];
            #pragma unroll
            for (int i = first; i < first + AT_ONCE && i < COUNT; i += WIDE_C) {
                const int down = min(row(i), m - 1), across = min(column(i), n - WIDE_C);
                beside[(i - first) / WIDE_C] =
                    out.template read<WIDE_C>(at.item, down, across, index(down, across));
            }
            #pragma unroll
            for (int i = first; i < first + AT_ONCE && i < COUNT; i += WIDE_C) {
                T value[WIDE_C];
                #pragma unroll
                for (int h = 0; h < WIDE_C; h++) value[h] = sums[i + h];
                if (inside(i)) out.write(beside[(i - first) / WIDE_C], index(row(i), column(i)), value);
            }
        }
    }
};
