// A tile of a product from slabs, in a block of gemm/packed_gemm.cu: a warpgroup of which brings the operands, in stages, and two
// multiply, each half of the rows.
#pragma once
#include "sm90/bf16x3.cuh"
#include "sm90/accumulator.cuh"
#include "gemm/packed.cuh"

constexpr int SUMS = TILE_N / 2; // that a thread has of a tile
constexpr int CONSUMERS = 2 * WARPGROUP, THREADS = WARPGROUP + CONSUMERS;

// The half of the rows that a thread's warpgroup has.
__device__ __forceinline__ int half_of_rows() { return threadIdx.x / WARPGROUP - 1; }

// What says which stages have arrived and which are free.
struct Stages {
    Barrier full[TILE_STAGES], empty[TILE_STAGES];

    __device__ void init() {
        for (int i = 0; i < TILE_STAGES; i++) {
            full[i].init(1);
            empty[i].init(CONSUMERS / WARP);
        }
        show_barriers();
    }
    // A warp has read a stage.
    __device__ __forceinline__ void release(int stage) {
        if (threadIdx.x % WARP == 0) empty[stage].arrive();
    }
};

// Where a stage lies: the COUNT numbers of a slab of op(A), then those of TAKEN lines of ACROSS slabs of op(B).
template <int COUNT> struct Stage {
    static constexpr int OF_A = COUNT * SLAB, OF_B = OF_A / LINES * TAKEN, SIZE = OF_A + ACROSS * OF_B;
    const char *at;

    __device__ __forceinline__ Stage(const char *shared, int stage) : at(shared + stage * SIZE) {}

    // Of number p: the half of the rows that this warpgroup multiplies, and the columns.
    __device__ __forceinline__ uint64_t a(int p = 0) const {
        return described(at + p * SLAB + half_of_rows() * (SLAB / 2));
    }
    __device__ __forceinline__ uint64_t b(int p = 0) const { return described(at + OF_A + p * (OF_B / COUNT)); }
};

// What of a tile a thread of a warpgroup holds.
__device__ __forceinline__ Place place_of(int tile, const Slabs &slabs) {
    const TileAt at(tile, slabs.rows, slabs.across);
    return {at, (int)slabs.m, (int)slabs.n, at.down * LINES + half_of_rows() * 64, at.across * TILE_N};
}
