// Matrix products of integers by the loop of the definition. Sums wrap around.
#include "common/common.cuh"

// c[batch][m][n] = a[batch][m][k] b[batch][k][n]: a thread for each element of c.
KERNEL matmul_integers(const T *a, const T *b, T *c, int64_t batch, int64_t m, int64_t n, int64_t k) {
    wait_for_inputs();
    for (int64_t i = grid_index(); i < batch * m * n; i += grid_size()) {
        const T *row = a + i / n * k, *column = b + i / n / m * k * n + i % n;
        uint64_t sum = 0;
        for (int64_t p = 0; p < k; p++) sum += (uint64_t)row[p] * (uint64_t)column[p * n];
        c[i] = (T)sum;
    }
}
