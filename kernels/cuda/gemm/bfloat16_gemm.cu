// C = op(A) op(B) of a batch of matrices that are bfloat16 in memory, and of several pairs of matrices with the same K. Read
// gemm/bfloat16_product.cuh first.
//
// PRODUCTS: pairs of matrices, 1 if it is not defined. Several are no batches, and the item of a tile is the number of its product.
#ifndef PRODUCTS
#define PRODUCTS 1
#endif
#include "gemm/bfloat16_product.cuh"

struct alignas(128) Maps {
    struct {
        TensorMap a, b;
    } of[PRODUCTS];
};

constexpr int BOX = 64; // BOX_A and BOX_B

// Starts to load rows of op(A) or columns of op(B), from `first` on.
template <bool MN_MAJOR, class Tile> __device__ __forceinline__ void load_rows(
    const TensorMap &map, char *to, int first, int k, int item, Mbarrier &full) {
    if constexpr (MN_MAJOR) {
        #pragma unroll
        for (int i = 0; i < Tile::BOXES; i++) map.load(to + i * Tile::BOX_BYTES, first + i * BOX, k, item, full);
    } else {
        map.load(to, k, first, item, full);
    }
}

// The item of a tile is a matrix of the batch, or the number of a product.
struct MappedOperands {
    typedef AccumulatorTile Tile;
    typedef Boxes Stage;
    const Maps &maps;
    int k;

    __device__ __forceinline__ int k_tiles(int64_t) const { return (k + TILE_K - 1) / TILE_K; }
    __device__ __forceinline__ auto load_a(const TileSplit &own) const {
        return [=, &map = maps.of[PRODUCTS > 1 ? own.at.item : 0].a](int k_tile, char *stage, Mbarrier &full) {
            load_rows<MN_MAJOR_A, TileA>(map, stage, own.row, k_tile * TILE_K, PRODUCTS > 1 ? 0 : own.at.item, full);
        };
    }
    __device__ __forceinline__ auto load_b(const TileSplit &own) const {
        return [=, &map = maps.of[PRODUCTS > 1 ? own.at.item : 0].b](int k_tile, char *stage, Mbarrier &full) {
            load_rows<MN_MAJOR_B, TileB>(map, stage, own.column, k_tile * TILE_K, PRODUCTS > 1 ? 0 : own.at.item, full);
        };
    }
};

#if PRODUCTS == 1
struct Matrices : MappedOperands {
    int m, n;

    __device__ __forceinline__ Tile tile(const TileSplit &own, int row, int column) const { return {own.at, m, n, row, column}; }
};

#define MATRICES Matrices{{maps, (int)k}, (int)m, (int)n}

KERNEL __launch_bounds__(THREADS, 1) bfloat16_gemm(const __grid_constant__ Maps maps, const Epilogue epilogue,
    int64_t batch, int64_t m, int64_t n, int64_t k, int64_t whole, char *scratch) {
    multiply(Work(batch, m, n, whole), MATRICES, epilogue, scratch);
}

KERNEL __launch_bounds__(SUM_THREADS) sum_bfloat16_splits(const __grid_constant__ Maps maps, const Epilogue epilogue,
    int64_t batch, int64_t m, int64_t n, int64_t k, int64_t whole, char *scratch) {
    wait_for_inputs();
    const int i = blockIdx.x * SUM_THREADS + threadIdx.x;
    add_splits(i, Work(batch, m, n, whole), MATRICES, epilogue, (const T *)scratch);
}
#else
// The rows and columns of each result.
struct Shapes {
    struct {
        int64_t m, n;
    } of[PRODUCTS];
};

struct Products : MappedOperands {
    const Shapes &shapes;

    __device__ __forceinline__ Tile tile(const TileSplit &own, int row, int column) const {
        const auto &shape = shapes.of[own.at.item];
        TileCoord at = own.at;
        at.item = 0;
        return {at, (int)shape.m, (int)shape.n, row, column};
    }
    // The rows and the columns of tiles of a product.
    __device__ __forceinline__ int rows(int i) const { return (shapes.of[i].m + TILE_M - 1) / TILE_M; }
    __device__ __forceinline__ int columns(int i) const { return (shapes.of[i].n + TILE_N - 1) / TILE_N; }

    // The tiles of the first products.
    __device__ __forceinline__ int tiles(int products) const {
        int found = 0;
        #pragma unroll
        for (int i = 0; i < PRODUCTS; i++)
            if (i < products) found += rows(i) * columns(i);
        return found;
    }
};

// The tiles of a product follow those of the product before it.
__device__ __forceinline__ TileCoord tile_coordinates(const Products &products, const Work &, int tile) {
    int item = 0, first = 0;
    #pragma unroll
    for (int i = 1; i < PRODUCTS; i++) {
        const int begin = products.tiles(i);
        if (tile >= begin) item = i, first = begin;
    }
    TileCoord at(tile - first, products.rows(item), products.columns(item));
    at.item = item;
    return at;
}
__device__ __forceinline__ const Epilogue &epilogue_at(const Epilogues &epilogues, const TileCoord &at) {
    return epilogues.of[at.item];
}

#define ALL_PRODUCTS Products{{maps, (int)k}, shapes}

KERNEL __launch_bounds__(THREADS, 1) bfloat16_products(const __grid_constant__ Maps maps,
    const __grid_constant__ Epilogues epilogues, int64_t k, const __grid_constant__ Shapes shapes, int64_t whole, char *scratch) {
    multiply(Work(ALL_PRODUCTS.tiles(PRODUCTS), whole), ALL_PRODUCTS, epilogues, scratch);
}

KERNEL __launch_bounds__(SUM_THREADS) sum_bfloat16_products(const __grid_constant__ Maps maps,
    const __grid_constant__ Epilogues epilogues, int64_t k, const __grid_constant__ Shapes shapes, int64_t whole, char *scratch) {
    wait_for_inputs();
    const int i = blockIdx.x * SUM_THREADS + threadIdx.x;
    add_splits(i, Work(ALL_PRODUCTS.tiles(PRODUCTS), whole), ALL_PRODUCTS, epilogues, (const T *)scratch);
}
#endif
