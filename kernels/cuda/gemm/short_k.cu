// C = op(A) op(B) with a short K, by FMA of rounded operands (MANTISSA). Most of the time is spent on C and the arrays that the
// epilogue reads, so each thread keeps its columns of op(B) in registers and goes from row to row.
//
// Macros (ShortKGemm in short_k.py): LENGTH_K, TRANSPOSE_A, TRANSPOSE_B. THREADS, ROWS: of a block. MIN_WIDE, WIDE_C: minimum and
// maximum columns of a thread.
#include "common/epilogue.cuh"
#include "common/rounding.cuh"

constexpr int WIDEST = Epilogue::WIDEST < MIN_WIDE ? MIN_WIDE : Epilogue::WIDEST;
constexpr int WIDE = WIDE_C < WIDEST ? WIDE_C : WIDEST;                 // columns of a thread
constexpr int STORED = WIDE < Epilogue::WIDEST ? WIDE : Epilogue::WIDEST; // columns that a thread stores at a time
constexpr int COLUMNS = THREADS * WIDE;                                 // of a block
constexpr int ROWS_AT_ONCE = 4; // rows whose auxiliary inputs are loaded before any of them is written

KERNEL __launch_bounds__(THREADS) short_k_gemm(
    const T *a, const T *b, const Epilogue epilogue, int64_t batch, int64_t m, int64_t n) {
    wait_for_inputs();
    if (blockIdx.x * COLUMNS >= n) return; // the grid has blocks for threads with the fewest columns
    const int64_t item = blockIdx.z;
    const int row0 = blockIdx.y * ROWS, column = blockIdx.x * COLUMNS + threadIdx.x * WIDE;
    a += item * m * LENGTH_K;
    b += item * n * LENGTH_K;
    __shared__ float of_a[ROWS][LENGTH_K]; // rows of op(A)
    for (int i = threadIdx.x; i < ROWS * LENGTH_K; i += THREADS) {
        const int down = TRANSPOSE_A ? i % ROWS : i / LENGTH_K, k = TRANSPOSE_A ? i / ROWS : i % LENGTH_K;
        const int64_t row = row0 + down;
        of_a[down][k] = row < m ? rounded(a[TRANSPOSE_A ? k * m + row : row * LENGTH_K + k]) : 0;
    }
    float of_b[LENGTH_K][WIDE];
    #pragma unroll
    for (int k = 0; k < LENGTH_K; k++) {
        #pragma unroll
        for (int i = 0; i < WIDE; i++)
            of_b[k][i] = column < n ? rounded(b[TRANSPOSE_B ? (int64_t)(column + i) * LENGTH_K + k : k * n + column + i]) : 0;
    }
    __syncthreads();
    if (column >= n) return;
    const int rows = min((int64_t)ROWS, m - row0);
    for (int first = 0; first < rows; first += ROWS_AT_ONCE) {
        Epilogue::Aux<STORED> aux[ROWS_AT_ONCE][WIDE / STORED];
        #pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++) { // a branch would serialise the loads
            const int row = row0 + min(first + i, rows - 1);
            const int64_t index = (item * m + row) * n + column;
            #pragma unroll
            for (int h = 0; h < WIDE; h += STORED)
                aux[i][h / STORED] = epilogue.template load_aux<STORED>(item, row, column + h, index + h);
        }
        #pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++) {
            if (first + i >= rows) return;
            T sum[WIDE / STORED][STORED] = {};
            #pragma unroll
            for (int k = 0; k < LENGTH_K; k++) {
                #pragma unroll
                for (int h = 0; h < WIDE; h++)
                    sum[h / STORED][h % STORED] = fma(of_a[first + i][k], of_b[k][h], sum[h / STORED][h % STORED]);
            }
            #pragma unroll
            for (int h = 0; h < WIDE; h += STORED)
                epilogue.write(aux[i][h / STORED], (item * m + row0 + first + i) * n + column + h, sum[h / STORED]);
        }
    }
}
