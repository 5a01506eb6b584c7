// Attention by FMA: what the forward and the backward kernels share.
//
// A block computes TILE queries, or TILE keys. Tiles of rows, and tiles of TILE x TILE scores, are in shared memory.
//
// Thread (y, x) of LANES x LANES computes the scores of rows MICRO y + i and columns x + LANES j, with i, j < MICRO. Of
// a result it computes the same rows, and columns x + LANES n. The LANES threads of a row are neighbouring lanes of a warp.
//
// Macros: TILE, MICRO, and those of attention.cuh.
#pragma once
#include "attention/attention.cuh"

constexpr int LANES = TILE / MICRO, THREADS = LANES * LANES, VECTOR = 16 / sizeof(T);
constexpr int COLUMNS = (WIDTH + LANES - 1) / LANES, PADDED = COLUMNS * LANES;
// Elements between rows of a tile, and of a tile of scores: 16 bytes of padding avoid bank conflicts.
constexpr int STRIDE = PADDED + VECTOR, SCORES = TILE + VECTOR;
static_assert(LANES <= WARP && THREADS % WARP == 0 && PADDED % VECTOR == 0, "the lanes of a row are in one warp");

// An operand of a product, in the precision of the products.
__device__ __forceinline__ float operand(float x) { return rounded(x); }
__device__ __forceinline__ double operand(double x) { return x; }

typedef T RowTile[TILE * STRIDE], ScoreTile[TILE * SCORES]; // in shared memory

__device__ __forceinline__ int thread_y() { return threadIdx.x / LANES; }
__device__ __forceinline__ int thread_x() { return threadIdx.x % LANES; }
__device__ __forceinline__ int row_of(int i) { return thread_y() * MICRO + i; }
__device__ __forceinline__ int column_of(int j) { return thread_x() + LANES * j; }

// Copies rows `first` to first + TILE of `rows` rows to shared memory; the rest is 0. `stride`: elements between rows.
__device__ __forceinline__ void load_tile(const T *from, int64_t stride, int64_t first, int64_t rows, T *tile) {
    constexpr int VECTORS = PADDED / VECTOR;
    for (int i = threadIdx.x; i < TILE * VECTORS; i += THREADS) {
        const int row = i / VECTORS, column = i % VECTORS * VECTOR;
        const T *source = from + (first + row) * stride + column;
        Vector<T, VECTOR> x = {};
        if (first + row < rows) {
            if constexpr (WIDTH % VECTOR == 0) {
                if (column < WIDTH) x = load<T, VECTOR>(source);
            } else {
                #pragma unroll
                for (int k = 0; k < VECTOR; k++)
                    if (column + k < WIDTH) x.lane[k] = source[k];
            }
        }
        #pragma unroll
        for (int k = 0; k < VECTOR; k++) x.lane[k] = operand(x.lane[k]);
        store(tile, row * STRIDE + column, x);
    }
}

// a times the transpose of b, for two tiles.
__device__ __forceinline__ void row_products(const T *a, const T *b, T (&products)[MICRO][MICRO]) {
    #pragma unroll
    for (int i = 0; i < MICRO; i++)
        #pragma unroll
        for (int j = 0; j < MICRO; j++) products[i][j] = 0;
    a += row_of(0) * STRIDE, b += column_of(0) * STRIDE;
    #pragma unroll 2
    for (int k = 0; k < PADDED; k += VECTOR) {
        Vector<T, VECTOR> left[MICRO], right[MICRO];
        #pragma unroll
        for (int i = 0; i < MICRO; i++) left[i] = load<T, VECTOR>(a + i * STRIDE + k);
        #pragma unroll
        for (int j = 0; j < MICRO; j++) right[j] = load<T, VECTOR>(b + j * LANES * STRIDE + k);
        #pragma unroll
        for (int h = 0; h < VECTOR; h++)
            #pragma unroll
            for (int i = 0; i < MICRO; i++)
                #pragma unroll
                for (int j = 0; j < MICRO; j++)
                    products[i][j] = fma(left[i].lane[h], right[j].lane[h], products[i][j]);
    }
}

// sums += weights tile, or the transpose of weights times the tile. `weights` is a tile of scores.
template <bool TRANSPOSED>
__device__ __forceinline__ void add_products(const T *weights, const T *tile, T (&sums)[MICRO][COLUMNS]) {
    constexpr int DEPTH = TRANSPOSED ? 1 : VECTOR;
    constexpr int WIDE = MICRO < VECTOR ? MICRO : VECTOR;
    #pragma unroll 2
    for (int k = 0; k < TILE; k += DEPTH) {
        T left[DEPTH][MICRO];
        if constexpr (TRANSPOSED) {
            #pragma unroll
            for (int i = 0; i < MICRO; i += WIDE) {
                const Vector<T, WIDE> x = load<T, WIDE>(weights + k * SCORES + row_of(i));
                #pragma unroll
                for (int h = 0; h < WIDE; h++) left[0][i + h] = x.lane[h];
            }
        } else {
            #pragma unroll
            for (int i = 0; i < MICRO; i++) {
                const Vector<T, VECTOR> x = load<T, VECTOR>(weights + row_of(i) * SCORES + k);
                #pragma unroll
                for (int h = 0; h < VECTOR; h++) left[h][i] = x.lane[h];
            }
        }
        #pragma unroll
        for (int h = 0; h < DEPTH; h++)
            #pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                const T right = tile[(k + h) * STRIDE + column_of(n)];
                #pragma unroll
                for (int i = 0; i < MICRO; i++) sums[i][n] = fma(left[h][i], right, sums[i][n]);
            }
    }
}

// Stores rows `first` to first + TILE of `rows` rows.
__device__ __forceinline__ void store_rows(
    T *to, int64_t stride, int64_t first, int64_t rows, const T (&sums)[MICRO][COLUMNS]) {
    #pragma unroll
    for (int i = 0; i < MICRO; i++)
        #pragma unroll
        for (int n = 0; n < COLUMNS; n++)
            if (first + row_of(i) < rows && column_of(n) < WIDTH)
                to[(first + row_of(i)) * stride + column_of(n)] = sums[i][n];
}
