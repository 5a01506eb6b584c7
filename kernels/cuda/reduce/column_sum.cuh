// Sums over the rows of some columns of matrices, by one thread block. The order of the additions is fixed.
#pragma once
#include "common/common.cuh"

extern __shared__ __align__(16) unsigned char shared_bytes[];

// A block sums COLUMNS_ neighbouring columns of each of SUMS matrices, and a thread WIDE of these. DOWN threads have the same
// columns, and each takes every DOWN-th row. Their totals are added in order, through SHARED bytes of shared memory.
template <typename A, int THREADS, int COLUMNS_, int WIDE, int SUMS, int SHARED> struct ColumnSum {
    static constexpr int ACROSS = COLUMNS_ / WIDE, DOWN = THREADS / ACROSS, PITCH = COLUMNS_ + WIDE, RUN = 8;
    typedef typename TotalOf<A>::type Total;
    static_assert(SHARED == DOWN * PITCH * sizeof(Total), "column_sum.py");
    const int first;
    Total totals[SUMS][WIDE] = {};

    __device__ __forceinline__ ColumnSum(int block) : first(block * COLUMNS_) {}

    // read(row, column, addends) puts the addends of sum n in WIDE columns into addends[n]. `rows` is at most ROWS.
    template <int ROWS, int COLUMNS, typename Read> __device__ __forceinline__ void add_rows(Read read, int rows = ROWS) {
        const int column = first + threadIdx.x % ACROSS * WIDE, begin = threadIdx.x / ACROSS;
        if (column >= COLUMNS || begin >= DOWN) return;
        int row = begin;
        for (; row + (RUN - 1) * DOWN < rows; row += RUN * DOWN) add_run<true>(read, row, rows, column);
        if ((ROWS % (RUN * DOWN) != 0 || rows < ROWS) && row < rows) add_run<false>(read, row, rows, column);
    }

    // Calls write(column, found) for each of the block's columns, with the totals of all sums. All threads of the block call it.
    template <int COLUMNS, typename Write> __device__ __forceinline__ void finish(Write write) {
        Total *const shared = (Total *)shared_bytes;
        const int own = threadIdx.x % ACROSS * WIDE, down = threadIdx.x / ACROSS, column = first + threadIdx.x;
        const bool writes = threadIdx.x < COLUMNS_ && column < COLUMNS;
        Total found[SUMS] = {};
        #pragma unroll
        for (int n = 0; n < SUMS; n++) {
            if (n > 0) __syncthreads();
            #pragma unroll
            for (int k = 0; k < WIDE; k++)
                if (down < DOWN) shared[down * PITCH + own + k] = totals[n][k];
            __syncthreads();
            #pragma unroll 8
            for (int i = 0; i < (writes ? DOWN : 0); i++) found[n] += shared[i * PITCH + threadIdx.x];
        }
        if (writes) write(column, found);
    }

  private:
    // Adds RUN rows, or those of them that exist. No load depends on a branch, so all begin at once.
    template <bool WHOLE, typename Read> __device__ __forceinline__ void add_run(Read read, int row, int rows, int column) {
        A sums[SUMS][WIDE] = {};
        #pragma unroll
        for (int i = 0; i < RUN; i++) {
            const int at = row + i * DOWN;
            const bool is_row = WHOLE || at < rows;
            A addends[SUMS][WIDE];
            read(is_row ? at : row, column, addends);
            #pragma unroll
            for (int k = 0; k < SUMS * WIDE; k++) sums[k / WIDE][k % WIDE] += is_row ? addends[k / WIDE][k % WIDE] : 0;
        }
        #pragma unroll
        for (int k = 0; k < SUMS * WIDE; k++) totals[k / WIDE][k % WIDE] += sums[k / WIDE][k % WIDE];
    }
};
