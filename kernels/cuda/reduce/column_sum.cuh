// The sum over the rows of some columns of a matrix, by one thread block. The order of the additions is fixed.
#pragma once
#include "common/common.cuh"

extern __shared__ __align__(16) unsigned char shared_bytes[];

// A block sums COLUMNS_ neighbouring columns, a thread WIDE of them. DOWN threads share the same columns, and each takes every
// DOWN-th row. Their totals are added in order, through SHARED bytes of shared memory.
template <typename A, int THREADS, int COLUMNS_, int WIDE, int SHARED> struct ColumnSum {
    static constexpr int ACROSS = COLUMNS_ / WIDE, DOWN = THREADS / ACROSS, PITCH = COLUMNS_ + WIDE, RUN = 8;
    typedef typename TotalOf<A>::type Total;
    static_assert(SHARED == DOWN * PITCH * sizeof(Total), "column_sum.py");
    const int first;
    Total totals[WIDE];

    __device__ __forceinline__ ColumnSum(int block) : first(block * COLUMNS_) {
        #pragma unroll
        for (int k = 0; k < WIDE; k++) totals[k] = 0;
    }

    // read(row, column, terms) puts the terms of WIDE columns into terms[0], ... There may be fewer `rows` than ROWS.
    template <int ROWS, int COLUMNS, typename Read> __device__ __forceinline__ void add_rows(Read read, int rows = ROWS) {
        const int column = first + threadIdx.x % ACROSS * WIDE, begin = threadIdx.x / ACROSS;
        if (column >= COLUMNS || begin >= DOWN) return;
        for (int row = begin; row < rows; row += RUN * DOWN) {
            A sums[WIDE] = {};
            #pragma unroll
            for (int i = 0; i < RUN; i++) {
                if ((ROWS % (RUN * DOWN) != 0 || rows < ROWS) && row + i * DOWN >= rows) continue;
                A terms[WIDE];
                read(row + i * DOWN, column, terms);
                #pragma unroll
                for (int k = 0; k < WIDE; k++) sums[k] += terms[k];
            }
            #pragma unroll
            for (int k = 0; k < WIDE; k++) totals[k] += sums[k];
        }
    }

    // Calls write(column, total) for each of the block's columns, with a `total` of type Total. All threads of the block call it.
    template <int COLUMNS, typename Write> __device__ __forceinline__ void finish(Write write) {
        Total *const shared = (Total *)shared_bytes;
        const int own = threadIdx.x % ACROSS * WIDE, down = threadIdx.x / ACROSS;
        #pragma unroll
        for (int k = 0; k < WIDE; k++)
            if (down < DOWN) shared[down * PITCH + own + k] = totals[k];
        __syncthreads();
        const int column = first + threadIdx.x;
        if (threadIdx.x >= COLUMNS_ || column >= COLUMNS) return;
        Total total = 0;
        #pragma unroll 8
        for (int i = 0; i < DOWN; i++) total += shared[i * PITCH + threadIdx.x];
        write(column, total);
    }
};
