// Sums over all pairs of rows of products of Gram matrices, which are not stored: norms of the gradients of examples.
//
// The Gram matrix of an array (ROWS, length) has the inner products of all pairs of rows. It is symmetric, so the pairs are divided
// into square tiles at and below the diagonal. LANES neighbouring threads share a tile: each adds some of the terms of all inner
// products, then each gets the inner product of one pair.
#pragma once
#include "common/block_ops.cuh"

namespace gram {

constexpr int TILE = 4, LANES = TILE * TILE; // rows of a tile, and its pairs

// The tile of the threads that share it, and the pair of this thread.
template <typename A, int ROWS> struct Pair {
    static constexpr int ACROSS = (ROWS + TILE - 1) / TILE, TILES = ACROSS * (ACROSS + 1) / 2;
    int row, column; // the first rows of both sides of the tile

    __device__ __forceinline__ explicit Pair(int tile) : row(0), column(tile) {
        while (column > row) column -= ++row; // row i of the tiles has i + 1 tiles
        row *= TILE, column *= TILE;
    }

    // How often the pair counts: 0 beyond the last row, 2 if the tile also stands for that above the diagonal.
    __device__ __forceinline__ int weight() const {
        const int lane = threadIdx.x % LANES;
        const bool real = row + lane / TILE < ROWS && column + lane % TILE < ROWS;
        return !real ? 0 : row == column ? 1 : 2;
    }

    // The inner product of the pair's rows of x (ROWS, length). All threads of a warp call it together.
    template <int WIDE> __device__ __forceinline__ A product(const A *x, int length) const {
        const int lane = threadIdx.x % LANES;
        A sums[LANES] = {}, own = 0;
        for (int k = lane * WIDE; k < length; k += LANES * WIDE) {
            Vector<A, WIDE> left[TILE], right[TILE];
            #pragma unroll
            for (int i = 0; i < TILE; i++) {
                left[i] = load<A, WIDE>(x + min(row + i, ROWS - 1) * length + k);
                right[i] = load<A, WIDE>(x + min(column + i, ROWS - 1) * length + k);
            }
            #pragma unroll
            for (int i = 0; i < LANES; i++)
                #pragma unroll
                for (int h = 0; h < WIDE; h++)
                    sums[i] = fma(left[i / TILE].lane[h], right[i % TILE].lane[h], sums[i]);
        }
        in_block::divide_sums<LANES, LANES>(sums, lane, 0, LANES, [&](int, A sum) { own = sum; });
        return own;
    }
};

// Sums COUNT terms of each pair over all pairs. terms_of(pair, terms) computes those of one; write(sums) gets the sums, in one thread.
template <typename A, int ROWS, int THREADS, int COUNT, typename Terms, typename Write>
__device__ __forceinline__ void sum_over_pairs(Terms terms_of, Write write) {
    constexpr int TILES = Pair<A, ROWS>::TILES, AT_ONCE = THREADS / LANES;
    A sums[COUNT] = {};
    #pragma unroll 1
    for (int first = 0; first < TILES; first += AT_ONCE) {
        const int tile = first + threadIdx.x / LANES;
        if (first + threadIdx.x / WARP * (WARP / LANES) >= TILES) continue; // this warp has no tile
        const Pair<A, ROWS> pair(min(tile, TILES - 1));
        const A weight = tile < TILES ? pair.weight() : 0;
        A terms[COUNT];
        terms_of(pair, terms);
        #pragma unroll
        for (int i = 0; i < COUNT; i++) sums[i] = fma(weight, terms[i], sums[i]);
    }
    #pragma unroll
    for (int i = 0; i < COUNT; i++) sums[i] = over_block<Sum>(sums[i]);
    if (threadIdx.x == 0) write(sums);
}

} // namespace gram
