// Matrices of weights, split into bfloat16 terms in the layout that wgmma reads (bf16x3), for products of many rows.
//
// A tile of 64 x 64 weights has three terms, each of 64 rows of 128 bytes with the 128-byte swizzle. So one bulk copy fetches a
// tile, and wgmma reads it as a K-major operand or as a transposed one.
//
// Along one axis of a matrix each group of 16 is permuted: position 8 s + 2 c + h holds element 4 c + 2 s + h. The axis is K of a
// product whose A operand is in registers, where each thread then has groups of four neighbours of a row. In a pair of products
// (gemm/back_to_back.cuh) it is the columns of the first one, which are K of the second one.
#pragma once
#include "sm90/bf16x3.cuh"

constexpr int WEIGHT_TILE = 64, TERM_BYTES = WEIGHT_TILE * WEIGHT_TILE * 2, TILE_BYTES = BF16X3_TERMS * TERM_BYTES;

// The element of a group of 16 that position `i` holds.
__device__ __forceinline__ int permuted(int i) { return i % 8 / 2 * 4 + i / 8 * 2 + i % 2; }

// Splits the weights of a chunk, and stores their terms in the tiles. The chunks of a matrix of `columns` columns are counted
// row by row, after the permutation.
template <int PERMUTED_AXIS>
__device__ __forceinline__ void store_tile_chunk(const float *weights, char *tiles, int columns, int chunk) {
    const int row = chunk / (columns / CHUNK_ELEMENTS), column = chunk % (columns / CHUNK_ELEMENTS) * CHUNK_ELEMENTS;
    const int from = PERMUTED_AXIS == 0 ? row / 16 * 16 + permuted(row % 16) : row;
    float x[CHUNK_ELEMENTS];
    #pragma unroll
    for (int j = 0; j < CHUNK_ELEMENTS; j += 2) {
        const int of = PERMUTED_AXIS == 1 ? column / 16 * 16 + permuted(column % 16 + j) : column + j;
        const Vector<float, 2> v = load<float, 2>(weights + (int64_t)from * columns + of);
        x[j] = v.lane[0], x[j + 1] = v.lane[1];
    }
    Chunk terms[BF16X3_TERMS];
    split_bf16x3(terms, x);
    const int tile = row / WEIGHT_TILE * (columns / WEIGHT_TILE) + column / WEIGHT_TILE;
    const int at = swizzle_128b(row % WEIGHT_TILE, column % WEIGHT_TILE / CHUNK_ELEMENTS);
    #pragma unroll
    for (int p = 0; p < BF16X3_TERMS; p++)
        *(Chunk *)(tiles + (int64_t)tile * TILE_BYTES + p * TERM_BYTES + at) = terms[p];
}
