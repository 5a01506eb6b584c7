// WGMMA: products of operands in shared memory by a warpgroup (four warps), for sm_90a only. PTX ISA, "Asynchronous
// Warpgroup Level Matrix Multiply-Accumulate Instructions".
//
// The order of calls: wgmma_fence(), wgmma()..., wgmma_commit_group(), wgmma_wait_group<N>(), wgmma_fence_operand().
// Between the first and the last, no code may read or write the accumulators.
#pragma once
#include "gemm/mma.cuh"
#include "sm90/mbarrier.cuh"

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all groups but the last GROUPS.
template <int GROUPS> __device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
// Keeps the compiler from moving reads of accumulators before the wait.
template <int SUMS> __device__ __forceinline__ void wgmma_fence_operand(float (&sums)[SUMS]) {
    #pragma unroll
    for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[i])::"memory");
}
template <int PARTS, int SUMS> __device__ __forceinline__ void wgmma_fence_operand(float (&sums)[PARTS][SUMS]) {
    #pragma unroll
    for (int p = 0; p < PARTS; p++) wgmma_fence_operand(sums[p]);
}

// Row (0 to 63) and column of accumulator register i of this thread.
__device__ __forceinline__ int accumulator_row(int i) {
    return threadIdx.x % WARPGROUP / WARP * 16 + i / 2 % 2 * 8 + threadIdx.x % WARP / 4;
}
__device__ __forceinline__ int accumulator_column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// The 128-byte swizzle: the offset of a 16-byte chunk in rows of 128 bytes that begin at a multiple of 1024 bytes.
__device__ __forceinline__ int swizzle_128b(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }

// The address in a descriptor (PTX ISA, "matrix-descriptor-encode"): the low 18 bits, in units of 16 bytes. In a cluster, higher
// bits hold the rank of the block.
__device__ __forceinline__ uint64_t descriptor_address(const void *at) {
    return ((unsigned)__cvta_generic_to_shared(at) & 0x3ffff) >> 4;
}

// The descriptor of a K-major operand in that swizzle: groups of eight rows are 1024 bytes apart. Add DESCRIPTOR_K_STEP for
// the next 32 bytes of K.
constexpr int DESCRIPTOR_K_STEP = 2;
__device__ __forceinline__ uint64_t smem_descriptor(const void *rows) {
    return descriptor_address(rows) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// The descriptor of another layout, by its leading and stride byte offsets (PTX ISA, "Strides"). `from` is any multiple of
// 16 bytes.
enum Swizzle { NO_SWIZZLE = 0, SWIZZLE_128B = 1, SWIZZLE_64B = 2 };
__device__ __forceinline__ uint64_t smem_descriptor(const void *from, int leading, int stride, Swizzle swizzle) {
    return descriptor_address(from) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)swizzle << 62;
}

// Registers of COUNT accumulators: as operands of the instruction, and as constraints.
#define REGS_4 "%0,%1,%2,%3"
#define REGS_16 REGS_4 ",%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define REGS_32 REGS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGS_36 REGS_32 ",%32,%33,%34,%35"
#define REGS_40 REGS_36 ",%36,%37,%38,%39"
#define REGS_44 REGS_40 ",%40,%41,%42,%43"
#define REGS_48 REGS_44 ",%44,%45,%46,%47"
#define REGS_52 REGS_48 ",%48,%49,%50,%51"
#define REGS_56 REGS_52 ",%52,%53,%54,%55"
#define REGS_60 REGS_56 ",%56,%57,%58,%59"
#define REGS_64 REGS_60 ",%60,%61,%62,%63"
#define REGS_72 REGS_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define REGS_80 REGS_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define REGS_88 REGS_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define REGS_96 REGS_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define REGS_128 REGS_96 ",%96,%97,%98,%99,%100,%101,%102,%103" \
    ",%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define OUT_FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define OUT_EIGHT(i) OUT_FOUR(i), OUT_FOUR(i + 4)
#define OUT_16(i) OUT_EIGHT(i), OUT_EIGHT(i + 8)
#define OUT_32(i) OUT_16(i), OUT_16(i + 16)
#define SUMS_4 OUT_FOUR(0)
#define SUMS_16 OUT_16(0)
#define SUMS_32 OUT_32(0)
#define SUMS_36 SUMS_32, OUT_FOUR(32)
#define SUMS_40 SUMS_36, OUT_FOUR(36)
#define SUMS_44 SUMS_40, OUT_FOUR(40)
#define SUMS_48 SUMS_44, OUT_FOUR(44)
#define SUMS_52 SUMS_48, OUT_FOUR(48)
#define SUMS_56 SUMS_52, OUT_FOUR(52)
#define SUMS_60 SUMS_56, OUT_FOUR(56)
#define SUMS_64 SUMS_60, OUT_FOUR(60)
#define SUMS_72 SUMS_64, OUT_EIGHT(64)
#define SUMS_80 SUMS_72, OUT_EIGHT(72)
#define SUMS_88 SUMS_80, OUT_EIGHT(80)
#define SUMS_96 SUMS_88, OUT_EIGHT(88)
#define SUMS_128 SUMS_96, OUT_32(96)

// A width: the number of accumulators, N = 2 COUNT columns, and the numbers of the operands that follow the accumulators.
#define WGMMA_WIDTHS(CASE) \
    CASE(16, 32, 16, 17, 18, 19, 20) \
    CASE(32, 64, 32, 33, 34, 35, 36) \
    CASE(36, 72, 36, 37, 38, 39, 40) \
    CASE(40, 80, 40, 41, 42, 43, 44) \
    CASE(44, 88, 44, 45, 46, 47, 48) \
    CASE(48, 96, 48, 49, 50, 51, 52) \
    CASE(52, 104, 52, 53, 54, 55, 56) \
    CASE(56, 112, 56, 57, 58, 59, 60) \
    CASE(60, 120, 60, 61, 62, 63, 64) \
    CASE(64, 128, 64, 65, 66, 67, 68) \
    CASE(72, 144, 72, 73, 74, 75, 76) \
    CASE(80, 160, 80, 81, 82, 83, 84) \
    CASE(88, 176, 88, 89, 90, 91, 92) \
    CASE(96, 192, 96, 97, 98, 99, 100) \
    CASE(128, 256, 128, 129, 130, 131, 132)
#define SPARSE_WIDTHS(CASE) \
    CASE(4, 8, 4, 5, 6, 7, 8, 9) \
    CASE(32, 64, 32, 33, 34, 35, 36, 37) \
    CASE(48, 96, 48, 49, 50, 51, 52, 53) \
    CASE(64, 128, 64, 65, 66, 67, 68, 69)

#define WGMMA(INSTRUCTION, COUNT, OPERANDS, P, END, ...)                                                \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #P ", 0;\n"                                  \
                 "wgmma.mma_async" INSTRUCTION " {" REGS_##COUNT "}, " OPERANDS ", add, 1, 1" END ";\n}" \
                 : SUMS_##COUNT : "l"(a), "l"(b), __VA_ARGS__)

// Starts sums = (accumulate ? sums : 0) + A B for 64 rows, N = 2 SUMS columns and 32 bytes of K. An operand is K-major, or
// transposed: then its rows (of A) or columns (of B) are contiguous; tf32 has no transposed ones.
#define CASE(COUNT, N, A, B, P, X, Y)                                                                              \
    if constexpr (SUMS == COUNT) {                                                                                 \
        if constexpr (KIND == TF32)                                                                                \
            WGMMA(".sync.aligned.m64n" #N "k8.f32.tf32.tf32", COUNT, "%" #A ", %" #B, P, "",                       \
                "r"((int)accumulate));                                                                             \
        else if constexpr (KIND == FP16X2)                                                                         \
            WGMMA(".sync.aligned.m64n" #N "k16.f32.f16.f16", COUNT, "%" #A ", %" #B, P, ", %" #X ", %" #Y,         \
                "r"((int)accumulate), "n"((int)TRANS_A), "n"((int)TRANS_B));                                       \
        else                                                                                                       \
            WGMMA(".sync.aligned.m64n" #N "k16.f32.bf16.bf16", COUNT, "%" #A ", %" #B, P, ", %" #X ", %" #Y,       \
                "r"((int)accumulate), "n"((int)TRANS_A), "n"((int)TRANS_B));                                       \
    }
template <MmaKind KIND, bool TRANS_A = false, bool TRANS_B = false, int SUMS>
__device__ __forceinline__ void wgmma(float (&sums)[SUMS], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(SUMS == 128 || SUMS == 96 || SUMS == 88 || SUMS == 80 || SUMS == 72 || SUMS == 16 || (SUMS % 4 == 0 && SUMS >= 32 && SUMS <= 64), "a width of WGMMA_WIDTHS");
    WGMMA_WIDTHS(CASE)
}
#undef CASE

// The same for bfloat16 or float16 (FP16X2) and 16 of K, with A in registers: two neighbours of K a word, in the layout of
// accumulators. So word i of four holds accumulators 2 i and 2 i + 1 of eight.
#define REGISTER_WIDTHS(CASE) \
    CASE(32, 64, 32, 33, 34, 35, 36, 37, 38) \
    CASE(64, 128, 64, 65, 66, 67, 68, 69, 70)
#define OF_TYPE(TYPE, COUNT, N, A0, A1, A2, A3, B, P, Y)                                                              \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #P ", 0;\n"                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS_##COUNT "}, {%" #A0 ", %" #A1 \
                 ", %" #A2 ", %" #A3 "}, %" #B ", add, 1, 1, %" #Y ";\n}"                                            \
                 : SUMS_##COUNT                                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"((int)TRANS_B))
#define CASE(COUNT, N, A0, A1, A2, A3, B, P, Y)                              \
    if constexpr (SUMS == COUNT && KIND == FP16X2)                           \
        OF_TYPE("f16", COUNT, N, A0, A1, A2, A3, B, P, Y);                   \
    else if constexpr (SUMS == COUNT)                                        \
        OF_TYPE("bf16", COUNT, N, A0, A1, A2, A3, B, P, Y);
template <MmaKind KIND, bool TRANS_B, int SUMS>
__device__ __forceinline__ void wgmma_registers(
    float (&sums)[SUMS], const uint32_t *a, uint64_t b, bool accumulate) {
    static_assert(SUMS == 32 || SUMS == 64, "a width of REGISTER_WIDTHS");
    static_assert(KIND == BFLOAT16 || KIND == FP16X2, "a type with 16 bits");
    REGISTER_WIDTHS(CASE)
}
#undef CASE
#undef OF_TYPE
#undef REGISTER_WIDTHS

// The same for a sparse A, in bfloat16 for 32 of K: of four neighbouring k at most two are not 0, and A holds two. `metadata`
// has the index of each, in two bits. In tf32, for 16 of K: of two neighbouring k at most one is not 0, and A holds one; its
// metadata are four bits, the indices of its halves among the four halves of the two. Four lanes share two rows: the first has
// the metadata of the first half of both rows' k, the second of the last half. It must not change before the wait. PTX ISA,
// "Sparse wgmma.mma_async".
#define CASE(COUNT, N, A, B, M, P, X, Y)                                                                           \
    if constexpr (SUMS == COUNT && KIND == TF32)                                                                   \
        WGMMA(".sp.sync.aligned.m64n" #N "k16.f32.tf32.tf32", COUNT, "%" #A ", %" #B ", %" #M ", 0", P, "",        \
            "r"(metadata), "r"((int)accumulate));                                                                  \
    else if constexpr (SUMS == COUNT)                                                                              \
        WGMMA(".sp.sync.aligned.m64n" #N "k32.f32.bf16.bf16", COUNT, "%" #A ", %" #B ", %" #M ", 0", P,            \
            ", %" #X ", %" #Y, "r"(metadata), "r"((int)accumulate), "n"((int)TRANS_A), "n"((int)TRANS_B));
template <MmaKind KIND, bool TRANS_A, bool TRANS_B, int SUMS>
__device__ __forceinline__ void wgmma_sparse(
    float (&sums)[SUMS], uint64_t a, uint64_t b, uint32_t metadata, bool accumulate) {
    static_assert(SUMS == 4 || SUMS == 32 || SUMS == 48 || SUMS == 64, "a width of SPARSE_WIDTHS");
    SPARSE_WIDTHS(CASE)
}
#undef CASE
#undef WGMMA
#undef SPARSE_WIDTHS
#undef WGMMA_WIDTHS
