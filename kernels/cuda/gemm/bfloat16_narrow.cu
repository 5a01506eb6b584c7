// Products of a matrix X and one of few columns Y, both bfloat16 in memory, by mma.sync. Such a product is bound by the reads of X.
// So a lane loads X and Y from global memory to the registers of mma.sync, 16 bytes of X at a time. It may hold any rows and any k,
// if both operands have the same k.
//
// A cluster of blocks computes ROWS rows. Its warps divide K (sliced-K). Their sums are added in shared memory, in the order of the
// warps, then of the blocks. Registers allow one block on a multiprocessor.
//
// PRODUCTS: pairs of matrices of the same K. If C has more than COLUMNS columns, X is B and C is the transposed product.
//
// Macros (narrow_products in lowering/cuda/gemm/narrow.py): PRODUCTS, COLUMNS (a multiple of 8), CLUSTER. WIDE_K, NARROW_K: whether
// neighbouring elements of X, or of Y, have neighbouring k. WIDE_C: most elements of a store.
#include "common/epilogue.cuh"
#include "common/mma_sync.cuh"
#include "sm90/cluster.cuh"

constexpr int WARPS = 16, THREADS = WARPS * WARP;
constexpr int TILES = 4, ROWS = 16 * TILES;             // tiles of mma.sync; rows of a block
constexpr int DEPTH = WIDE_K ? 8 : 4, STEP = 4 * DEPTH; // neighbouring k of a lane in a step; k of a step
constexpr int LOADS = WIDE_K ? 2 * TILES : 4;           // loads of X in a step
constexpr int GROUPS = COLUMNS / 8;                     // of columns
constexpr int AHEAD = 16 / LOADS / GROUPS;              // steps whose loads are in flight, for which registers suffice

#if PRODUCTS == 1
struct Epilogues {
    Epilogue of[1];
};
#endif
struct Factors {
    struct {
        const uint16_t *a, *b;
    } of[PRODUCTS];
};
// The rows and columns of each result.
struct Shapes {
    struct {
        int64_t m, n;
    } of[PRODUCTS];
};

// What lane (g, c) holds of a step: neighbouring pairs of x, and pairs of y at k = DEPTH c + 2i, of column g of each group.
struct Step {
    Vector<uint32_t, 4> x[LOADS];
    uint32_t y[GROUPS][DEPTH / 2];

    // Rows from `row` on of the `length` rows of X, at k = `from` ... `from` + STEP - 1 of `k`. What is outside is 0.
    __device__ __forceinline__ void load(
        const uint16_t *wide, const uint16_t *narrow, int64_t length, int64_t k, int64_t row, int64_t from) {
        const int g = threadIdx.x % WARP / 4, c = threadIdx.x % 4;
        #pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int64_t r = row + (WIDE_K ? 8 * i + g : 8 * g), at = from + DEPTH * c + (WIDE_K ? 0 : i);
            x[i] = {};
            if (r < length && at < k) x[i] = ::load<uint32_t, 4>((const uint32_t *)(wide + (WIDE_K ? r * k + at : at * length + r)));
        }
        #pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            if constexpr (NARROW_K) {
                const int64_t at = from + DEPTH * c;
                Vector<uint32_t, DEPTH / 2> pairs = {};
                if (at < k) pairs = ::load<uint32_t, DEPTH / 2>((const uint32_t *)(narrow + (8 * j + g) * k + at));
                #pragma unroll
                for (int i = 0; i < DEPTH / 2; i++) y[j][i] = pairs.lane[i];
            } else {
                #pragma unroll
                for (int i = 0; i < DEPTH / 2; i++) {
                    const int64_t at = from + DEPTH * (g / 2) + 2 * i + g % 2;
                    y[j][i] = transposed_matrix(
                        at < k ? *(const uint32_t *)(narrow + at * COLUMNS + 8 * j + 2 * c) : 0);
                }
            }
        }
    }

    // sums += the product of the step. Tile t has the rows row_of(t, 0) and row_of(t, 1) of this lane.
    __device__ __forceinline__ void multiply(T (&sums)[TILES][GROUPS][4]) const {
        #pragma unroll
        for (int t = 0; t < TILES; t++) {
            #pragma unroll
            for (int h = 0; h < DEPTH / 4; h++) {
                uint32_t a[4];
                if constexpr (WIDE_K) {
                    #pragma unroll
                    for (int i = 0; i < 4; i++) a[i] = x[2 * t + i % 2].lane[2 * h + i / 2];
                } else {
                    #pragma unroll
                    for (int i = 0; i < 4; i++)
                        a[i] = __byte_perm(x[i / 2 * 2].lane[t], x[i / 2 * 2 + 1].lane[t], i % 2 ? 0x7632 : 0x5410);
                }
                #pragma unroll
                for (int j = 0; j < GROUPS; j++) multiply_add<BFLOAT16_BITS>(sums[t][j], a, y[j][2 * h], y[j][2 * h + 1]);
            }
        }
    }

    static __device__ __forceinline__ int row_of(int t, int half) {
        const int g = threadIdx.x % WARP / 4;
        return WIDE_K ? 16 * t + 8 * half + g : 8 * g + 2 * t + half;
    }
};

KERNEL CLUSTER_DIMS __launch_bounds__(THREADS, 1) narrow_products(const __grid_constant__ Factors factors,
    const __grid_constant__ Epilogues epilogues, int64_t k, const __grid_constant__ Shapes shapes) {
    wait_for_inputs();
    const auto rows_of = [&](int i) { return max(shapes.of[i].m, shapes.of[i].n); };
    int64_t first = blockIdx.x / CLUSTER * ROWS;
    int product = 0;
    for (; PRODUCTS > 1 && first >= rows_of(product); product++) first -= (rows_of(product) + ROWS - 1) / ROWS * ROWS;
    const bool transposed = shapes.of[product].n > COLUMNS;
    const auto &factor = factors.of[product];
    const uint16_t *wide = transposed ? factor.b : factor.a, *narrow = transposed ? factor.a : factor.b;
    const int64_t length = transposed ? shapes.of[product].n : shapes.of[product].m;

    T sums[TILES][GROUPS][4] = {};
    const int warp = threadIdx.x / WARP, c = threadIdx.x % 4;
    constexpr int SLICES = WARPS * CLUSTER;
    for (int64_t at = (cluster_rank() * WARPS + warp) * STEP; at < k; at += AHEAD * SLICES * STEP) {
        Step steps[AHEAD];
        #pragma unroll
        for (int i = 0; i < AHEAD; i++) steps[i].load(wide, narrow, length, k, first, at + i * SLICES * STEP);
        #pragma unroll
        for (int i = 0; i < AHEAD; i++) steps[i].multiply(sums);
    }

    typedef T Sums[ROWS][COLUMNS];
    Sums *const of_warps = (Sums *)shared_bytes;
    #pragma unroll
    for (int t = 0; t < TILES; t++) {
        #pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            #pragma unroll
            for (int h = 0; h < 2; h++)
                store(of_warps[warp][Step::row_of(t, h)], 8 * j + 2 * c, Vector<T, 2>{sums[t][j][2 * h], sums[t][j][2 * h + 1]});
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
        T sum = 0;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) sum += of_warps[w][i / COLUMNS][i % COLUMNS];
        of_warps[0][i / COLUMNS][i % COLUMNS] = sum;
    }
    cluster_barrier();
    constexpr int WIDE = WIDE_C < Epilogue::WIDEST ? WIDE_C : Epilogue::WIDEST;
    for (int i = threadIdx.x; cluster_rank() == 0 && i < ROWS * COLUMNS / WIDE; i += THREADS) {
        const int row = transposed ? i * WIDE % ROWS : i * WIDE / COLUMNS, column = transposed ? i * WIDE / ROWS : i * WIDE % COLUMNS;
        if (first + row >= length) continue;
        T values[WIDE] = {};
        #pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) {
            const Sums &of_block = *map_shared_rank(of_warps, rank);
            #pragma unroll
            for (int h = 0; h < WIDE; h++) values[h] += of_block[row + (transposed ? h : 0)][column + (transposed ? 0 : h)];
        }
        const int64_t r = transposed ? column : first + row, at = transposed ? first + row : column;
        epilogues.of[product](0, r, at, r * shapes.of[product].n + at, values);
    }
    cluster_barrier(); // no block ends while another one reads its sums
}
