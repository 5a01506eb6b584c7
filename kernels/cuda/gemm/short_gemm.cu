// C = op(A) op(B) for a short K, of a matrix or of many small ones, by FMA. A thread computes ROWS rows of COLUMNS columns. It
// loads all operands, and the auxiliary inputs of the epilogue, before the first product. Neighbouring threads have neighbouring
// columns, so they read the same lines of memory.
//
// Macros (short_gemm in lowering/cuda/gemm): LENGTH_M, LENGTH_N, LENGTH_K, TRANSPOSE_A, TRANSPOSE_B. ROWS and COLUMNS divide M and N.
// WIDE_K: k of a load where neighbours in memory have neighbouring k. WIDE_C: most columns of another load, and of a store.
#include "common/epilogue.cuh"

constexpr int THREADS = 128;
constexpr int WIDE = WIDE_C < Epilogue::WIDEST ? WIDE_C : Epilogue::WIDEST; // columns that a thread stores at a time

// Loads COUNT rows of op(A), or columns of op(B), from the first one on. LENGTH: how many the matrix has.
template <int COUNT, int LENGTH, bool K_MAJOR, int VECTOR> __device__ __forceinline__ void load_lines(
    T (&to)[COUNT][LENGTH_K], const T *matrix, int64_t first) {
    matrix += K_MAJOR ? first * LENGTH_K : first;
    #pragma unroll
    for (int i = 0; i < COUNT * LENGTH_K; i += VECTOR) {
        const int line = K_MAJOR ? i / LENGTH_K : i % COUNT, k = K_MAJOR ? i % LENGTH_K : i / COUNT;
        const Vector<T, VECTOR> v = load<T, VECTOR>(matrix + (K_MAJOR ? line * LENGTH_K + k : k * LENGTH + line));
        #pragma unroll
        for (int w = 0; w < VECTOR; w++) to[line + (K_MAJOR ? 0 : w)][k + (K_MAJOR ? w : 0)] = v.lane[w];
    }
}

KERNEL __launch_bounds__(THREADS) short_gemm(const T *a, const T *b, const Epilogue epilogue, int64_t threads) {
    wait_for_inputs();
    constexpr int ACROSS = LENGTH_N / COLUMNS, DOWN = LENGTH_M / ROWS, VECTORS = COLUMNS / WIDE;
    const int64_t i = grid_index(), item = i / (ACROSS * DOWN);
    if (i >= threads) return;
    const int row = i / ACROSS % DOWN * ROWS, column = i % ACROSS * COLUMNS;
    const auto index = [&](int r, int v) { return (item * LENGTH_M + row + r) * LENGTH_N + column + v * WIDE; };
    typename Epilogue::template Aux<WIDE> aux[ROWS][VECTORS];
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        #pragma unroll
        for (int v = 0; v < VECTORS; v++) aux[r][v] = epilogue.template load_aux<WIDE>(item, row + r, column + v * WIDE, index(r, v));
    }
    T rows[ROWS][LENGTH_K], columns[COLUMNS][LENGTH_K];
    load_lines<ROWS, LENGTH_M, !TRANSPOSE_A, TRANSPOSE_A ? 1 : WIDE_K>(rows, a + item * (LENGTH_M * LENGTH_K), row);
    load_lines<COLUMNS, LENGTH_N, TRANSPOSE_B, TRANSPOSE_B ? WIDE_K : WIDE_C>(columns, b + item * (LENGTH_K * LENGTH_N), column);
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        #pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            T sums[WIDE] = {};
            #pragma unroll
            for (int k = 0; k < LENGTH_K; k++) {
                #pragma unroll
                for (int w = 0; w < WIDE; w++) sums[w] = fma(rows[r][k], columns[v * WIDE + w][k], sums[w]);
            }
            epilogue.write(aux[r][v], index(r, v), sums);
        }
    }
}
