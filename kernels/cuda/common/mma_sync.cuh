// The warp-level tensor-core instructions of 16-bit operands: ldmatrix, stmatrix, mma.sync.m16n8k16 and conversions (PTX manual,
// "Warp-level matrix instructions"). Compute capability 8.0 and up.
//
// Lane (g, c), g = lane / 4, c = lane % 4, holds of a product: A: rows g and g + 8 at k = 2c, 2c + 1, then the same rows at
// k + 8. B: column g at k = 2c, 2c + 1, then at k + 8. The result: columns 2c and 2c + 1 of row g, then of row g + 8.
#pragma once
#include "common/common.cuh"

// The 16-bit formats of operands: 11 and 8 bits of mantissa.
enum Half { FLOAT16, BFLOAT16_BITS };

// Two numbers rounded to nearest even; `low` is in the lower half of the word.
template <Half FORMAT> __device__ __forceinline__ uint32_t pack_pair(float low, float high) {
    uint32_t word;
    if (FORMAT == FLOAT16)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// The two float16 numbers of a word.
__device__ __forceinline__ void unpack_float16(uint32_t word, float &low, float &high) {
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(low), "=f"(high) : "r"(word));
}

__device__ __forceinline__ unsigned shared_address(const void *at) { return (unsigned)__cvta_generic_to_shared(at); }

// Loads four matrices of 8 rows x 16 bytes. Lane l gives the address of row l % 8 of matrix l / 8. Of matrix i, lane (g, c) gets
// the numbers 2c and 2c + 1 of row g, or if TRANSPOSED the number g of rows 2c and 2c + 1.
template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(uint32_t (&words)[4], unsigned address) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address) : "memory");
}

// Loads two such matrices. Lanes 0 to 15 give the addresses.
template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(uint32_t (&words)[2], unsigned address) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
            : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
            : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
}

// Stores four such matrices: lane (g, c) has the numbers 2c and 2c + 1 of row g of each. Lane 8 i + r has the address of row r of
// matrix i. Compute capability 9.0.
__device__ __forceinline__ void store_matrices(char *row, const uint32_t *words) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(words[0]),
        "r"(words[1]), "r"(words[2]), "r"(words[3])
        : "memory");
}

// Transposes a matrix of 8 rows x 8 numbers of 16 bits. Lane (g, c) holds the numbers 2c and 2c + 1 of row g.
__device__ __forceinline__ uint32_t transposed_matrix(uint32_t words) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(words));
    return words;
}

// c += a b.
template <Half FORMAT>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (FORMAT == FLOAT16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x rounded to tf32 (11 bits of mantissa), to nearest.
__device__ __forceinline__ uint32_t tf32_bits(float x) {
    uint32_t word;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
    return word;
}

// c += a b by m16n8k8 in tf32. A: row g at k = c, row g + 8 at k = c, then the same rows at k = c + 4. B: column g at k = c and c + 4.
__device__ __forceinline__ void multiply_add_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
