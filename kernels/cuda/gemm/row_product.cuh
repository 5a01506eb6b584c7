// Products of a few rows by a weight, inside a row-product kernel, which takes these rows through a chain of equations.
//
// Each warp multiplies all ROWS rows by STRIP columns of the weight, for every SLICES-th K step (sliced-K). It loads the weight
// from global memory to registers, as gemm/small_gemm.cuh does. The sums of the slices are added through shared memory. The warps
// compute CHUNK columns at once.
#pragma once
#include "gemm/small_gemm.cuh"

template <int ROWS_, int N, int CHUNK, int K, bool TRANSPOSE_B, int SLICES_, int STRIP> struct RowProduct {
    static constexpr int ROWS = ROWS_, SLICES = SLICES_, STRIPS = CHUNK / STRIP, STEPS = K / K_STEP / SLICES;
    static constexpr bool MANY = ROWS > 16; // K steps then take longer than the loads of one, and a loop's code is shorter
    static constexpr int PREFETCH = STEPS < 2 || MANY ? 1 : 2, UNROLL = MANY ? 1 : STEPS;
    static_assert(N % CHUNK == 0 && CHUNK % STRIP == 0 && K % (K_STEP * SLICES) == 0, "each warp has whole tiles");
    typedef Mma<ROWS, STRIP, BF16X3, 1> WarpOp;
    static constexpr int TM = WarpOp::TM, TN = WarpOp::TN, COLUMNS = WarpOp::COLUMNS;

    T weights[PREFETCH][4][COLUMNS];

    static __device__ __forceinline__ int column0(int t) { return t / WARP % STRIPS * STRIP; }
    static __device__ __forceinline__ int slice(int t) { return t / WARP / STRIPS; }
    static __device__ __forceinline__ int k_of(int t, int step) { return (slice(t) + step * SLICES) * K_STEP; }

    __device__ __forceinline__ void load(T (&to)[4][COLUMNS], int t, const T *b, int first, int step) const {
        LaneOperand<WarpOp, COLUMNS, WarpOp::CHUNK_N, TRANSPOSE_B, VECTOR>::load(
            to, b, N, true, first + column0(t) + WarpOp::column_b(0), K, k_of(t, step));
    }

    // Loads the first K steps of the weight, which do not depend on the rows. t: the thread's number; first: the first column.
    __device__ __forceinline__ void prefetch(int t, const T *b, int first = 0) {
        if (slice(t) >= SLICES) return;
        #pragma unroll
        for (int i = 0; i < PREFETCH; i++) load(weights[i], t, b, first, i);
    }

    // to[slice][row][column - first] = the sum of a b over the slice's part of K, for CHUNK columns. a: ROWS rows of K elements.
    __device__ __forceinline__ void multiply(int t, const T *a, const T *b, T *to, int first = 0) {
        if (slice(t) >= SLICES) return;
        T sums[TM][TN] = {};
        accumulate(sums, t, a, b, first);
        #pragma unroll
        for (int i = 0; i < TM; i++) {
            #pragma unroll
            for (int j = 0; j < TN; j += WarpOp::CHUNK_N)
                store(to, (slice(t) * ROWS + WarpOp::row(i)) * CHUNK + column0(t) + WarpOp::column(j), vector(sums[i], j));
        }
    }

    // For a product without slices: passes the elements to an epilogue from registers, BATCH vectors at a time. `load`
    // (number in the batch, row, column) comes before `write`(number, row, column, elements), for all vectors of a batch.
    // Starts the loads of the next columns' weights in between.
    template <int BATCH, class Load, class Write> __device__ __forceinline__ void multiply_directly(
        int t, const T *a, const T *b, int first, const Load &load, const Write &write) {
        static_assert(SLICES == 1 && WarpOp::CHUNK_N == VECTOR && TM % BATCH == 0, "vectors of whole sums");
        if (slice(t) >= SLICES) return;
        T sums[TM][TN] = {};
        accumulate(sums, t, a, b, first);
        if (first + CHUNK < N) prefetch(t, b, first + CHUNK);
        #pragma unroll
        for (int j = 0; j < TN; j += VECTOR) {
            const int column = first + column0(t) + WarpOp::column(j);
            #pragma unroll
            for (int i = 0; i < TM; i += BATCH) {
                #pragma unroll
                for (int h = 0; h < BATCH; h++) load(h, WarpOp::row(i + h), column);
                #pragma unroll
                for (int h = 0; h < BATCH; h++) {
                    const int row = WarpOp::row(i + h);
                    write(h, row, column, checked(vector(sums[i + h], j), a, b, row, column));
                }
            }
        }
    }

    // Elements `column` ... `column` + 3 of a row of the product, from the slices' sums.
    static __device__ __forceinline__ Vector<T, VECTOR> result(
        const T *a, const T *b, const T *sums, int row, int column, int first = 0) {
        Vector<T, VECTOR> v = ::load<T, VECTOR>(sums + row * CHUNK + column - first);
        #pragma unroll
        for (int s = 1; s < SLICES; s++) {
            const Vector<T, VECTOR> next = ::load<T, VECTOR>(sums + (s * ROWS + row) * CHUNK + column - first);
            #pragma unroll
            for (int h = 0; h < VECTOR; h++) v.lane[h] += next.lane[h];
        }
        return checked(v, a, b, row, column);
    }

  private:
    // sums = the sums of a b over the slice's part of K.
    __device__ __forceinline__ void accumulate(T (&sums)[TM][TN], int t, const T *a, const T *b, int first) {
        T low[TM][TN] = {};
        #pragma unroll UNROLL
        for (int step = 0; step < STEPS; step += PREFETCH) {
            #pragma unroll
            for (int i = 0; i < PREFETCH; i++) {
                if (step + i >= STEPS) break;
                T rows[4][TM];
                LaneOperand<WarpOp, TM, 1, true, VECTOR>::load(
                    rows, a, ROWS, true, WarpOp::row(0), K, k_of(t, step + i));
                typename WarpOp::Fragments fragments;
                #pragma unroll
                for (int d = 0; d < 4; d++) {
                    #pragma unroll
                    for (int h = 0; h < TM; h++) fragments.a[d][h] = rows[d][h];
                    #pragma unroll
                    for (int h = 0; h < COLUMNS; h++) fragments.b[d][h] = weights[i][d][h];
                }
                if (step + i + PREFETCH < STEPS) load(weights[i], t, b, first, step + i + PREFETCH);
                WarpOp::multiply_step(sums, low, typename WarpOp::Operands(fragments));
            }
        }
        #pragma unroll
        for (int i = 0; i < TM; i++) {
            #pragma unroll
            for (int j = 0; j < TN; j++) sums[i][j] += low[i][j];
        }
    }

    static __device__ __forceinline__ Vector<T, WarpOp::CHUNK_N> vector(const T (&row)[TN], int j) {
        Vector<T, WarpOp::CHUNK_N> v;
        #pragma unroll
        for (int h = 0; h < WarpOp::CHUNK_N; h++) v.lane[h] = row[j + h];
        return v;
    }

    // The elements, where they are not finite computed again by FMA, because BF16X3 turns infinities into NaN.
    static __device__ __forceinline__ Vector<T, VECTOR> checked(
        Vector<T, VECTOR> v, const T *a, const T *b, int row, int column) {
        bool all = true;
        #pragma unroll
        for (int h = 0; h < VECTOR; h++) all &= finite(v.lane[h]);
        if (!all) {
            const Operands<false, TRANSPOSE_B> operands = {a, b, ROWS, N, K};
            #pragma unroll
            for (int h = 0; h < VECTOR; h++)
                if (!finite(v.lane[h])) v.lane[h] = operands.dot(row, column + h, 0, K);
        }
        return v;
    }
};
