// C = op(A) op(B) of a batch of matrices that are bfloat16 in memory. Read gemm/bfloat16_product.cuh first.
#include "gemm/bfloat16_product.cuh"

struct alignas(128) Maps {
    TensorMap a, b;
};

constexpr int BOX = 64; // BOX_A and BOX_B

struct Matrices {
    typedef AccumulatorTile Tile;
    const Maps &maps;
    int m, n, k;

    __device__ __forceinline__ int k_tiles(int64_t) const { return (k + TILE_K - 1) / TILE_K; }
    __device__ __forceinline__ auto load_a(const TileSplit &own) const {
        return [=, &map = maps.a](int k_tile, char *stage, Mbarrier &full) {
            load<MN_MAJOR_A, TileA>(map, stage, own.row, k_tile * TILE_K, own.at.item, full);
        };
    }
    __device__ __forceinline__ auto load_b(const TileSplit &own) const {
        return [=, &map = maps.b](int k_tile, char *stage, Mbarrier &full) {
            load<MN_MAJOR_B, TileB>(map, stage, own.column, k_tile * TILE_K, own.at.item, full);
        };
    }
    __device__ __forceinline__ Tile tile(const TileSplit &own, int row, int column) const { return {own.at, m, n, row, column}; }

  private:
    // Starts to load rows of op(A) or columns of op(B), from `first` on.
    template <bool MN_MAJOR, class Tile> __device__ __forceinline__ static void load(
        const TensorMap &map, char *to, int first, int k, int item, Mbarrier &full) {
        if constexpr (MN_MAJOR) {
            #pragma unroll
            for (int i = 0; i < Tile::BOXES; i++) map.load(to + i * Tile::BOX_BYTES, first + i * BOX, k, item, full);
        } else {
            map.load(to, k, first, item, full);
        }
    }
};

#define MATRICES Matrices{maps, (int)m, (int)n, (int)k}

KERNEL __launch_bounds__(THREADS, 1) bfloat16_gemm(const __grid_constant__ Maps maps, const Epilogue epilogue, int64_t batch,
    int64_t m, int64_t n, int64_t k, int64_t whole, char *scratch) {
    multiply(Work(batch, m, n, whole), MATRICES, epilogue, scratch);
}

KERNEL __launch_bounds__(SUM_THREADS) sum_bfloat16_splits(const __grid_constant__ Maps maps, const Epilogue epilogue,
    int64_t batch, int64_t m, int64_t n, int64_t k, int64_t whole, char *scratch) {
    wait_for_inputs();
    const int i = blockIdx.x * SUM_THREADS + threadIdx.x;
    add_splits(i, Work(batch, m, n, whole), MATRICES, epilogue, (const T *)scratch);
}
