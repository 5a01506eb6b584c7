// Products of a few rows by a weight, inside a row-product kernel, which takes these rows through a chain of equations.
//
// Each warp multiplies all ROWS rows by STRIP columns of the weight, for every SLICES-th K step (sliced-K). It loads the weight
// from global memory to registers, as gemm/small_gemm.cuh does. The sums of the slices are added through shared memory.
#pragma once
#include "gemm/small_gemm.cuh"

template <int ROWS_, int N, int K, bool TRANSPOSE_B, int SLICES_, int STRIP> struct RowProduct {
    static constexpr int ROWS = ROWS_, SLICES = SLICES_, STRIPS = N / STRIP, STEPS = K / K_STEP / SLICES;
    static constexpr int PREFETCH = STEPS < 2 ? STEPS : 2;
    static_assert(N % STRIP == 0 && K % (K_STEP * SLICES) == 0, "each warp has whole tiles");
    typedef Mma<ROWS, STRIP, BF16X3, 1> WarpOp;
    static constexpr int TM = WarpOp::TM, TN = WarpOp::TN, COLUMNS = WarpOp::COLUMNS;

    T weights[PREFETCH][4][COLUMNS];

    static __device__ __forceinline__ int column0(int t) { return t / WARP % STRIPS * STRIP; }
    static __device__ __forceinline__ int slice(int t) { return t / WARP / STRIPS; }
    static __device__ __forceinline__ int k_of(int t, int step) { return (slice(t) + step * SLICES) * K_STEP; }

    __device__ __forceinline__ void load(T (&to)[4][COLUMNS], int t, const T *b, int step) const {
        LaneOperand<WarpOp, COLUMNS, WarpOp::CHUNK_N, TRANSPOSE_B, VECTOR>::load(
            to, b, N, true, column0(t) + WarpOp::column_b(0), K, k_of(t, step));
    }

    // Loads the first K steps of the weight, which do not depend on the rows. t: the thread's number.
    __device__ __forceinline__ void prefetch(int t, const T *b) {
        if (slice(t) >= SLICES) return;
        #pragma unroll
        for (int i = 0; i < PREFETCH; i++) load(weights[i], t, b, i);
    }

    // to[slice][row][column] = the sum of a b over the slice's part of K. a: ROWS rows of K elements.
    __device__ __forceinline__ void multiply(int t, const T *a, const T *b, T *to) {
        if (slice(t) >= SLICES) return;
        T sums[TM][TN] = {}, low[TM][TN] = {};
        #pragma unroll
        for (int first = 0; first < STEPS; first += PREFETCH) {
            #pragma unroll
            for (int i = 0; i < PREFETCH; i++) {
                if (first + i >= STEPS) break;
                T rows[4][TM];
                LaneOperand<WarpOp, TM, 1, true, VECTOR>::load(
                    rows, a, ROWS, true, WarpOp::row(0), K, k_of(t, first + i));
                typename WarpOp::Fragments fragments;
                #pragma unroll
                for (int d = 0; d < 4; d++) {
                    #pragma unroll
                    for (int h = 0; h < TM; h++) fragments.a[d][h] = rows[d][h];
                    #pragma unroll
                    for (int h = 0; h < COLUMNS; h++) fragments.b[d][h] = weights[i][d][h];
                }
                if (first + i + PREFETCH < STEPS) load(weights[i], t, b, first + i + PREFETCH);
                WarpOp::multiply_step(sums, low, typename WarpOp::Operands(fragments));
            }
        }
        #pragma unroll
        for (int i = 0; i < TM; i++) {
            #pragma unroll
            for (int j = 0; j < TN; j += WarpOp::CHUNK_N) {
                Vector<T, WarpOp::CHUNK_N> v;
                #pragma unroll
                for (int h = 0; h < WarpOp::CHUNK_N; h++) v.lane[h] = sums[i][j + h] + low[i][j + h];
                store(to, (slice(t) * ROWS + WarpOp::row(i)) * N + column0(t) + WarpOp::column(j), v);
            }
        }
    }

    // Elements `column` ... `column` + 3 of a row of the product, from the slices' sums. Results that are not finite are
    // computed again by FMA, in `sums`, because BF16X3 turns infinities into NaN.
    static __device__ __forceinline__ Vector<T, VECTOR> result(const T *a, const T *b, T *sums, int row, int column) {
        Vector<T, VECTOR> v = ::load<T, VECTOR>(sums + row * N + column);
        #pragma unroll
        for (int s = 1; s < SLICES; s++) {
            const Vector<T, VECTOR> next = ::load<T, VECTOR>(sums + (s * ROWS + row) * N + column);
            #pragma unroll
            for (int h = 0; h < VECTOR; h++) v.lane[h] += next.lane[h];
        }
        bool all = true;
        #pragma unroll
        for (int h = 0; h < VECTOR; h++) all &= finite(v.lane[h]);
        if (!all) {
            const Operands<false, TRANSPOSE_B> operands = {a, b, ROWS, N, K};
            T *const own = sums + row * N + column; // in memory a loop needs less code than in registers
            ::store(own, 0, v);
            #pragma unroll 1
            for (int h = 0; h < VECTOR; h++)
                if (!finite(own[h])) own[h] = operands.dot(row, column + h, 0, K);
            v = ::load<T, VECTOR>(own);
        }
        return v;
    }
};
