// bf16x3: a float32 as the sum of three bfloat16 terms (Format<BF16X3> in gemm/mma.cuh), for WGMMA. Shared memory holds
// chunks of eight neighbouring numbers of one term.
#pragma once
#include "common/rounding.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/wgmma.cuh"

constexpr int BF16X3_TERMS = 3;
constexpr int CHUNK_ELEMENTS = 8, CHUNK_BYTES = 16, CORE_MATRIX_BYTES = 8 * CHUNK_BYTES; // a core matrix: eight rows of a chunk
typedef Vector<uint32_t, 4> Chunk;

// A product of term a of A and term b of B. Six of the nine add up to a float32 product, with an error below 2^-24 of it: {0, 0}
// and the low-order pairs, the smallest first. Operands that are rounded (MANTISSA) have fewer terms.
struct TermPair { int a, b; };
constexpr int TERMS_USED = MANTISSA > 15 ? 3 : MANTISSA > 7 ? 2 : 1;
constexpr int LOW_ORDER_PAIRS = TERMS_USED == 3 ? 5 : TERMS_USED == 2 ? 3 : 0;
__device__ constexpr TermPair low_order_pair(int i) {
    constexpr TermPair pairs[] = {{0, 2}, {2, 0}, {1, 1}, {0, 1}, {1, 0}};
    return pairs[5 - LOW_ORDER_PAIRS + i];
}

// Rounds eight neighbours (MANTISSA) and splits them into a chunk for each term.
__device__ __forceinline__ void split_bf16x3(Chunk (&terms)[BF16X3_TERMS], const float (&x)[CHUNK_ELEMENTS]) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const float four[4] = {rounded(x[4 * h]), rounded(x[4 * h + 1]), rounded(x[4 * h + 2]), rounded(x[4 * h + 3])};
        uint32_t found[BF16X3_TERMS][2];
        Format<BF16X3>::convert(four, found);
        #pragma unroll
        for (int p = 0; p < BF16X3_TERMS; p++) {
            terms[p].lane[2 * h] = found[p][0];
            terms[p].lane[2 * h + 1] = found[p][1];
        }
    }
}
