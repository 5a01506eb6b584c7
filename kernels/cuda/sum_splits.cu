// The second pass of a product whose K was cut into splits: adds their sums, which lie one after another in scratch,
// in the order of the splits. Rows and columns are those of m x n matrices.
#include "epilogue.cuh"

KERNEL sum_splits(const T *a, const T *b, const Epilogue epilogue, int64_t size, int64_t m, int64_t n, int64_t splits,
    char *scratch) {
    wait_for_inputs();
    const T *parts = (const T *)scratch;
    for (int64_t index = grid_index(); index < size; index += grid_size()) {
        T value[1] = {0};
        #pragma unroll 8 // reads that are under way at once
        for (int64_t i = 0; i < splits; i++) value[0] += parts[i * size + index];
        const int64_t line = index / n;
        epilogue(line / m, line % m, index % n, index, value);
    }
}
