// The functions of generated kernels for chains of rows (backends/cuda/codegen/row_chain.py). A thread block takes a tile of rows
// through all equations. Values of the tile are in shared memory as rows of PITCH floats: a multiple of 8, but not of 16, so that
// the fragments of a warp lie in different banks. Columns up to the next multiple of 8 are zeros.
//
// Products are those of tensor cores in tf32. A float32 is the sum of two tf32 numbers, up to 2^-22 of it, and three of the four
// products of such terms are added, the small ones first. Tensor cores truncate sums, so they add 8 products; float32 adds these.
#pragma once
#include "common/mma_sync.cuh"

extern __shared__ __align__(16) unsigned char shared_bytes[];

namespace rows {

// A factor as two terms: the number rounded, and what it leaves, rounded.
struct Terms {
    uint32_t high, low;

    Terms() = default;
    __device__ __forceinline__ explicit Terms(float x)
        : high(tf32_bits(x)), low(tf32_bits(__fsub_rn(x, __uint_as_float(high)))) {}
};

// sum += a b for 16 x 8 by 8 x 8 elements.
__device__ __forceinline__ void add_product(float (&sum)[4], const Terms (&a)[4], const Terms (&b)[2]) {
    const uint32_t a_high[4] = {a[0].high, a[1].high, a[2].high, a[3].high};
    const uint32_t a_low[4] = {a[0].low, a[1].low, a[2].low, a[3].low};
    float c[4] = {};
    multiply_add_tf32(c, a_low, b[0].high, b[1].high);
    multiply_add_tf32(c, a_high, b[0].low, b[1].low);
    multiply_add_tf32(c, a_high, b[0].high, b[1].high);
    #pragma unroll
    for (int i = 0; i < 4; i++) sum[i] += c[i];
}

// c[s] = a[s] B for 16 rows of each of COUNT factors and TILES x 8 columns of B from `column` on. B is a weight in shared memory:
// [k][n], or [n][k] if TRANSPOSED. Of a step along K, lane (g, t) has k = 2t and 2t + 1.
template <int COUNT, int K, int PITCH_A, int PITCH_B, bool TRANSPOSED, int TILES>
__device__ __forceinline__ void multiply(
    float (&c)[COUNT][TILES][4], const float *const (&a)[COUNT], const float *b, int column) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int i = 0; i < COUNT * TILES * 4; i++) c[i / (4 * TILES)][i / 4 % TILES][i % 4] = 0;
    b += TRANSPOSED ? (column + g) * PITCH_B + 2 * t : 2 * t * PITCH_B + column + g;
    #pragma unroll 2
    for (int k = 0; k < K; k += 8) {
        Terms y[TILES][2];
        #pragma unroll
        for (int j = 0; j < TILES; j++) {
            const float *const from = TRANSPOSED ? b + 8 * j * PITCH_B + k : b + k * PITCH_B + 8 * j;
            y[j][0] = Terms(from[0]);
            y[j][1] = Terms(from[TRANSPOSED ? 1 : PITCH_B]);
        }
        #pragma unroll
        for (int s = 0; s < COUNT; s++) {
            const float *const from = a[s] + g * PITCH_A + 2 * t + k;
            const Vector<float, 2> upper = load<float, 2>(from), lower = load<float, 2>(from + 8 * PITCH_A);
            const Terms x[4] = {Terms(upper.lane[0]), Terms(lower.lane[0]), Terms(upper.lane[1]), Terms(lower.lane[1])};
            #pragma unroll
            for (int j = 0; j < TILES; j++) add_product(c[s][j], x, y[j]);
        }
    }
}

// A lane's elements of an M x N matrix in the block's scratch memory: of 16 rows from `row` on, and TILES x 8 columns from
// `column` on. `begin`: the matrix is 0 before.
template <int TILES, int M, int N> struct Total {
    static constexpr int PAIR = N % 2 == 0 ? 2 : 1; // neighbours in one access
    static constexpr bool WHOLE = M % 16 == 0 && N % 8 == 0;
    float *const total;
    const int row, column;
    float before[TILES][4];

    // Calls f(j, i, place) for the elements i, or i and i + 1 of a pair, of tile j.
    template <class F> __device__ __forceinline__ void each(const F &f) const {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
        #pragma unroll
        for (int j = 0; j < TILES; j++)
            #pragma unroll
            for (int i = 0; i < 4; i += PAIR) {
                const int m = row + g + i / 2 * 8, n = column + 8 * j + 2 * t + i % 2;
                f(j, i, WHOLE || (m < M && n < N) ? total + m * N + n : nullptr);
            }
    }
    __device__ __forceinline__ Total(float *total, int row, int column, bool begin) : total(total), row(row), column(column) {
        each([&](int j, int i, const float *at) {
            Vector<float, PAIR> found = {};
            if (!begin && (WHOLE || at)) found = load<float, PAIR>(at);
            #pragma unroll
            for (int k = 0; k < PAIR; k++) before[j][i + k] = found.lane[k];
        });
    }
    __device__ __forceinline__ void add(const float (&sums)[TILES][4]) const {
        each([&](int j, int i, float *at) {
            Vector<float, PAIR> found;
            #pragma unroll
            for (int k = 0; k < PAIR; k++) found.lane[k] = before[j][i + k] + sums[j][i + k];
            if (WHOLE || at) store(at, 0, found);
        });
    }
};

// Element i, without an address in local memory.
template <int COUNT> __device__ __forceinline__ const float *chosen(const float *const (&of)[COUNT], int i) {
    const float *found = of[0];
    #pragma unroll
    for (int k = 1; k < COUNT; k++) found = i == k ? of[k] : found;
    return found;
}

// total += the sum over i of x[i]^T y[i], over ROWS rows: for 16 columns of x from `row` on, and TILES x 8
// columns of y from `column` on. The total is an M x N matrix in the block's scratch memory; `begin`: it is 0 before.
template <int COUNT, int ROWS, int PITCH_X, int PITCH_Y, int TILES, int M, int N>
__device__ __forceinline__ void add_products(float *total, const float *const (&x)[COUNT], const float *const (&y)[COUNT],
    int row, int column, bool begin) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    Total<TILES, M, N> sum(total, row, column, begin);
    float sums[TILES][4] = {};
    #pragma unroll 1
    for (int i = 0; i < COUNT; i++) {
        const float *const from_x = chosen(x, i), *const from_y = chosen(y, i);
        #pragma unroll 2
        for (int k = 0; k < ROWS; k += 8) {
            const float *const of_x = from_x + (k + t) * PITCH_X + row + g;
            const Terms a[4] = {Terms(of_x[0]), Terms(of_x[8]), Terms(of_x[4 * PITCH_X]), Terms(of_x[4 * PITCH_X + 8])};
            #pragma unroll
            for (int j = 0; j < TILES; j++) {
                const float *const of_y = from_y + (k + t) * PITCH_Y + column + 8 * j + g;
                const Terms b[2] = {Terms(of_y[0]), Terms(of_y[4 * PITCH_Y])};
                add_product(sums[j], a, b);
            }
        }
    }
    sum.add(sums);
}

// The elements of a lane of a 16 x 8 tile are two of its row g, then two of row g + 8. Brings the second two to the place of the
// first, so that one loop computes both: this takes half the code, and fewer registers.
__device__ __forceinline__ void advance(float (&x)[4]) {
    x[0] = x[2];
    x[1] = x[3];
}

// The sum of a column over ROWS rows.
template <int ROWS, int PITCH> __device__ __forceinline__ float column_sum(const float *x) {
    float sums[4] = {};
    #pragma unroll 4
    for (int row = 0; row < ROWS; row += 4)
        #pragma unroll
        for (int i = 0; i < 4; i++) sums[i] += x[(row + i) * PITCH];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Zeros in the rows from `left` on, which are not in sums.
template <int ROWS, int PITCH> __device__ __forceinline__ void clear_rows(float *x, int left) {
    #pragma unroll 1
    for (int i = left * PITCH + threadIdx.x; i < ROWS * PITCH; i += blockDim.x) x[i] = 0;
}

// Copies a weight of D0 x D1 to shared memory. Rows and columns up to the next multiples of 8 are zeros.
template <int D0, int D1, int PITCH> __device__ __forceinline__ void load_weight(float *to, const float *from) {
    for (int i = threadIdx.x; i < (D0 + 7) / 8 * 8 * PITCH; i += blockDim.x) {
        const int row = i / PITCH, column = i % PITCH;
        to[i] = row < D0 && column < D1 ? from[row * D1 + column] : 0;
    }
}

// Copies ROWS rows to shared memory. In place of rows from `left` on it copies the last one before.
template <int ROWS, int N, int PITCH>
__device__ __forceinline__ void load_rows(float *to, const float *from, int left) {
    for (int i = threadIdx.x; i < ROWS * PITCH; i += blockDim.x) {
        const int row = i / PITCH, column = i % PITCH;
        to[i] = column < N ? from[min(row, left - 1) * N + column] : 0;
    }
}

} // namespace rows
