// Attention on tensor cores by mma.sync: the format of operands, and products of a warp.
//
// An operand is the sum of TERMS 16-bit numbers. Full precision: two float16 numbers of a scaled float32, high and low
// (fp16x2, docs/gpu.md); of their four products, low times low is omitted. tf32: one float16 number, which has the mantissa of
// tf32. bfloat16: one bfloat16 number, not scaled. mma_pack.cu scales and splits q, k, v and the cotangent once. bfloat16 can
// do without: kernels with DIRECT round what they load.
//
// A scale is a power of two for GROUP rows of a head. It brings their largest magnitude to [2^14, 2^15), so numbers down to
// 2^-17 of it keep 22 bits or more, and smaller ones have an error of 2^-40 of it. Probabilities are scaled by 2^14. Gradients
// of scores are computed in registers; each row of a tile has a scale of its own. Infinity and NaN make their group NaN.
//
// Tensor cores truncate when they add. So they sum over at most 64 numbers, low-order products first, and float32 additions
// add up the results.
//
// A warp computes ROWS rows of the result. Macros: ROWS, WARPS, OTHERS (rows of each tile that the block loops over),
// STAGES (tiles in shared memory), DIRECT (0 or 1), and those of attention.cuh.
#pragma once
#include "attention/attention.cuh"
#include "common/common.cuh"
#include "common/rounding.cuh"

constexpr Half FORMAT = MANTISSA > 7 ? FLOAT16 : BFLOAT16_BITS;
constexpr int TERMS = MANTISSA > 10 ? 2 : 1, GROUP = 64, SUM_LENGTH = 64;
constexpr int PADDED = (WIDTH + 15) / 16 * 16;                       // the width of packed rows
constexpr int STRIDE = PADDED + 8;                                   // elements between rows in shared memory
constexpr float PROBABILITY = FORMAT == FLOAT16 ? 1 << 14 : 1;       // the scale of probabilities
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f, SMALLEST = 1.17549435e-38f;

#ifdef ROWS
constexpr int THREADS = WARPS * WARP, NUMBERS = OTHERS * sizeof(float), BLOCK = WARPS * ROWS; // BLOCK: rows of the result that a block computes
constexpr int M = ROWS / 16, LANE_ROWS = ROWS / 8;          // LANE_ROWS: rows of the result of which a lane has columns
__device__ __forceinline__ int warp() { return threadIdx.x / WARP; }
__device__ __forceinline__ int lane_g() { return threadIdx.x % WARP / 4; }
__device__ __forceinline__ int lane_c() { return threadIdx.x % 4; }
#endif

__device__ __forceinline__ int64_t padded_length(int64_t length) { return (length + GROUP - 1) / GROUP * GROUP; }

// The rows of a head in an array.
struct Rows {
    const T *from;
    int64_t stride;
    int length;

    __device__ __forceinline__ const T *row(int i) const { return i < length ? from + i * stride : nullptr; }
    __device__ __forceinline__ float inverse(int row) const { return 1; }
};

// Packed rows: an array is [head][row][term][PADDED], padded with zeros, and the inverse of the scale of each GROUP.
struct Packed {
    uint16_t *numbers;
    float *inverses;
    int length; // with padding

    __device__ __forceinline__ float inverse(int row) const { return inverses[row / GROUP]; }
};

// What mma_pack.cu leaves in scratch: groups of packed rows of all operands, one after another, and the inverses of their scales.
// For the gradient shifts: -log2(sum of exponentials) of each query; deltas: its sum of cotangent times output.
struct Scratch {
    typedef uint16_t Group[GROUP * TERMS * PADDED];
    Group *groups;
    float *inverses, *shifts, *deltas;
    int64_t taken = 0; // groups of the operands before

    __device__ __forceinline__ Scratch(char *scratch, int64_t batch, int64_t queries, int64_t keys) {
        const int64_t q = batch * padded_length(queries) / GROUP, k = batch * padded_length(keys) / GROUP;
        groups = SCRATCH_GROUPS(Group, scratch, q, k), inverses = SCRATCH_INVERSES(float, scratch, q, k);
        shifts = SCRATCH_SHIFTS(float, scratch, q, k), deltas = SCRATCH_DELTAS(float, scratch, q, k);
    }
};

// The next packed operand, of rows `from`. With DIRECT, `from` itself.
#if DIRECT
typedef Rows Operand;
__device__ __forceinline__ Operand operand_of(const Rows &from, Scratch &scratch, int64_t batch, int64_t head) { return from; }
#else
typedef Packed Operand;
__device__ __forceinline__ Operand operand_of(const Rows &from, Scratch &scratch, int64_t batch, int64_t head) {
    const int64_t length = padded_length(from.length), own = scratch.taken + head * (length / GROUP);
    scratch.taken += batch * (length / GROUP);
    return {scratch.groups[own], scratch.inverses + own, (int)length};
}
#endif

// The terms of eight neighbouring elements, times a factor.
__device__ __forceinline__ void split_eight(const float (&x)[8], float factor, Vector<uint32_t, 4> (&terms)[TERMS]) {
    #pragma unroll
    for (int h = 0; h < 4; h++) {
        uint32_t found[TERMS];
        split_terms<FORMAT>(x[2 * h] * factor, x[2 * h + 1] * factor, found);
        #pragma unroll
        for (int t = 0; t < TERMS; t++) terms[t].lane[h] = found[t];
    }
}

// Eight neighbouring elements of a row, from `column` on; zeros past its end, and where `row` is null.
__device__ __forceinline__ void load_eight(const T *row, int column, float (&x)[8]) {
    #pragma unroll
    for (int h = 0; h < 8; h += 4) {
        if constexpr (WIDTH % 4 == 0) {
            const Vector<T, 4> four = row && column + h < WIDTH ? load<T, 4>(row + column + h) : Vector<T, 4>{};
            #pragma unroll
            for (int j = 0; j < 4; j++) x[h + j] = four.lane[j];
        } else {
            #pragma unroll
            for (int j = 0; j < 4; j++) x[h + j] = row && column + h + j < WIDTH ? row[column + h + j] : 0;
        }
    }
}

#ifdef ROWS

// A tile of COUNT rows in shared memory: [term][position][STRIDE]. Fragments are loaded from neighbouring positions. ORDER
// gives the row at a position, and so the rows that a lane has.
template <int COUNT> struct Tile {
    static constexpr int TERM = COUNT * STRIDE * sizeof(uint16_t), BYTES = TERMS * TERM;
};

// The copy of COUNT rows to a tile. start() begins it, other work may overlap, and finish() completes it after
// cp_async_wait_group.
template <int COUNT, typename ORDER> struct Copy {
    static constexpr int CHUNKS = PADDED / 8;
#if DIRECT
    static constexpr int ALL = COUNT * CHUNKS, MINE = (ALL + THREADS - 1) / THREADS;
    float held[MINE][8];

    __device__ __forceinline__ void start(const Operand &from, int first, unsigned char *tile) {
        #pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int chunk = threadIdx.x + i * THREADS, row = first + ORDER()(chunk / CHUNKS), column = chunk % CHUNKS * 8;
            load_eight(chunk < ALL ? from.row(row) : nullptr, column, held[i]);
        }
    }
    __device__ __forceinline__ void finish(unsigned char *tile) const {
        #pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int chunk = threadIdx.x + i * THREADS;
            Vector<uint32_t, 4> terms[TERMS];
            split_eight(held[i], 1, terms);
            if (chunk < ALL) store((uint32_t *)tile, (chunk / CHUNKS * STRIDE + chunk % CHUNKS * 8) / 2, terms[0]);
        }
    }
#else
    __device__ __forceinline__ void start(const Operand &from, int first, unsigned char *tile) const {
        #pragma unroll 4
        for (int i = threadIdx.x; i < TERMS * COUNT * CHUNKS; i += THREADS) {
            const int position = i / (TERMS * CHUNKS), at = i % (TERMS * CHUNKS), term = at / CHUNKS;
            const int to = (term * COUNT + position) * STRIDE + at % CHUNKS * 8, row = first + ORDER()(position);
            // A tile of more than GROUP rows may end after the last group.
            cp_async<16>((uint16_t *)tile + to, from.numbers + (int64_t)row * (TERMS * PADDED) + at * 8,
                COUNT <= GROUP || row < from.length);
        }
    }
    __device__ __forceinline__ void finish(unsigned char *tile) const {}
#endif
};

// The order of rows that are columns of the scores: of each 16, a lane has four neighbouring ones.
struct ColumnOrder {
    __device__ __forceinline__ int operator()(int i) const { return i / 16 * 16 + i % 8 / 2 * 4 + i % 16 / 8 * 2 + i % 2; }
};
// The order of rows of the result: a lane has LANE_ROWS neighbouring ones.
struct RowOrder {
    __device__ __forceinline__ int operator()(int i) const { return i / ROWS * ROWS + i % 8 * LANE_ROWS + i % ROWS / 8; }
};

// Copies the block's own BLOCK rows to a tile.
__device__ __forceinline__ void copy_own(const Operand &from, int first, unsigned char *tile) {
    Copy<BLOCK, RowOrder> copy;
    copy.start(from, first, tile);
    copy.finish(tile);
}

// Scales, splits and stores the block's own rows, which are not packed, times `sign`. Each warp has a scale of its own; returns
// its inverse.
__device__ __forceinline__ float split_own(const Rows &from, int first, float sign, unsigned char *tile) {
    constexpr int CHUNKS = PADDED / 8;
    const int own = warp() * ROWS;
    float x[8], largest = 0;
    if (FORMAT == FLOAT16) {
        #pragma unroll 2
        for (int i = threadIdx.x % WARP; i < ROWS * CHUNKS; i += WARP) {
            load_eight(from.row(first + own + i / CHUNKS), i % CHUNKS * 8, x);
            #pragma unroll
            for (int h = 0; h < 8; h++) largest = Max::of(largest, fabsf(x[h]));
        }
        largest = over_lanes<Max, WARP>(largest);
    }
    const Scale scale(largest);
    const float factor = FORMAT == FLOAT16 ? scale.factor * sign : sign;
    #pragma unroll 2
    for (int i = threadIdx.x % WARP; i < ROWS * CHUNKS; i += WARP) {
        const int position = own + i / CHUNKS;
        load_eight(from.row(first + RowOrder()(position)), i % CHUNKS * 8, x);
        Vector<uint32_t, 4> terms[TERMS];
        split_eight(x, factor, terms);
        #pragma unroll
        for (int t = 0; t < TERMS; t++)
            store((uint32_t *)(tile + t * Tile<BLOCK>::TERM), (position * STRIDE + i % CHUNKS * 8) / 2, terms[t]);
    }
    return FORMAT == FLOAT16 ? scale.inverse : 1.0f;
}

// The row of the block at (m, half) of a lane, with RowOrder. The column of a tile at (n, half), with ColumnOrder.
__device__ __forceinline__ int lane_row(int m, int half) { return warp() * ROWS + lane_g() * LANE_ROWS + m * 2 + half; }
__device__ __forceinline__ int lane_column(int n, int half) { return n / 2 * 16 + lane_c() * 4 + n % 2 * 2 + half; }

// What load_matrices adds to the address of a tile for this lane: for A, rows by k; for B, columns by k or k by columns.
__device__ __forceinline__ unsigned address_a(const unsigned char *tile, int row) {
    const int lane = threadIdx.x % WARP;
    return shared_address(tile) + ((row + lane % 16) * STRIDE + lane / 16 * 8) * sizeof(uint16_t);
}
__device__ __forceinline__ unsigned address_b(const unsigned char *tile) {
    const int lane = threadIdx.x % WARP;
    return shared_address(tile) + ((lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8) * sizeof(uint16_t);
}
__device__ __forceinline__ unsigned address_b_transposed(const unsigned char *tile, int column) {
    const int lane = threadIdx.x % WARP;
    return shared_address(tile) + (lane % 16 * STRIDE + lane / 16 * 8 + column) * sizeof(uint16_t);
}
__device__ __forceinline__ constexpr unsigned bytes_at(int row, int column) {
    return (row * STRIDE + column) * sizeof(uint16_t);
}

// c += a b for 16 columns, low-order products first.
__device__ __forceinline__ void multiply_terms(
    float (&c)[M][2][4], const uint32_t (&a)[TERMS][M][4], const uint32_t (&b)[TERMS][4]) {
    #pragma unroll
    for (int product = TERMS == 2 ? 0 : 2; product < 3; product++) {
        const int of_a = product == 0, of_b = product == 1;
        #pragma unroll
        for (int m = 0; m < M; m++)
            #pragma unroll
            for (int n = 0; n < 2; n++) multiply_add<FORMAT>(c[m][n], a[of_a][m], b[of_b][2 * n], b[of_b][2 * n + 1]);
    }
}

// sums = a times the transpose of b: this warp's rows of a tile of BLOCK rows, and all rows of a tile of OTHERS.
__device__ __forceinline__ void row_products(const unsigned char *a, const unsigned char *b, float (&sums)[OTHERS / 16][M][2][4]) {
    const unsigned from_a = address_a(a, warp() * ROWS), from_b = address_b(b);
    #pragma unroll
    for (int first = 0; first < PADDED; first += SUM_LENGTH) {
        float part[OTHERS / 16][M][2][4] = {};
        #pragma unroll
        for (int k = first; k < first + SUM_LENGTH && k < PADDED; k += 16) {
            uint32_t left[TERMS][M][4];
            #pragma unroll
            for (int t = 0; t < TERMS; t++)
                #pragma unroll
                for (int m = 0; m < M; m++)
                    load_matrices<false>(left[t][m], from_a + t * Tile<BLOCK>::TERM + bytes_at(16 * m, k));
            #pragma unroll
            for (int n = 0; n < OTHERS / 16; n++) {
                uint32_t right[TERMS][4];
                #pragma unroll
                for (int t = 0; t < TERMS; t++)
                    load_matrices<false>(right[t], from_b + t * Tile<OTHERS>::TERM + bytes_at(16 * n, k));
                multiply_terms(part[n], left, right);
            }
        }
        #pragma unroll
        for (int n = 0; n < OTHERS / 16; n++)
            #pragma unroll
            for (int m = 0; m < M; m++)
                #pragma unroll
                for (int x = 0; x < 8; x++) {
                    float &sum = sums[n][m][x / 4][x % 4];
                    sum = first == 0 ? part[n][m][x / 4][x % 4] : sum + part[n][m][x / 4][x % 4];
                }
    }
}

// Scores as the operand A of a product over OTHERS.
struct Weights {
    uint32_t terms[OTHERS / 16][TERMS][M][4];

    // The scores times a factor.
    __device__ __forceinline__ Weights(const float (&x)[OTHERS / 16][M][2][4], float factor) {
        #pragma unroll
        for (int k = 0; k < OTHERS / 16; k++)
            #pragma unroll
            for (int m = 0; m < M; m++)
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    uint32_t found[TERMS];
                    split_terms<FORMAT>(x[k][m][i / 2][i % 2 * 2] * factor, x[k][m][i / 2][i % 2 * 2 + 1] * factor, found);
                    #pragma unroll
                    for (int t = 0; t < TERMS; t++) terms[k][t][m][i] = found[t];
                }
    }
};

// sums = sums keep + (weights tile) factor, for COLUMNS columns of a tile from `column` on. `keep` and `factor` are of the
// lane's rows.
template <int COLUMNS>
__device__ __forceinline__ void add_products(const Weights &weights, const unsigned char *tile, int column,
    float (&sums)[COLUMNS / 16][M][2][4], const float (&keep)[LANE_ROWS], const float (&factor)[LANE_ROWS]) {
    const unsigned from = address_b_transposed(tile, column);
    #pragma unroll
    for (int n = 0; n < COLUMNS / 16; n++) {
        float part[M][2][4] = {};
        uint32_t high[OTHERS / 16][4];
        #pragma unroll
        for (int k = 0; k < OTHERS / 16; k++) {
            load_matrices<true>(high[k], from + bytes_at(16 * k, 16 * n));
            if constexpr (TERMS == 2) {
                uint32_t low[4];
                load_matrices<true>(low, from + Tile<OTHERS>::TERM + bytes_at(16 * k, 16 * n));
                #pragma unroll
                for (int m = 0; m < M; m++)
                    #pragma unroll
                    for (int i = 0; i < 2; i++) {
                        multiply_add<FORMAT>(part[m][i], weights.terms[k][1][m], high[k][2 * i], high[k][2 * i + 1]);
                        multiply_add<FORMAT>(part[m][i], weights.terms[k][0][m], low[2 * i], low[2 * i + 1]);
                    }
            }
        }
        #pragma unroll
        for (int k = 0; k < OTHERS / 16; k++)
            #pragma unroll
            for (int m = 0; m < M; m++)
                #pragma unroll
                for (int i = 0; i < 2; i++)
                    multiply_add<FORMAT>(part[m][i], weights.terms[k][0][m], high[k][2 * i], high[k][2 * i + 1]);
        #pragma unroll
        for (int m = 0; m < M; m++)
            #pragma unroll
            for (int i = 0; i < 2; i++)
                #pragma unroll
                for (int h = 0; h < 4; h++) {
                    const int row = 2 * m + h / 2;
                    sums[n][m][i][h] = fma(part[m][i][h], factor[row], sums[n][m][i][h] * keep[row]);
                }
    }
}

// Stores this warp's rows of the result, `first` + lane_row() of `rows`, times a factor; `column`: the first of COLUMNS.
template <int COLUMNS>
__device__ __forceinline__ void store_rows(float *to, int64_t stride, int64_t first, int64_t rows, int column,
    const float (&sums)[COLUMNS / 16][M][2][4], const float (&factor)[LANE_ROWS]) {
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t row = first + lane_row(m, half);
            if (row >= rows) continue;
            #pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++) {
                const float(&pair)[4] = sums[n / 2][m][n % 2];
                const int at = column + 8 * n + 2 * lane_c();
                const float x = pair[2 * half] * factor[2 * m + half], y = pair[2 * half + 1] * factor[2 * m + half];
                if (WIDTH % 2 == 0) {
                    if (at < WIDTH) store(to, row * stride + at, Vector<float, 2>{x, y});
                } else {
                    if (at < WIDTH) to[row * stride + at] = x;
                    if (at + 1 < WIDTH) to[row * stride + at + 1] = y;
                }
            }
        }
}

// Which of four neighbouring keys dropout keeps for a query.
__device__ __forceinline__ void keeps_four(const Head &head, int64_t query, int64_t key, bool (&keep)[4]) {
    const uint64_t element = ((uint64_t)head.number * head.queries + query) * head.keys + key;
    uint32_t words[4];
    philox(head.rng, head.stream, (uint32_t)(element / 4), words);
    const int offset = element % 4;
    if (offset != 0) {
        uint32_t next[4];
        philox(head.rng, head.stream, (uint32_t)(element / 4 + 1), next);
        #pragma unroll
        for (int step = 2; step > 0; step /= 2) { // moves the words by `offset`
            if (offset & step) {
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    words[i] = i + step < 4 ? words[i + step] : next[i + step - 4];
                }
                #pragma unroll
                for (int i = 0; i + step < 4; i++) next[i] = next[i + step];
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < 4; i++) keep[i] = (float)(words[i] >> 8) * (float)(1.0 / (1 << 24)) >= head.dropout;
}

#endif
