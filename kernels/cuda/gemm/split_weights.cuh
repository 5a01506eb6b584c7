// Matrices of weights, split into bfloat16 terms in the layout that wgmma reads (bf16x3), for the products of many rows.
//
// A tile of 64 x 64 weights has three terms, each of 64 rows of 128 bytes with the 128-byte swizzle. So one bulk copy fetches a
// tile, and wgmma reads it as a K-major operand or as a transposed one.
#pragma once
#include "sm90/bf16x3.cuh"

constexpr int WEIGHT_TILE = 64, TERM_BYTES = WEIGHT_TILE * WEIGHT_TILE * 2, TILE_BYTES = BF16X3_TERMS * TERM_BYTES;

// Splits eight neighbours of a row x columns matrix.
__device__ __forceinline__ void split_weights(const float *weights, char *tiles, int columns, int chunk) {
    const int row = chunk / (columns / CHUNK_ELEMENTS), column = chunk % (columns / CHUNK_ELEMENTS) * CHUNK_ELEMENTS;
    float x[CHUNK_ELEMENTS];
    #pragma unroll
    for (int j = 0; j < CHUNK_ELEMENTS; j += VECTOR) {
        const Vector<float, VECTOR> v = load<float, VECTOR>(weights + (int64_t)row * columns + column + j);
        #pragma unroll
        for (int h = 0; h < VECTOR; h++) x[j + h] = v.lane[h];
    }
    Chunk terms[BF16X3_TERMS];
    split_bf16x3(terms, x);
    const int tile = row / WEIGHT_TILE * (columns / WEIGHT_TILE) + column / WEIGHT_TILE;
    const int at = swizzle_128b(row % WEIGHT_TILE, column % WEIGHT_TILE / CHUNK_ELEMENTS);
    #pragma unroll
    for (int p = 0; p < BF16X3_TERMS; p++)
        *(Chunk *)(tiles + (int64_t)tile * TILE_BYTES + p * TERM_BYTES + at) = terms[p];
}
