/* Matrix products of integers by the loops of the definition. Sums wrap around. */

#include "common.h"

/* c[batch][m][n] = a[batch][m][k] b[batch][k][n]. Threads divide the rows of c. */
void FN(matmul_integers)(const Team *team, const T *a, const T *b, T *c, int64_t batch, int64_t m, int64_t n,
                         int64_t k) {
    int64_t begin, end;
    my_share(team, batch * m, &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        const T *from = b + row / m * k * n;
        T *to = c + row * n;
        memset(to, 0, n * sizeof(T));
        for (int64_t p = 0; p < k; p++)
            for (int64_t j = 0; j < n; j++) to[j] += a[row * k + p] * from[p * n + j];
    }
}
