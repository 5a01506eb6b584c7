// The unit of products on the matrix units, by mma.sync (compute capability 8.0 and up).
//
// The lanes of a warp count as (g, c): g = lane / 4, c = lane % 4. An instruction multiplies 16 x 8 or 16 x 16 numbers
// of A with 8 columns of B; lane (g, c) holds rows g and g + 8 of A, column g of B, and of the result columns 2c and
// 2c + 1 of its rows. Which rows, columns and k of the warp's tile stand for those is free, as long as A and B agree
// about k: here such that a lane's rows and columns are neighbours, which one access reads or writes.
#pragma once
#include "gemm/fma.cuh"

// A fused multiply-add; the formats of the operands below; and two float16 numbers (gemm/packed.cuh).
enum Kind { FUSED, TF32, BFLOAT16, PIECES, DOUBLE, HALVES };

// A format: DEPTH numbers of a row, whose k are apart, become two words of the instruction, in each of COUNT pieces
// whose sum is the operand.
template <Kind KIND> struct Format;

// Rounded to 11 bits, to nearest even.
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

// Rounded to 8 bits, to nearest even.
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

// The sum of three numbers of 8 bits, each the rest rounded to nearest: all 24 bits of a float32 (where it is at least
// 2^-110: the last of smaller ones may lie below what the format can hold). Infinity and NaN become NaN: see `repair`.
template <> struct Format<PIECES> {
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

template <> struct Format<DOUBLE> {
    typedef double Word;
    static constexpr int DEPTH = 2, COUNT = 1;
    static __device__ __forceinline__ void convert(const T (&x)[DEPTH], Word (&words)[COUNT][2]) {
        words[0][0] = x[0];
        words[0][1] = x[1];
    }
};

// c += a b: rows g and g + 8 of each of two ranges of k; columns 2c and 2c + 1 of row g, then of row g + 8.
template <Kind KIND> __device__ __forceinline__ void multiply_add(
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
    __trap(); // no candidate of such a device
#endif
}

template <Kind KIND> __device__ __forceinline__ void multiply_add(
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

// A unit, see Fma in gemm/fma.cuh. MOST_M, MOST_N: how many neighbouring rows of A and columns of B a lane holds at most.
// ALONG_A, ALONG_B: the panel lies as [m][k] or [n][k]; a lane then holds single rows or columns.
template <int WM_, int WN_, Kind KIND_, int MOST_M = VECTOR, int MOST_N = VECTOR, bool ALONG_A_ = false,
    bool ALONG_B_ = false>
struct Mma {
    static constexpr Kind KIND = KIND_;
    static constexpr bool EXACT = KIND != PIECES, AHEAD = true;
    typedef Format<KIND> Of;
    typedef typename Of::Word Word;
    static constexpr int WM = WM_, WN = WN_, DEPTH = Of::DEPTH, STEP = 4 * DEPTH; // STEP: k of an instruction
    static constexpr int TM = WM / 8, TN = WN / 4, COLUMNS = WN / 8; // COLUMNS: of B that a lane holds
    static constexpr int CHUNK_M = TM < MOST_M ? TM : MOST_M, CHUNK_N = COLUMNS < MOST_N ? COLUMNS : MOST_N;
    static_assert(WM % 16 == 0 && WN % 8 == 0, "the warp's tile is made of instructions' tiles");

    // A lane (g, c) has one chunk of eight, of rows of A and of columns of B. Their order and the padding of panels are
    // such that reads of [k][m] meet all banks; wide chunks of the result that the four lanes of a row hold are
    // neighbours.
    static constexpr bool ALONG_A = ALONG_A_, ALONG_B = ALONG_B_;
    static constexpr bool WIDE_M = MOST_M == VECTOR, WIDE_N = MOST_N == VECTOR;
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
    // The column of B, as A's in `row`.
    static __device__ __forceinline__ int column_b(int j) {
        return (j / CHUNK_N * 8 + chunk<WIDE_N>()) * CHUNK_N + j % CHUNK_N;
    }

    // This lane's numbers of STEP k, of all rows and columns.
    struct Numbers {
        T left[DEPTH][TM], right[DEPTH][COLUMNS];

        // a, b: the warp's panels, from the first of these k.
        template <int ROW_A, int ROW_B> __device__ __forceinline__ void read(const T *a, const T *b) {
            read_lines<ALONG_A, CHUNK_M, ROW_A>(left, a, row(0));
            read_lines<ALONG_B, CHUNK_N, ROW_B>(right, b, column_b(0));
        }

      private:
        template <bool ALONG, int CHUNK, int ROW, int LINES> static __device__ __forceinline__ void read_lines(
            T (&to)[DEPTH][LINES], const T *from, int first) {
            from += ALONG ? first * ROW + lane_c() : lane_c() * ROW + first;
            #pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                if (ALONG) {
                    static_assert(!ALONG || CHUNK == 1, "all banks are met by single lines");
                    #pragma unroll
                    for (int j = 0; j < LINES; j++) to[i][j] = from[8 * j * ROW + 4 * i];
                } else {
                    ::read<LINES, CHUNK, 8 * CHUNK>(to[i], from + 4 * i * ROW);
                }
            }
        }
    };

    // The same in the instructions' format.
    struct Operands {
        Word a[Of::COUNT][2][TM], b[Of::COUNT][2][COLUMNS];

        __device__ __forceinline__ Operands(const Numbers &numbers) {
            convert(numbers.left, a);
            convert(numbers.right, b);
        }

      private:
        template <int LINES> static __device__ __forceinline__ void convert(
            const T (&from)[DEPTH][LINES], Word (&to)[Of::COUNT][2][LINES]) {
            #pragma unroll
            for (int i = 0; i < LINES; i++) {
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

    // Adds the product of STEP k.
    static __device__ __forceinline__ void multiply_step(T (&sums)[TM][TN], const Operands &operands) {
        multiply_step(sums, sums, operands);
    }

    // The same; the smaller ones of an operand's pieces are added to `rest`, if that is not `sums`.
    static __device__ __forceinline__ void multiply_step(
        T (&sums)[TM][TN], T (&rest)[TM][TN], const Operands &operands) {
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
                    // The matrix units cut bits off where they add. The largest products, which are exact, meet no
                    // others there, and the sum of all so far is not theirs to add to.
                    const bool apart = &sums != &rest;
                    T small[4] = {}, large[4] = {};
                    if (apart) get(rest, small);
                    #pragma unroll
                    for (int size = Of::COUNT - 1; size > 0; size--) { // smaller products are left out
                        #pragma unroll
                        for (int p = 0; p <= size; p++) add(small, p, size - p);
                    }
                    add(large, 0, 0);
                    if (apart) put(rest, small);
                    #pragma unroll
                    for (int h = 0; h < 4; h++) c[h] += apart ? large[h] : large[h] + small[h];
                }
                put(sums, c);
            }
        }
    }
};

// The unit of a kind for panels in shared memory, which lie as [m][k] or [n][k] where ALONG. The words of the format
// TF32 stay where the numbers were read to, which should be the registers that one instruction takes together.
template <int WM, int WN, int KIND, bool ALONG_A = false, bool ALONG_B = false> struct Multiplier {
    static constexpr int MOST_M = ALONG_A ? 1 : KIND == TF32 ? 2 : VECTOR;
    static constexpr int MOST_N = ALONG_B || KIND == TF32 ? 1 : VECTOR;
    typedef Mma<WM, WN, (Kind)KIND, MOST_M, MOST_N, ALONG_A, ALONG_B> Unit;
};
template <int WM, int WN, bool ALONG_A, bool ALONG_B> struct Multiplier<WM, WN, FUSED, ALONG_A, ALONG_B> {
    typedef Fma<WM, WN> Unit;
};
