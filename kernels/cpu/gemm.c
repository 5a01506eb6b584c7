/* Matrix products by all threads, in blocks that fit the caches: see gemm_blocks.h. */

#include "gemm_blocks.h"

/* C[batch][m][n] = op(A) op(B): A is [batch][m][k], or with transpose_a [batch][k][m]; B is [batch][k][n], or with
   transpose_b [batch][n][k]. With an epilogue c may be NULL if the product itself is not needed. */
void FN(gemm)(const Team *team, const T *a, const T *b, T *c, int64_t batch, int64_t m, int64_t n, int64_t k,
              int64_t transpose_a, int64_t transpose_b, const FN(Epilogue) * epilogue) {
    multiply(team, a, b, c, batch, m, n, k, transpose_a, transpose_b, epilogue);
}
