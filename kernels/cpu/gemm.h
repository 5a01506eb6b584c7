/* The epilogue of a matrix product (gemm.c): runs on each finished block while it is in cache, for example to add a
   bias or to update weights with their gradient. T and SUFFIX as in common.h. */

#pragma once

#include "common.h"

enum { MAX_AHEAD = 8 };

typedef struct {
    /* block[i * ld + j] is element (row + i, column + j) of the product, for i < rows and j < columns; it may be
       changed. The rows of a batch are counted on from matrix to matrix; a block lies in one matrix. The blocks of one
       product do not overlap and come in any order, from several threads. */
    void (*function)(void *context, const T *block, int64_t ld, int64_t row, int64_t column, int64_t rows,
                     int64_t columns);
    void *context;
    /* Arrays of the product's shape that the function reads or writes. They are prefetched while the block is computed. */
    const T *ahead[MAX_AHEAD];
    int64_t ahead_count;
} FN(Epilogue);

void FN(gemm)(const Team *team, const T *a, const T *b, T *c, int64_t batch, int64_t m, int64_t n, int64_t k,
              int64_t transpose_a, int64_t transpose_b, const FN(Epilogue) * epilogue);
