// Hopper's own way to multiply, which compiles for sm_90a alone: four warps, a warpgroup, start a product of operands in
// shared memory, and go on; a copy engine brings the operands, and barriers in shared memory say what has arrived.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate" and "mbarrier".
#pragma once
#include "gemm/mma.cuh"

constexpr int WARPGROUP = 4 * WARP;

// Counts what arrives in shared memory; the phases that it goes through have alternating parity, the first one 0.
struct Barrier {
    uint64_t state;

    __device__ __forceinline__ unsigned address() const { return (unsigned)__cvta_generic_to_shared(&state); }

    __device__ __forceinline__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(arrivals));
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address()) : "memory");
    }
    // Arrives, and lets the phase last until so many bytes have been copied too.
    __device__ __forceinline__ void expect(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
    }
    // Waits for the end of a phase of this parity.
    __device__ __forceinline__ void wait(int parity) {
        asm volatile("{\n"
                     ".reg .pred done;\n"
                     "again:\n"
                     "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                     "@!done bra again;\n"
                     "}" ::"r"(address()), "r"(parity) : "memory");
    }
};

// What has been made of barriers and written to shared memory as usual, the engines see after this and a barrier.
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void show_to_matrix_units() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Starts to copy so many neighbouring bytes into shared memory.
template <int BYTES> __device__ __forceinline__ void copy_bulk(char *to, const char *from, Barrier &arrived) {
    constexpr int EACH = 8192; // one copy of all is up to 6% slower
    #pragma unroll
    for (int i = 0; i < BYTES; i += EACH)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
            ::"r"((unsigned)__cvta_generic_to_shared(to + i)), "l"(from + i), "r"(min(EACH, BYTES - i)),
            "r"(arrived.address())
            : "memory");
}

// Matrices of float32 in memory, one behind the other, as the copy engine knows them, with the box that a copy brings: rows
// by 32 columns, 128 bytes whose words are exchanged. It rounds them to tf32 on the way. Rows begin at multiples of 16
// bytes. PTX ISA, "Tensors" and "tensormap.replace".
struct alignas(128) TensorMap {
    uint64_t words[16];

    // By one thread, which may copy from here on.
    __device__ void describe(const float *x, int columns, int rows, int matrices, int rows_of_box) {
        #pragma unroll
        for (uint64_t &word : words) word = 0;
#define SET(FIELD, TYPE, ...) \
    asm volatile("tensormap.replace.tile." FIELD ".global.b1024." TYPE ";" ::"l"(this), __VA_ARGS__ : "memory")
        SET("global_address", "b64 [%0], %1", "l"(x));
        SET("rank", "b32 [%0], %1", "n"(2)); // less one
        SET("box_dim", "b32 [%0], 0, %1", "n"(32));
        SET("box_dim", "b32 [%0], 1, %1", "r"(rows_of_box));
        SET("box_dim", "b32 [%0], 2, %1", "n"(1));
        SET("global_dim", "b32 [%0], 0, %1", "r"(columns));
        SET("global_dim", "b32 [%0], 1, %1", "r"(rows));
        SET("global_dim", "b32 [%0], 2, %1", "r"(matrices));
        SET("global_stride", "b64 [%0], 0, %1", "l"((int64_t)columns * 4));
        SET("global_stride", "b64 [%0], 1, %1", "l"((int64_t)columns * rows * 4));
        SET("element_stride", "b32 [%0], 0, %1", "n"(1));
        SET("element_stride", "b32 [%0], 1, %1", "n"(1));
        SET("element_stride", "b32 [%0], 2, %1", "n"(1));
        SET("elemtype", "b32 [%0], %1", "n"(11));         // tf32
        SET("interleave_layout", "b32 [%0], %1", "n"(0)); // none
        SET("swizzle_mode", "b32 [%0], %1", "n"(3));      // 128 bytes
        SET("fill_mode", "b32 [%0], %1", "n"(0));         // zeros where the matrix has ended
#undef SET
        asm volatile("fence.proxy.tensormap::generic.release.gpu;\n"
                     "fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(this) : "memory");
    }
    // Starts to copy the box that begins there.
    __device__ __forceinline__ void copy(char *to, int column, int row, int matrix, Barrier &arrived) const {
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4}], [%5];"
            ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(this), "r"(column), "r"(row), "r"(matrix),
            "r"(arrived.address())
            : "memory");
    }
};

// Two numbers rounded to float16 in a word, and a word's two as float32.
__device__ __forceinline__ uint32_t rounded_halves(float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ void as_floats(uint32_t word, float &low, float &high) {
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(low), "=f"(high) : "r"(word));
}

// Registers of a thread of a warpgroup, for roles that need few or many: a multiple of 8.
template <int COUNT> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Waits until `threads` threads of the block are here, of those that meet in this place: 1 to 15.
__device__ __forceinline__ void meet(int threads, int place = 1) {
    asm volatile("bar.sync %1, %0;" ::"r"(threads), "r"(place) : "memory");
}

// What a warpgroup has started: begin() before products that use registers, end() after those of a group, finished()
// waits for all but the last GROUPS groups, and until then nobody may touch their sums.
struct Started {
    static __device__ __forceinline__ void begin() {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    }
    static __device__ __forceinline__ void end() {
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
    template <int GROUPS> static __device__ __forceinline__ void finished() {
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
    }
};

// Keeps the compiler from reading sums before they are there: it cannot see what a wait has to do with them.
template <int SUMS> __device__ __forceinline__ void arrived(float (&sums)[SUMS]) {
    #pragma unroll
    for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// Of the sums of 64 rows that a thread of a warpgroup holds: row and column of sum i.
__device__ __forceinline__ int sum_row(int i) {
    return threadIdx.x % WARPGROUP / WARP * 16 + i / 2 % 2 * 8 + threadIdx.x % WARP / 4;
}
__device__ __forceinline__ int sum_column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// Lines of 128 bytes of k in shared memory, eight in 1024 aligned bytes, whose 16-byte words are exchanged: word w of
// line l lies at w ^ l % 8, which spreads the reads of a column over all banks.
__device__ __forceinline__ int exchanged(int line, int word) { return line * 128 + (word ^ line % 8) * 16; }

// The same as wgmma is told: where, 1024 bytes from eight lines to the next, words exchanged. 32 bytes of k further on
// are the descriptor plus NEXT_K.
constexpr int NEXT_K = 2;
__device__ __forceinline__ uint64_t described(const void *lines) {
    return (uint64_t)((unsigned)__cvta_generic_to_shared(lines) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// The other forms in which operands may lie, by the units of the matrix that they consist of, each of eight lines by
// eight k or more, and the bytes from a unit to the next in two directions: see `conv/shifted.cuh`. They may begin at any
// word.
enum Exchange { NOT_EXCHANGED = 0, WITHIN_64_BYTES = 2 };
__device__ __forceinline__ uint64_t described(const void *from, int next, int then, Exchange exchange) {
    return (uint64_t)((unsigned)__cvta_generic_to_shared(from) >> 4) | (uint64_t)(next >> 4) << 16 |
           (uint64_t)(then >> 4) << 32 | (uint64_t)exchange << 62;
}

#define SUMS_4 "%0,%1,%2,%3"
#define SUMS_32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
    "%26,%27,%28,%29,%30,%31"
#define SUMS_36 SUMS_32 ",%32,%33,%34,%35"
#define SUMS_40 SUMS_36 ",%36,%37,%38,%39"
#define SUMS_44 SUMS_40 ",%40,%41,%42,%43"
#define SUMS_48 SUMS_44 ",%44,%45,%46,%47"
#define SUMS_52 SUMS_48 ",%48,%49,%50,%51"
#define SUMS_56 SUMS_52 ",%52,%53,%54,%55"
#define SUMS_60 SUMS_56 ",%56,%57,%58,%59"
#define SUMS_64 SUMS_60 ",%60,%61,%62,%63"
#define SUMS_72 SUMS_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define SUMS_64_MORE \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87," \
    "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108," \
    "%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define THIRTY_TWO(i) EIGHT(i), EIGHT(i + 8), EIGHT(i + 16), EIGHT(i + 24)
#define WGMMA(FORM, SUMS, LEFT, RIGHT, ADD, TURNED, ...)                                       \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                          \
                 "wgmma.mma_async.sync.aligned." FORM " {" SUMS "}, " LEFT ", " RIGHT ", add, 1, 1" TURNED ";\n}" \
                 : __VA_ARGS__ : "l"(a), "l"(b), "r"((int)add))

// Starts sums = (add ? sums : 0) + A B of 64 lines of A, 64 of B, and 32 bytes of k.
template <Kind KIND> __device__ __forceinline__ void start(float (&sums)[32], uint64_t a, uint64_t b, bool add) {
    if (KIND == HALVES)
        WGMMA("m64n64k16.f32.f16.f16", SUMS_32, "%32", "%33", "%34", ", 0, 0", THIRTY_TWO(0));
    else if (KIND == TF32)
        WGMMA("m64n64k8.f32.tf32.tf32", SUMS_32, "%32", "%33", "%34", "", THIRTY_TWO(0));
    else
        WGMMA("m64n64k16.f32.bf16.bf16", SUMS_32, "%32", "%33", "%34", ", 0, 0", THIRTY_TWO(0));
}

// The same of 128 lines of B.
template <Kind KIND> __device__ __forceinline__ void start(float (&sums)[64], uint64_t a, uint64_t b, bool add) {
    if (KIND == HALVES)
        WGMMA("m64n128k16.f32.f16.f16", SUMS_64, "%64", "%65", "%66", ", 0, 0", THIRTY_TWO(0), THIRTY_TWO(32));
    else if (KIND == TF32)
        WGMMA("m64n128k8.f32.tf32.tf32", SUMS_64, "%64", "%65", "%66", "", THIRTY_TWO(0), THIRTY_TWO(32));
    else
        WGMMA("m64n128k16.f32.bf16.bf16", SUMS_64, "%64", "%65", "%66", ", 0, 0", THIRTY_TWO(0), THIRTY_TWO(32));
}

// The same of 144 lines of B.
template <Kind KIND> __device__ __forceinline__ void start(float (&sums)[72], uint64_t a, uint64_t b, bool add) {
    static_assert(KIND == HALVES, "what is needed");
    WGMMA("m64n144k16.f32.f16.f16", SUMS_72, "%72", "%73", "%74", ", 0, 0", THIRTY_TWO(0), THIRTY_TWO(32), EIGHT(64));
}

// The same of 256 lines of B.
template <Kind KIND> __device__ __forceinline__ void start(float (&sums)[128], uint64_t a, uint64_t b, bool add) {
    if (KIND == TF32)
        WGMMA("m64n256k8.f32.tf32.tf32", SUMS_64 "," SUMS_64_MORE, "%128", "%129", "%130", "", THIRTY_TWO(0),
            THIRTY_TWO(32), THIRTY_TWO(64), THIRTY_TWO(96));
    else
        WGMMA("m64n256k16.f32.bf16.bf16", SUMS_64 "," SUMS_64_MORE, "%128", "%129", "%130", ", 0, 0", THIRTY_TWO(0),
            THIRTY_TWO(32), THIRTY_TWO(64), THIRTY_TWO(96));
}

// The same of 96 lines of B, float16 numbers, and of both operands the lines are neighbours in a word, not the k.
__device__ __forceinline__ void start_turned(float (&sums)[48], uint64_t a, uint64_t b, bool add) {
    WGMMA("m64n96k16.f32.f16.f16", SUMS_48, "%48", "%49", "%50", ", 1, 1", THIRTY_TWO(0), EIGHT(32), EIGHT(40));
}

// The same of bfloat16 numbers and 64 to 128 lines of B, as many as there are sums for; of a TURNED operand the lines are
// neighbours in a word, not the k.
#define OF_SUMS(COUNT, FORM, LEFT, RIGHT, ADD, OF_A, OF_B, ...)                                             \
    if constexpr (SUMS == COUNT)                                                                            \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                  \
                     "wgmma.mma_async.sync.aligned." FORM ".f32.bf16.bf16 {" SUMS_##COUNT "}, " LEFT ", "   \
                     RIGHT ", add, 1, 1, " OF_A ", " OF_B ";\n}"                                            \
                     : __VA_ARGS__ : "l"(a), "l"(b), "r"((int)add), "n"((int)TURNED_A), "n"((int)TURNED_B))
template <bool TURNED_A, bool TURNED_B, int SUMS>
__device__ __forceinline__ void start_pieces(float (&sums)[SUMS], uint64_t a, uint64_t b, bool add) {
    static_assert(SUMS % 4 == 0 && SUMS >= 32 && SUMS <= 64, "a multiple of 8 lines");
    OF_SUMS(32, "m64n64k16", "%32", "%33", "%34", "%35", "%36", THIRTY_TWO(0));
    OF_SUMS(36, "m64n72k16", "%36", "%37", "%38", "%39", "%40", THIRTY_TWO(0), FOUR(32));
    OF_SUMS(40, "m64n80k16", "%40", "%41", "%42", "%43", "%44", THIRTY_TWO(0), EIGHT(32));
    OF_SUMS(44, "m64n88k16", "%44", "%45", "%46", "%47", "%48", THIRTY_TWO(0), EIGHT(32), FOUR(40));
    OF_SUMS(48, "m64n96k16", "%48", "%49", "%50", "%51", "%52", THIRTY_TWO(0), EIGHT(32), EIGHT(40));
    OF_SUMS(52, "m64n104k16", "%52", "%53", "%54", "%55", "%56", THIRTY_TWO(0), EIGHT(32), EIGHT(40), FOUR(48));
    OF_SUMS(56, "m64n112k16", "%56", "%57", "%58", "%59", "%60", THIRTY_TWO(0), EIGHT(32), EIGHT(40), EIGHT(48));
    OF_SUMS(60, "m64n120k16", "%60", "%61", "%62", "%63", "%64", THIRTY_TWO(0), EIGHT(32), EIGHT(40), EIGHT(48), FOUR(56));
    OF_SUMS(64, "m64n128k16", "%64", "%65", "%66", "%67", "%68", THIRTY_TWO(0), THIRTY_TWO(32));
}
#undef OF_SUMS

// The same of 32 k and a sparse A: of four neighbouring k at most two are not zero, and A has places for two. `which` of the
// four they are it tells by two bits each: of four lanes that share two rows of sums the first has those of the first 16 k of
// both, the second those of the others. Until the products have ended it must not change. PTX ISA, "Sparse wgmma".
#define OF_SUMS(COUNT, FORM, LEFT, RIGHT, WHICH, ADD, OF_A, OF_B, ...)                                          \
    if constexpr (SUMS == COUNT)                                                                                \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                      \
                     "wgmma.mma_async.sp.sync.aligned." FORM ".f32.bf16.bf16 {" SUMS_##COUNT "}, " LEFT ", "    \
                     RIGHT ", " WHICH ", 0, add, 1, 1, " OF_A ", " OF_B ";\n}"                                 \
                     : __VA_ARGS__                                                                              \
                     : "l"(a), "l"(b), "r"(which), "r"((int)add), "n"((int)TURNED_A), "n"((int)TURNED_B))
template <bool TURNED_A, bool TURNED_B, int SUMS>
__device__ __forceinline__ void start_sparse(
    float (&sums)[SUMS], uint64_t a, uint64_t b, uint32_t which, bool add) {
    static_assert(SUMS == 4 || SUMS == 32 || SUMS == 48 || SUMS == 64, "what is needed");
    OF_SUMS(4, "m64n8k32", "%4", "%5", "%6", "%7", "%8", "%9", FOUR(0));
    OF_SUMS(32, "m64n64k32", "%32", "%33", "%34", "%35", "%36", "%37", THIRTY_TWO(0));
    OF_SUMS(48, "m64n96k32", "%48", "%49", "%50", "%51", "%52", "%53", THIRTY_TWO(0), EIGHT(32), EIGHT(40));
    OF_SUMS(64, "m64n128k32", "%64", "%65", "%66", "%67", "%68", "%69", THIRTY_TWO(0), THIRTY_TWO(32));
}
#undef OF_SUMS
#undef WGMMA
#undef THIRTY_TWO
#undef EIGHT
#undef FOUR
#undef SUMS_64_MORE
#undef SUMS_72
#undef SUMS_64
#undef SUMS_60
#undef SUMS_56
#undef SUMS_52
#undef SUMS_48
#undef SUMS_44
#undef SUMS_40
#undef SUMS_36
#undef SUMS_32
#undef SUMS_4
