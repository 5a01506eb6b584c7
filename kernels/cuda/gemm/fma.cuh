// The unit of true float32 and float64 products: fused multiply-adds, written as such, so that their bits do not depend
// on how the compiler contracts the code around them.
#pragma once
#include "gemm/tile.cuh"

// What a warp does with its panels, WM rows by WN columns. A unit has the number of rows and columns of a thread's sums
// (TM, TN), their places in the warp's tile, and the product of ROWS rows of both panels.
template <int WM_, int WN_> struct Fma {
    static constexpr int WM = WM_, WN = WN_;
    static constexpr bool EXACT = true;  // for infinity and NaN too
    static constexpr bool AHEAD = false; // whether a warp should read ahead: the compiler does it
    static constexpr bool ALONG_A = false, ALONG_B = false;
    static constexpr int PAD_A = VECTOR, PAD_B = VECTOR; // of the panels' rows: eight k of four columns meet all banks
    static constexpr int LANES_M = 4, LANES_N = 8; // the threads of a warp
    static constexpr int TM = WM / LANES_M, TN = WN / LANES_N;
    static constexpr int CHUNK_M = TM < VECTOR ? TM : VECTOR, CHUNK_N = TN < VECTOR ? TN : VECTOR;

    // Lanes are dealt so that lane ^ 1 reads the same numbers of B and lane ^ 2 the same of A: shared memory then
    // serves 16-byte reads of a warp in two goes.
    static __device__ __forceinline__ int lane_m() { return (threadIdx.x & 1) + threadIdx.x % WARP / 16 * 2; }
    static __device__ __forceinline__ int lane_n() { return threadIdx.x % WARP / 2 % LANES_N; }
    static __device__ __forceinline__ int row(int i) {
        return lane_m() * CHUNK_M + i / CHUNK_M * (LANES_M * CHUNK_M) + i % CHUNK_M;
    }
    static __device__ __forceinline__ int column(int j) {
        return lane_n() * CHUNK_N + j / CHUNK_N * (LANES_N * CHUNK_N) + j % CHUNK_N;
    }

    // Of every k a thread reads TM + TN numbers and does TM * TN multiply-adds.
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
