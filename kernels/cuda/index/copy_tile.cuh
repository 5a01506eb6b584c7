// A copy through shared memory, for a matrix whose rows are contiguous in the source and whose columns are in the target.
#pragma once
#include "common/common.cuh"

// A tile of R rows and C columns. An extra row avoids bank conflicts.
template <typename E, int R, int C> struct CopyTile {
    E of[C][R + 1];

    // By THREADS threads: copies `rows` x `columns` elements, the first ones at `from` and `to`. s, t: strides of rows and columns in
    // source and target. A thread loads AHEAD elements before it stores any to the tile.
    template <int THREADS> __device__ __forceinline__ void copy(const E *from, E *to, uint32_t rows, uint32_t columns, int64_t s_row,
        int64_t s_column, int64_t t_row, int64_t t_column) {
        constexpr uint32_t AHEAD = 16;
        #pragma unroll 1
        for (uint32_t first = 0; first < R * C; first += AHEAD * THREADS) {
            E held[AHEAD];
            #pragma unroll
            for (uint32_t k = 0; k < AHEAD; k++) {
                const uint32_t i = first + k * THREADS + threadIdx.x; // outside of the tile or the array it loads another element
                held[k] = from[min(i % R, rows - 1) * s_row + min(i / R, columns - 1) * s_column];
            }
            __syncthreads(); // the compiler moves no store before it
            #pragma unroll
            for (uint32_t k = 0; k < AHEAD; k++) {
                const uint32_t i = first + k * THREADS + threadIdx.x;
                if (i < R * C) of[i / R][i % R] = held[k];
            }
        }
        __syncthreads();
        #pragma unroll 16
        for (uint32_t i = threadIdx.x; i < R * C; i += THREADS) {
            const uint32_t r = i / C, c = i % C;
            if (r < rows && c < columns) to[r * t_row + c * t_column] = of[c][r];
        }
    }
};
