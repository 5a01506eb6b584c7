// bf16x3: a float32 as the sum of three bfloat16 terms (Format<BF16X3> in gemm/mma.cuh), for WGMMA. Shared memory holds
// chunks of eight neighbouring numbers of one term. K-major operands that are rounded to tf32 are multiplied in tf32.
#pragma once
#include "common/epilogue.cuh"
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

// main += the products of all pairs of terms, those of low order first: start(terms, add) starts the products of a pair, to `sums`.
// beside() starts others with the leading products.
template <int SUMS, class Start, class Beside> __device__ __forceinline__ void add_products(
    float (&main)[SUMS], float (&sums)[SUMS], const Start &start, const Beside &beside) {
    const auto add = [&] {
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] += sums[i];
    };
    if (LOW_ORDER_PAIRS > 0) {
        wgmma_fence();
        #pragma unroll
        for (int i = 0; i < LOW_ORDER_PAIRS; i++) start(low_order_pair(i), i > 0);
        add();
    }
    wgmma_fence();
    start({0, 0}, false);
    beside();
    add();
}

// Rounds eight neighbours (MANTISSA) and splits them into a chunk for each term.
__device__ __forceinline__ void split_bf16x3(Chunk (&terms)[BF16X3_TERMS], const float (&x)[CHUNK_ELEMENTS]) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        float four[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) four[i] = TERMS_USED > 1 ? rounded(x[4 * h + i]) : x[4 * h + i]; // the conversion rounds to one term
        uint32_t found[BF16X3_TERMS][2];
        Format<BF16X3>::convert(four, found);
        #pragma unroll
        for (int p = 0; p < BF16X3_TERMS; p++) {
            terms[p].lane[2 * h] = found[p][0];
            terms[p].lane[2 * h + 1] = found[p][1];
        }
    }
}

// Replaces each sum i that is not finite by dot(i), because bf16x3 turns infinities into NaN.
template <int SUMS, class Dot> __device__ __forceinline__ void recompute_non_finite(float (&sums)[SUMS], const Dot &dot) {
    float zero = 0;
    #pragma unroll
    for (int i = 0; i < SUMS; i++) zero = fma(sums[i], 0.0f, zero);
    if (zero == 0) return;
    #pragma unroll
    for (int i = 0; i < SUMS; i++)
        if (!finite(sums[i])) sums[i] = dot(i);
}

// How eight neighbouring numbers lie in chunks: one for each term.
struct Bf16x3Operand {
    static constexpr MmaKind KIND = BFLOAT16;
    static constexpr int TERMS = TERMS_USED, TERM_CHUNKS = 1, CHUNKS = TERMS * TERM_CHUNKS;
    static __device__ __forceinline__ void split(Chunk (&chunks)[CHUNKS], const float (&x)[CHUNK_ELEMENTS]) {
        Chunk terms[BF16X3_TERMS];
        split_bf16x3(terms, x);
        #pragma unroll
        for (int i = 0; i < CHUNKS; i++) chunks[i] = terms[i];
    }
};

// Two chunks of four numbers in tf32. WGMMA multiplies K-major tf32 operands only.
struct Tf32Operand {
    static constexpr MmaKind KIND = TF32;
    static constexpr int TERMS = 1, TERM_CHUNKS = 2, CHUNKS = TERMS * TERM_CHUNKS;
    static __device__ __forceinline__ void split(Chunk (&chunks)[CHUNKS], const float (&x)[CHUNK_ELEMENTS]) {
        #pragma unroll
        for (int i = 0; i < CHUNK_ELEMENTS; i++) chunks[i / 4].lane[i % 4] = __float_as_uint(rounded(x[i]));
    }
};

template <bool IN_TF32> struct ChooseOperand { typedef Bf16x3Operand Type; };
template <> struct ChooseOperand<true> { typedef Tf32Operand Type; };
typedef ChooseOperand<MANTISSA == 10>::Type KMajorOperand;
