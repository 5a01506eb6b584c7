// The warp-level product on tensor cores, by mma.sync (compute capability 8.0 and up).
//
// Lanes are numbered (g, c): g = lane / 4, c = lane % 4. An instruction multiplies 16 x 8 or 16 x 16 elements of A by 8 columns
// of B. Lane (g, c) holds rows g and g + 8 of A, column g of B, and columns 2c and 2c + 1 of these rows of the result. They may
// stand for any rows, columns and k of the warp's tile, if A and B use the same k. Here a lane's rows and columns are
// neighbours, so one access reads or writes several.
#pragma once
#include "gemm/tile.cuh"

// The arithmetic of a product: FMA, or the format of the operands of mma. FP16X2: for WGMMA only (gemm/packed.cuh).
enum MmaKind { FMA, TF32, BFLOAT16, BF16X3, FP64, FP16X2 };

// The format of an operand. COUNT terms add up to the operand. convert() makes two words of each term from DEPTH elements of a row,
// at different k.
template <MmaKind KIND> struct Format;

// Rounded to tf32 (11 bits), to nearest even.
template <> struct Format<TF32> {
    typedef uint32_t Word;
    static constexpr int DEPTH = 2, COUNT = 1;
    static __device__ __forceinline__ Word rounded(float x) {
#if __CUDA_ARCH__ >= 900
        Word word;
        asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
        return word;
#else
        const Word bits = __float_as_uint(x);
        return x == x ? (bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000 : bits;
#endif
    }
    static __device__ __forceinline__ void convert(const T (&x)[DEPTH], Word (&words)[COUNT][2]) {
        words[0][0] = rounded(x[0]);
        words[0][1] = rounded(x[1]);
    }
};

// Rounded to bfloat16 (8 bits), to nearest even.
template <> struct Format<BFLOAT16> {
    typedef uint32_t Word;
    static constexpr int DEPTH = 4, COUNT = 1;
    static __device__ __forceinline__ Word packed(float low, float high) {
        Word word = 0;
#if __CUDA_ARCH__ >= 800
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
        return word;
    }
    static __device__ __forceinline__ void convert(const T (&x)[DEPTH], Word (&words)[COUNT][2]) {
        words[0][0] = packed(x[0], x[1]);
        words[0][1] = packed(x[2], x[3]);
    }
};

// The sum of three bfloat16 terms; each is the remainder rounded to nearest. They hold all 24 bits of a float32 of at least
// 2^-110; below, the last term underflows. Infinity and NaN become NaN: see recompute_non_finite().
template <> struct Format<BF16X3> {
    typedef uint32_t Word;
    static constexpr int DEPTH = 4, COUNT = 3;
    static __device__ __forceinline__ void convert(const T (&x)[DEPTH], Word (&words)[COUNT][2]) {
        #pragma unroll
        for (int j = 0; j < 2; j++) {
            float low = x[2 * j], high = x[2 * j + 1];
            #pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const Word word = words[i][j] = Format<BFLOAT16>::packed(low, high);
                low = __fsub_rn(low, __uint_as_float(word << 16)); // exact
                high = __fsub_rn(high, __uint_as_float(word & 0xffff0000));
            }
        }
    }
};

template <> struct Format<FP64> {
    typedef double Word;
    static constexpr int DEPTH = 2, COUNT = 1;
    static __device__ __forceinline__ void convert(const T (&x)[DEPTH], Word (&words)[COUNT][2]) {
        words[0][0] = x[0];
        words[0][1] = x[1];
    }
};

// c += a b. a: rows g and g + 8 for the first half of k, then for the second; c: columns 2c and 2c + 1 of row g, then of
// row g + 8.
template <MmaKind KIND> __device__ __forceinline__ void multiply_add(
    float &c0, float &c1, float &c2, float &c3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
    uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    if (KIND == TF32)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    __trap(); // no candidate on such a device
#endif
}

template <MmaKind KIND> __device__ __forceinline__ void multiply_add(
    double &c0, double &c1, double &c2, double &c3, double a0, double a1, double a2, double a3, double b0, double b1) {
#if __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+d"(c0), "+d"(c1), "+d"(c2), "+d"(c3)
        : "d"(a0), "d"(a1), "d"(a2), "d"(a3), "d"(b0), "d"(b1));
#elif __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(c0), "+d"(c1) : "d"(a0), "d"(b0));
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(c2), "+d"(c3) : "d"(a1), "d"(b0));
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(c0), "+d"(c1) : "d"(a2), "d"(b1));
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(c2), "+d"(c3) : "d"(a3), "d"(b1));
#else
    __trap();
#endif
}

// A WarpOp, see Fma in gemm/tile.cuh. MAX_M, MAX_N: maximum of neighbouring rows of A and columns of B in a lane. K_MAJOR_A,
// K_MAJOR_B: the panel is stored [m][k] or [n][k]; a lane then holds single rows or columns.
template <int WM_, int WN_, MmaKind KIND_, int MAX_M = VECTOR, int MAX_N = VECTOR, bool K_MAJOR_A_ = false,
    bool K_MAJOR_B_ = false>
struct Mma {
    static constexpr MmaKind KIND = KIND_;
    static constexpr bool KEEPS_NON_FINITE = KIND != BF16X3, PREFETCH = true;
    typedef Format<KIND> Of;
    typedef typename Of::Word Word;
    static constexpr int WM = WM_, WN = WN_, DEPTH = Of::DEPTH, STEP = 4 * DEPTH; // STEP: K of an instruction
    static constexpr int TM = WM / 8, TN = WN / 4, COLUMNS = WN / 8; // COLUMNS: columns of B in a lane
    static constexpr int CHUNK_M = TM < MAX_M ? TM : MAX_M, CHUNK_N = COLUMNS < MAX_N ? COLUMNS : MAX_N;
    static_assert(WM % 16 == 0 && WN % 8 == 0, "the warp's tile is whole mma tiles");

    // The eight lanes with one c hold eight chunks of rows of A and columns of B. Their order and the padding of panels
    // avoid bank conflicts for reads of [k][m]; the chunks of the result in the four lanes of a row are neighbours.
    static constexpr bool K_MAJOR_A = K_MAJOR_A_, K_MAJOR_B = K_MAJOR_B_;
    static constexpr bool WIDE_M = MAX_M == VECTOR, WIDE_N = MAX_N == VECTOR;
    static constexpr int PAD_A = WIDE_M ? VECTOR : 8, PAD_B = WIDE_N ? VECTOR : 8;
    static __device__ __forceinline__ int lane_c() { return threadIdx.x % 4; }
    template <bool WIDE> static __device__ __forceinline__ int chunk() {
        const int g = threadIdx.x % WARP / 4;
        return WIDE ? g / 2 + g % 2 * 4 : g;
    }
    static __device__ __forceinline__ int row(int i) {
        return (i / CHUNK_M * 8 + chunk<WIDE_M>()) * CHUNK_M + i % CHUNK_M;
    }
    static __device__ __forceinline__ int column(int j) {
        const int half = j / CHUNK_N % 2;
        const int at = WIDE_N ? lane_c() + half * 4 : lane_c() * 2 + half;
        return (j / (2 * CHUNK_N) * 8 + at) * CHUNK_N + j % CHUNK_N;
    }
    // The column of B, as row() for A.
    static __device__ __forceinline__ int column_b(int j) {
        return (j / CHUNK_N * 8 + chunk<WIDE_N>()) * CHUNK_N + j % CHUNK_N;
    }

    // This lane's elements for one step, before the conversion.
    struct Fragments {
        T a[DEPTH][TM], b[DEPTH][COLUMNS];

        // From the warp's panels, at the first k of the step.
        template <int ROW_A, int ROW_B> __device__ __forceinline__ void read(const T *panel_a, const T *panel_b) {
            read_rows<K_MAJOR_A, CHUNK_M, ROW_A>(a, panel_a, row(0));
            read_rows<K_MAJOR_B, CHUNK_N, ROW_B>(b, panel_b, column_b(0));
        }

      private:
        template <bool K_MAJOR, int CHUNK, int ROW, int ROWS> static __device__ __forceinline__ void read_rows(
            T (&to)[DEPTH][ROWS], const T *from, int first) {
            from += K_MAJOR ? first * ROW + lane_c() : lane_c() * ROW + first;
            #pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                if (K_MAJOR) {
                    static_assert(!K_MAJOR || CHUNK == 1, "larger chunks have bank conflicts");
                    #pragma unroll
                    for (int j = 0; j < ROWS; j++) to[i][j] = from[8 * j * ROW + 4 * i];
                } else {
                    ::read<ROWS, CHUNK, 8 * CHUNK>(to[i], from + 4 * i * ROW);
                }
            }
        }
    };

    // The fragments in the format of the instruction.
    struct Operands {
        Word a[Of::COUNT][2][TM], b[Of::COUNT][2][COLUMNS];

        __device__ __forceinline__ Operands(const Fragments &fragments) {
            convert(fragments.a, a);
            convert(fragments.b, b);
        }

      private:
        template <int ROWS> static __device__ __forceinline__ void convert(
            const T (&from)[DEPTH][ROWS], Word (&to)[Of::COUNT][2][ROWS]) {
            #pragma unroll
            for (int i = 0; i < ROWS; i++) {
                T x[DEPTH];
                #pragma unroll
                for (int d = 0; d < DEPTH; d++) x[d] = from[d][i];
                Word words[Of::COUNT][2];
                Of::convert(x, words);
                #pragma unroll
                for (int p = 0; p < Of::COUNT; p++) {
                    to[p][0][i] = words[p][0];
                    to[p][1][i] = words[p][1];
                }
            }
        }
    };

    // sums += the product of one step.
    static __device__ __forceinline__ void multiply_step(T (&sums)[TM][TN], const Operands &operands) {
        multiply_step(sums, sums, operands);
    }

    // The same; products of low-order terms are added to `low`, if that is not `sums`.
    static __device__ __forceinline__ void multiply_step(
        T (&sums)[TM][TN], T (&low)[TM][TN], const Operands &operands) {
        const auto &a = operands.a;
        const auto &b = operands.b;
        #pragma unroll
        for (int i = 0; i < TM; i += 2) {
            #pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const int first = j / CHUNK_N * (2 * CHUNK_N) + j % CHUNK_N, next = first + CHUNK_N;
                const auto add = [&](T(&c)[4], int p, int q) {
                    multiply_add<KIND>(c[0], c[1], c[2], c[3], a[p][0][i], a[p][0][i + 1], a[p][1][i], a[p][1][i + 1],
                        b[q][0][j], b[q][1][j]);
                };
                const auto get = [&](const T(&of)[TM][TN], T(&c)[4]) {
                    c[0] = of[i][first], c[1] = of[i][next], c[2] = of[i + 1][first], c[3] = of[i + 1][next];
                };
                const auto put = [&](T(&of)[TM][TN], const T(&c)[4]) {
                    of[i][first] = c[0], of[i][next] = c[1], of[i + 1][first] = c[2], of[i + 1][next] = c[3];
                };
                T c[4];
                get(sums, c);
                if (Of::COUNT == 1) {
                    add(c, 0, 0);
                } else {
                    // Tensor cores truncate when they add. So they sum the leading products, which are exact, alone, and a
                    // float32 addition adds the running sum.
                    const bool separate = &sums != &low;
                    T small[4] = {}, large[4] = {};
                    if (separate) get(low, small);
                    #pragma unroll
                    for (int size = Of::COUNT - 1; size > 0; size--) { // products below 2^-24 are omitted
                        #pragma unroll
                        for (int p = 0; p <= size; p++) add(small, p, size - p);
                    }
                    add(large, 0, 0);
                    if (separate) put(low, small);
                    #pragma unroll
                    for (int h = 0; h < 4; h++) c[h] += separate ? large[h] : large[h] + small[h];
                }
                put(sums, c);
            }
        }
    }
};

// The WarpOp of a kind for panels in shared memory. TF32 converts in place, so a lane's chunk holds one instruction's elements.
template <int WM, int WN, int KIND, bool K_MAJOR_A = false, bool K_MAJOR_B = false> struct WarpMma {
    static constexpr int MAX_M = K_MAJOR_A ? 1 : KIND == TF32 ? 2 : VECTOR;
    static constexpr int MAX_N = K_MAJOR_B || KIND == TF32 ? 1 : VECTOR;
    typedef Mma<WM, WN, (MmaKind)KIND, MAX_M, MAX_N, K_MAJOR_A, K_MAJOR_B> type;
};
template <int WM, int WN, bool K_MAJOR_A, bool K_MAJOR_B> struct WarpMma<WM, WN, FMA, K_MAJOR_A, K_MAJOR_B> {
    typedef Fma<WM, WN> type;
};
