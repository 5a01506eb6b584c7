// The warp-level product in true float32 and float64: explicit FMA, so that results do not depend on how the compiler contracts
// the code around it.
#pragma once
#include "gemm/tile.cuh"

// The product of a warp, for a WM x WN tile. A WarpOp defines the rows and columns of accumulators of a thread (TM, TN), their
// coordinates in the warp's tile, and multiply() for panels in shared memory.
template <int WM_, int WN_> struct Fma {
    static constexpr int WM = WM_, WN = WN_;
    static constexpr bool KEEPS_NON_FINITE = true; // infinity and NaN give what IEEE arithmetic gives
    static constexpr bool PREFETCH = false;        // the compiler prefetches the next fragments from shared memory
    static constexpr bool K_MAJOR_A = false, K_MAJOR_B = false;
    static constexpr int PAD_A = VECTOR, PAD_B = VECTOR; // elements after a row of a panel, against bank conflicts
    static constexpr int LANES_M = 4, LANES_N = 8; // of a warp
    static constexpr int TM = WM / LANES_M, TN = WN / LANES_N;
    static constexpr int CHUNK_M = TM < VECTOR ? TM : VECTOR, CHUNK_N = TN < VECTOR ? TN : VECTOR;

    // Lane ^ 1 reads the same elements of B and lane ^ 2 the same of A, so a warp's 16-byte reads take two wavefronts.
    static __device__ __forceinline__ int lane_m() { return (threadIdx.x & 1) + threadIdx.x % WARP / 16 * 2; }
    static __device__ __forceinline__ int lane_n() { return threadIdx.x % WARP / 2 % LANES_N; }
    static __device__ __forceinline__ int row(int i) {
        return lane_m() * CHUNK_M + i / CHUNK_M * (LANES_M * CHUNK_M) + i % CHUNK_M;
    }
    static __device__ __forceinline__ int column(int j) {
        return lane_n() * CHUNK_N + j / CHUNK_N * (LANES_N * CHUNK_N) + j % CHUNK_N;
    }

    // Adds the product of ROWS k. For each k a thread reads TM + TN elements and does TM * TN FMA.
    template <int ROWS, int ROW_A, int ROW_B> static __device__ __forceinline__ void multiply(
        T (&sums)[TM][TN], const T *a, const T *b) {
        a += row(0);
        b += column(0);
        #pragma unroll
        for (int k = 0; k < ROWS; k++) {
            T left[TM], right[TN];
            read<TM, CHUNK_M, LANES_M * CHUNK_M>(left, a + k * ROW_A);
            read<TN, CHUNK_N, LANES_N * CHUNK_N>(right, b + k * ROW_B);
            #pragma unroll
            for (int i = 0; i < TM; i++) {
                #pragma unroll
                for (int j = 0; j < TN; j++) sums[i][j] = fma(left[i], right[j], sums[i][j]);
            }
        }
    }
};
