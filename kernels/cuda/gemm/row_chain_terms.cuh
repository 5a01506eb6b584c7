// Chains of rows whose factors of products are stored as terms, so that each number is split once (see gemm/row_chain.cuh for the
// other way). A number is the sum of three bfloat16 terms, which hold its 24 bits (bf16x3), and six of the nine products of terms
// are added. Tensor cores truncate sums. So they add 16 products of first terms, which have 16 bits each; float32 adds these. The
// other products are added to an accumulator of their own, which is small.
//
// A value in terms is three matrices [ROWS][N], one for each term; N is a multiple of 8. A row is chunks of 16 bytes, which are
// exchanged by the row, so that eight rows of a chunk lie in different banks. Columns from the width of the value on are zeros.
// Values of at most 4 columns are rows of floats.
#pragma once
#include "gemm/row_chain.cuh"

namespace row_terms {

constexpr int TERMS = 3, INLINE = 4;

// The bytes of a term, and where a number is in it.
template <int ROWS, int N> constexpr int SIZE = ROWS * N * 2;
template <int N> __device__ __forceinline__ int place(int row, int column) {
    constexpr int CHUNKS = N / 8, EXCHANGED = CHUNKS % 8 == 0 ? 8 : CHUNKS & -CHUNKS; // of these, eight rows use the same banks
    return row * N * 2 + (column / 8 ^ row / (8 / EXCHANGED) % EXCHANGED) * 16 + column % 8 * 2;
}

// The terms of two neighbours. The remainders are exact.
__device__ __forceinline__ void split(float low, float high, uint32_t (&terms)[TERMS]) {
    #pragma unroll
    for (int i = 0; i < TERMS; i++) {
        terms[i] = pack_pair<BFLOAT16_BITS>(low, high);
        low = __fsub_rn(low, __uint_as_float(terms[i] << 16));
        high = __fsub_rn(high, __uint_as_float(terms[i] & 0xffff0000));
    }
}

// Stores two neighbours. The column is even.
template <int ROWS, int N> __device__ __forceinline__ void store(float *to, int row, int column, float low, float high) {
    uint32_t terms[TERMS];
    split(low, high, terms);
    #pragma unroll
    for (int i = 0; i < TERMS; i++) *(uint32_t *)((char *)to + i * SIZE<ROWS, N> + place<N>(row, column)) = terms[i];
}

// A number.
template <int ROWS, int N> __device__ __forceinline__ float element(const float *from, int row, int column) {
    const char *const at = (const char *)from + place<N>(row, column);
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < TERMS; i++) sum += __uint_as_float((uint32_t)*(const uint16_t *)(at + i * SIZE<ROWS, N>) << 16);
    return sum;
}

typedef uint32_t OfA[TERMS][4], OfB[TERMS][2]; // the fragments of 16 x 16 and 16 x 8 elements

// The sum of products of first terms, and that of all others.
struct Sum {
    float first[4], others[4];

    // Adds a b for 16 x 16 by 16 x 8 elements.
    __device__ __forceinline__ void add(const OfA &a, const OfB &b) {
        #pragma unroll
        for (int order = TERMS - 1; order > 0; order--)
            #pragma unroll
            for (int i = 0; i <= order; i++)
                multiply_add<BFLOAT16_BITS>(others, a[i], b[order - i][0], b[order - i][1]);
        float c[4] = {};
        multiply_add<BFLOAT16_BITS>(c, a[0], b[0][0], b[0][1]);
        #pragma unroll
        for (int i = 0; i < 4; i++) first[i] += c[i];
    }
    __device__ __forceinline__ void get(float (&total)[4]) const {
        #pragma unroll
        for (int i = 0; i < 4; i++) total[i] = first[i] + others[i];
    }
};

// Loads the terms of A by the address of the first.
template <bool TRANSPOSED, int BYTES> __device__ __forceinline__ void load_a(OfA &a, unsigned at) {
    #pragma unroll
    for (int i = 0; i < TERMS; i++) load_matrices<TRANSPOSED>(a[i], at + i * BYTES);
}

// Loads the terms of B by the address of the first.
template <bool TRANSPOSED, int BYTES> __device__ __forceinline__ void load_b(OfB &b, unsigned at) {
    uint32_t two[4];
    load_matrices<TRANSPOSED>(two, at + threadIdx.x % WARP / 16 * BYTES);
    #pragma unroll
    for (int i = 0; i < 4; i++) b[i / 2][i % 2] = two[i];
    load_matrices<TRANSPOSED>(b[2], at + 2 * BYTES);
}

// c[s] = a[s] B for 16 rows from `row` on of each of COUNT factors with K columns, and TILES x 8 columns of B from `column` on.
// B is a weight of N columns: [K][N], or [N][K] if TRANSPOSED.
template <int COUNT, int ROWS, int K, int N, bool TRANSPOSED, int TILES>
__device__ __forceinline__ void multiply(
    float (&c)[COUNT][TILES][4], const float *const (&a)[COUNT], int row, const float *b, int column) {
    const int lane = threadIdx.x % WARP;
    Sum sums[COUNT][TILES] = {};
    #pragma unroll 1
    for (int k = 0; k < K; k += 16) {
        const bool whole = K % 16 == 0 || k + 16 <= K; // else the second half of the step is zeros
        const int upper = whole ? lane / 8 % 2 * 8 : 0;
        OfB y[TILES];
        #pragma unroll
        for (int j = 0; j < TILES; j++) {
            const int n = column + 8 * j;
            const int from = TRANSPOSED ? place<K>(n + lane % 8, k + upper) : place<N>(k + upper + lane % 8, n);
            load_b<!TRANSPOSED, SIZE<K, N>>(y[j], shared_address(b) + from);
            #pragma unroll
            for (int i = 0; i < TERMS; i++) y[j][i][1] = whole ? y[j][i][1] : 0;
        }
        const int from = place<K>(row + lane % 16, whole ? k + lane / 16 * 8 : k);
        #pragma unroll
        for (int s = 0; s < COUNT; s++) {
            OfA x;
            load_a<false, SIZE<ROWS, K>>(x, shared_address(a[s]) + from);
            #pragma unroll
            for (int i = 0; i < TERMS; i++) x[i][2] = whole ? x[i][2] : 0, x[i][3] = whole ? x[i][3] : 0;
            #pragma unroll
            for (int j = 0; j < TILES; j++) sums[s][j].add(x, y[j]);
        }
    }
    #pragma unroll
    for (int s = 0; s < COUNT; s++)
        #pragma unroll
        for (int j = 0; j < TILES; j++) sums[s][j].get(c[s][j]);
}

// The fragment of x^T: 16 of its M columns from `column` on, and 16 rows from k on. Of a factor of at most 4 columns, and of ones
// in place of a factor (M = 0), a lane makes its terms.
template <int ROWS, int M> __device__ __forceinline__ void load_x(OfA &a, const float *x, int k, int column) {
    const int lane = threadIdx.x % WARP, g = lane / 4, c = lane % 4;
    if constexpr (M > INLINE) {
        constexpr int N = (M + 7) / 8 * 8;
        const int from = place<N>(k + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8);
        load_a<true, SIZE<ROWS, N>>(a, shared_address(x) + from);
    } else {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = k + 2 * c + i / 2 * 8, m = column + g + i % 2 * 8;
            uint32_t terms[TERMS];
            split(M == 0 ? m == 0 : m < M ? x[row * M + m] : 0, M == 0 ? m == 0 : m < M ? x[(row + 1) * M + m] : 0, terms);
            #pragma unroll
            for (int j = 0; j < TERMS; j++) a[j][i] = terms[j];
        }
    }
}

// The fragment of y: 8 of its N columns from `column` on, and 16 rows from k on.
template <int ROWS, int N> __device__ __forceinline__ void load_y(OfB &b, const float *y, int k, int column) {
    const int lane = threadIdx.x % WARP, g = lane / 4, c = lane % 4;
    if constexpr (N > INLINE) {
        constexpr int PADDED = (N + 7) / 8 * 8;
        load_b<true, SIZE<ROWS, PADDED>>(b, shared_address(y) + place<PADDED>(k + lane % 16, column));
    } else {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = k + 2 * c + i * 8, n = column + g;
            uint32_t terms[TERMS];
            split(n < N ? y[row * N + n] : 0, n < N ? y[(row + 1) * N + n] : 0, terms);
            #pragma unroll
            for (int j = 0; j < TERMS; j++) b[j][i] = terms[j];
        }
    }
}

// total += the sum over i of x[i]^T y[i], over ROWS rows: for 16 columns of x from `row` on, and TILES x 8 columns of y from
// `column` on. The total is an M x N matrix in the block's scratch memory; `begin`: it is 0 before. If ONES, x is a column of
// ones.
template <int COUNT, int ROWS, int TILES, int M, int N, bool ONES>
__device__ __forceinline__ void add_products(float *total, const float *const (&x)[COUNT], const float *const (&y)[COUNT],
    int row, int column, bool begin) {
    rows::Total<TILES, M, N> sum(total, row, column, begin);
    Sum sums[TILES] = {};
    #pragma unroll 1
    for (int i = 0; i < COUNT; i++) {
        const float *const of_x = rows::chosen(x, i), *const of_y = rows::chosen(y, i);
        #pragma unroll 2
        for (int k = 0; k < ROWS; k += 16) {
            OfA a;
            load_x<ROWS, ONES ? 0 : M>(a, of_x, k, row);
            #pragma unroll
            for (int j = 0; j < TILES; j++) {
                OfB b;
                load_y<ROWS, N>(b, of_y, k, column + 8 * j);
                sums[j].add(a, b);
            }
        }
    }
    float found[TILES][4];
    #pragma unroll
    for (int j = 0; j < TILES; j++) sums[j].get(found[j]);
    sum.add(found);
}

// Zeros in the rows from `left` on, which are not in sums.
template <int ROWS, int N> __device__ __forceinline__ void clear_rows(float *x, int left) {
    #pragma unroll
    for (int i = 0; i < TERMS; i++) rows::clear_rows<ROWS, N / 2>(x + i * ROWS * N / 2, left);
}

// Copies a weight of D0 x D1 to shared memory. Rows and columns up to the next multiples of 8 are zeros.
template <int D0, int D1> __device__ __forceinline__ void load_weight(float *to, const float *from) {
    constexpr int ROWS = (D0 + 7) / 8 * 8, N = (D1 + 7) / 8 * 8;
    for (int i = threadIdx.x; i < ROWS * N / 2; i += blockDim.x) {
        const int row = i / (N / 2), column = i % (N / 2) * 2;
        const float *const of_row = from + row * D1;
        store<ROWS, N>(to, row, column, row < D0 && column < D1 ? of_row[column] : 0,
            row < D0 && column + 1 < D1 ? of_row[column + 1] : 0);
    }
}

// Copies ROWS rows to shared memory. In place of rows from `left` on it copies the last one before.
template <int ROWS, int D1> __device__ __forceinline__ void load_rows(float *to, const float *from, int left) {
    constexpr int N = (D1 + 7) / 8 * 8;
    for (int i = threadIdx.x; i < ROWS * N / 2; i += blockDim.x) {
        const int row = i / (N / 2), column = i % (N / 2) * 2;
        const float *const of_row = from + min(row, left - 1) * D1;
        store<ROWS, N>(to, row, column, column < D1 ? of_row[column] : 0, column + 1 < D1 ? of_row[column + 1] : 0);
    }
}

} // namespace row_terms
