// C = op(A) op(B) for a batch of many matrices of a few rows and columns: a thread computes a row of C. Neighbouring threads read
// the same lines of memory, so caches hold what several of them read.
//
// Macros (tiny_gemm in lowering/cuda/gemm): LENGTH_M, LENGTH_N, LENGTH_K, TRANSPOSE_A, TRANSPOSE_B. STORED: most columns of a store.
#include "common/epilogue.cuh"

constexpr int WIDE = STORED < Epilogue::WIDEST ? STORED : Epilogue::WIDEST; // columns that a thread stores at a time

KERNEL tiny_gemm(const T *a, const T *b, const Epilogue epilogue, int64_t rows) {
    wait_for_inputs();
    for (int64_t i = grid_index(); i < rows; i += grid_size()) {
        const int64_t item = i / LENGTH_M;
        const int row = i % LENGTH_M;
        const T *const of_a = a + item * (LENGTH_M * LENGTH_K), *const of_b = b + item * (LENGTH_K * LENGTH_N);
        T sums[LENGTH_N / WIDE][WIDE] = {};
        #pragma unroll
        for (int k = 0; k < LENGTH_K; k++) {
            const T x = of_a[TRANSPOSE_A ? k * LENGTH_M + row : row * LENGTH_K + k];
            #pragma unroll
            for (int n = 0; n < LENGTH_N; n++)
                sums[n / WIDE][n % WIDE] = fma(x, of_b[TRANSPOSE_B ? n * LENGTH_K + k : k * LENGTH_N + n], sums[n / WIDE][n % WIDE]);
        }
        #pragma unroll
        for (int n = 0; n < LENGTH_N; n += WIDE) epilogue(item, row, n, i * LENGTH_N + n, sums[n / WIDE]);
    }
}
