// A matrix by a vector: C = op(A) op(B) with M = 1 or N = 1, for a batch. Each element of the matrix is loaded once. The matrix
// is `length` x k, or k x length if COLUMNS. Blocks in x: those of the first matrix, of the second, ...
//
// Macros: COLUMNS. MATRIX_B: the matrix is B. WIDE_A: elements of the matrix per load.
#include "common/collectives.cuh"
#include "common/epilogue.cuh"

constexpr int THREADS = COLUMNS ? 1024 : 256, WARPS = THREADS / WARP;
constexpr int LANES = 8;                                    // COLUMNS: threads of a row
constexpr int PART = 64;                                    // products that a thread adds in T, before it adds to its total
constexpr int PER_BLOCK = COLUMNS ? LANES * WIDE_A : WARPS; // elements of the result

// The dot product of a row and the vector, by one warp.
__device__ __forceinline__ T dot(const T *row, const T *vector, int64_t k) {
    TotalOf<T>::type total = 0;
    const int lane = threadIdx.x % WARP;
    for (int64_t start = 0; start < k; start += PART * WARP * WIDE_A) {
        const int64_t end = min(k, start + PART * WARP * WIDE_A);
        T sums[WIDE_A] = {};
        #pragma unroll 4 // loads in flight
        for (int64_t i = start + lane * WIDE_A; i < end; i += WARP * WIDE_A) {
            const Vector<T, WIDE_A> x = load<T, WIDE_A>(row + i), y = load<T, WIDE_A>(vector + i);
            #pragma unroll
            for (int h = 0; h < WIDE_A; h++) sums[h] = fma(x.lane[h], y.lane[h], sums[h]);
        }
        T sum = 0;
        #pragma unroll
        for (int h = 0; h < WIDE_A; h++) sum += sums[h];
        total += sum;
    }
    return over_lanes<Sum, WARP>((T)total);
}

KERNEL __launch_bounds__(THREADS) gemv(
    const T *a, const T *b, const Epilogue epilogue, int64_t batch, int64_t length, int64_t k) {
    wait_for_inputs();
    const int blocks = (length + PER_BLOCK - 1) / PER_BLOCK; // of a matrix
    const int64_t item = blockIdx.x / blocks, first = (int64_t)(blockIdx.x % blocks) * PER_BLOCK;
    const T *matrix = (MATRIX_B ? b : a) + item * length * k, *vector = (MATRIX_B ? a : b) + item * k;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const auto put = [&](int64_t i, T value) {
        const T values[1] = {value};
        epilogue(item, MATRIX_B ? 0 : i, MATRIX_B ? i : 0, item * length + i, values);
    };
#if COLUMNS
    // Each of ROWS groups of LANES threads sums every ROWS-th row of PER_BLOCK columns. Shared memory collects the groups' sums.
    constexpr int ROWS = THREADS / LANES;
    __shared__ T shared[ROWS][PER_BLOCK];
    const int group = threadIdx.x / LANES, at = threadIdx.x % LANES * WIDE_A;
    TotalOf<T>::type totals[WIDE_A] = {};
    if (first + at < length) {
        const T *column = matrix + first + at;
        for (int64_t i = group; i < k;) {
            const int64_t end = min(k, i + PART * ROWS);
            T sums[WIDE_A] = {};
            #pragma unroll 4 // loads in flight
            for (; i < end; i += ROWS) {
                const Vector<T, WIDE_A> x = load<T, WIDE_A>(column + i * length);
                const T y = vector[i];
                #pragma unroll
                for (int h = 0; h < WIDE_A; h++) sums[h] = fma(x.lane[h], y, sums[h]);
            }
            #pragma unroll
            for (int h = 0; h < WIDE_A; h++) totals[h] += sums[h];
        }
    }
    #pragma unroll
    for (int h = 0; h < WIDE_A; h++) shared[group][at + h] = totals[h];
    __syncthreads();
    for (int i = warp; i < PER_BLOCK; i += WARPS) { // a warp adds the sums of a column
        T sum = 0;
        #pragma unroll
        for (int j = lane; j < ROWS; j += WARP) sum += shared[j][i];
        sum = over_lanes<Sum, WARP>(sum);
        if (lane == 0 && first + i < length) put(first + i, sum);
    }
#else
    const int64_t i = first + warp;
    if (i >= length) return;
    const T sum = dot(matrix + i * k, vector, k);
    if (lane == 0) put(i, sum);
#endif
}
