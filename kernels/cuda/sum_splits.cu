// The second pass of a product whose K was cut into splits: adds their sums, which lie one after another in scratch,
// in the order of the splits. EPILOGUE is that of gemm.cu; rows and columns are those of m x n matrices.
#ifndef EPILOGUE
#define EPILOGUE value
#define EPILOGUE_INPUTS
#endif
#include "common.cuh"

KERNEL sum_splits(
    const T *a, const T *b, T *c, EPILOGUE_INPUTS int64_t size, int64_t m, int64_t n, int64_t splits, char *scratch) {
    wait_for_inputs();
    const T *parts = (const T *)scratch;
    for (int64_t index = grid_index(); index < size; index += grid_size()) {
        T value = 0;
        #pragma unroll 8 // reads that are under way at once
        for (int64_t i = 0; i < splits; i++) value += parts[i * size + index];
        const int row = index / n % m, column = index % n;
        c[index] = EPILOGUE;
        (void)row, (void)column;
    }
}
