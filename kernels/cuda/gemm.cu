// C = op(A) op(B) for a batch of row-major matrices: C is M x N; A is M x K, or K x M if TRANSPOSE_A; B likewise.
// Read tile.cuh first. float is true float32: products and sums are rounded to 24 bits, by fused multiply-adds.
//
// SPLITS > 1 cuts K among the blocks too; each writes its own sums to scratch, and sum_splits.cu adds them in order.
//
// EPILOGUE is an expression for what is stored in place of `value`, where C has one more step to go:
//     -DEPILOGUE="value + bias[column] < 0 ? (T)0 : value + bias[column]"  -DEPILOGUE_INPUTS="const T *bias,"
// It may use value, row, column, index (of the element in C, the batch counted) and the parameters EPILOGUE_INPUTS.
#ifndef TRANSPOSE_A
#define TRANSPOSE_A 0
#define TRANSPOSE_B 0
#define WIDE_A 1 // elements that may be copied at once: of a row of op(A)ᵀ, a row of op(B), a row of C
#define WIDE_B 1
#define WIDE_C 1
#define SPLIT 0
#endif
#ifndef EPILOGUE
#define EPILOGUE value
#define EPILOGUE_INPUTS
#endif
#include "tile.cuh"

constexpr int GROUP = 8; // rows of tiles that go through all columns together: their panels stay in the second cache

template <int WIDTH, int WIDE, bool TRANSPOSE> struct Panel; // the loader for a panel of a matrix
template <int WIDTH, int WIDE> struct Panel<WIDTH, WIDE, false> : AlongLoader<WIDTH, WIDE> {
    // length: of op's columns or rows in all; the panel begins at `first` of them and row k0 of `end`.
    __device__ Panel(const T *x, int length, int first, int k, int k0, int end)
        : AlongLoader<WIDTH, WIDE>(x + (int64_t)k0 * length + first, length, length - first, end - k0) {}
};
template <int WIDTH, int WIDE> struct Panel<WIDTH, WIDE, true> : AcrossLoader<WIDTH> {
    __device__ Panel(const T *x, int length, int first, int k, int k0, int end)
        : AcrossLoader<WIDTH>(x + (int64_t)first * k + k0, k, length - first, end - k0) {}
};

KERNEL __launch_bounds__(THREADS, MIN_BLOCKS) gemm_tiled(
    const T *a, const T *b, T *c, EPILOGUE_INPUTS int64_t batch, int64_t m_, int64_t n_, int64_t k_, int64_t splits
#if SPLIT
    , char *scratch
#endif
) {
    wait_for_inputs();
    const int m = m_, n = n_, k = k_;
    const int down = (m + BM - 1) / BM, across = (n + BN - 1) / BN;
    const int64_t item = blockIdx.x / (down * across);
    const int tile = blockIdx.x % (down * across);
    // Tiles in the order: GROUP rows of the first column, of the second column, ..., then the next GROUP rows.
    const int group = tile / (GROUP * across), within = tile % (GROUP * across);
    const int rows = min(GROUP, down - group * GROUP);
    const int m0 = (group * GROUP + within % rows) * BM, n0 = within / rows * BN;

    // Split y takes stages [y, y + 1) / splits of K.
    const int stages = (k + BK - 1) / BK;
    const int begin = (int64_t)stages * blockIdx.y / splits, end = (int64_t)stages * (blockIdx.y + 1) / splits;
    const int k0 = begin * BK, k1 = min(k, end * BK);

    const Place place;
    T sums[TM][TN];
    Panel<BM, WIDE_A, !TRANSPOSE_A> left(a + item * m * k, m, m0, k, k0, k1);
    Panel<BN, WIDE_B, TRANSPOSE_B> right(b + item * k * n, n, n0, k, k0, k1);
    multiply(sums, left, right, end - begin, place);
    if (place.slice > 0) return;

#if SPLIT
    T *out = (T *)scratch + blockIdx.y * batch * m * n;
#else
    T *out = c;
#endif
    #pragma unroll
    for (int i = 0; i < TM; i++) {
        const int row = m0 + place.row(i);
        if (row >= m) break;
        #pragma unroll
        for (int j = 0; j < TN; j += WIDE_C) {
            const int first = n0 + place.column(j);
            if (first >= n) break;
            const int64_t start = (item * m + row) * n + first;
            Chunk<WIDE_C> chunk;
            #pragma unroll
            for (int h = 0; h < WIDE_C; h++) {
                const T value = sums[i][j + h];
#if SPLIT
                chunk.elements[h] = value;
#else
                const int column = first + h;
                const int64_t index = start + h;
                chunk.elements[h] = EPILOGUE;
                (void)column, (void)index;
#endif
            }
            *(Chunk<WIDE_C> *)(out + start) = chunk;
        }
    }
}
