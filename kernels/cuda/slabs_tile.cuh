// A tile of a product from slabs, in a block of gemm_slabs.cu: a warpgroup of which brings the operands, in stages, and two
// multiply, each half of the rows.
#pragma once
#include "gemm.cuh"
#include "slabs.cuh"

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

// Goes round as many of them.
template <int STAGES> struct Turn {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
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

// The elements of a tile that a thread of a warpgroup holds.
struct Place {
    TileAt at;
    int m, n, row0, column0;

    __device__ Place(int tile, const Slabs &slabs)
        : at(tile, slabs.rows, slabs.across), m(slabs.m), n(slabs.n) {
        row0 = at.down * LINES + half_of_rows() * 64;
        column0 = at.across * TILE_N;
    }
    __device__ __forceinline__ int row(int i) const { return row0 + sum_row(i); }
    __device__ __forceinline__ int column(int i) const { return column0 + sum_column(i); }
    __device__ __forceinline__ bool inside(int i) const { return row(i) < m && column(i) < n; }

    __device__ __forceinline__ int64_t index(int row, int column) const { return (at.item * m + row) * n + column; }

    // Hands sum i to the epilogue.
    __device__ __forceinline__ void give(const Epilogue &out, const float (&sums)[SUMS], int i) const {
        const T value[] = {sums[i]};
        if (inside(i)) out(at.item, row(i), column(i), index(row(i), column(i)), value);
    }
    // All of them. What it reads beside several of them is on its way before the first one is written; outside the
    // matrix the nearest element's, as a branch would keep back the reads behind it.
    __device__ __forceinline__ void give(const Epilogue &out, const float (&sums)[SUMS]) const {
        constexpr int AT_ONCE = 16 * WIDE_C;
        #pragma unroll
        for (int first = 0; first < SUMS; first += AT_ONCE) {
            Epilogue::Beside<WIDE_C> beside[AT_ONCE / WIDE_C];
            #pragma unroll
            for (int j = 0; j < AT_ONCE; j += WIDE_C) {
                const int down = min(row(first + j), m - 1), across = min(column(first + j), n - WIDE_C);
                beside[j / WIDE_C] = out.read<WIDE_C>(at.item, down, across, index(down, across));
            }
            #pragma unroll
            for (int j = 0; j < AT_ONCE; j += WIDE_C) {
                const int i = first + j;
                T value[WIDE_C];
                #pragma unroll
                for (int h = 0; h < WIDE_C; h++) value[h] = sums[i + h];
                if (inside(i)) out.write(beside[j / WIDE_C], index(row(i), column(i)), value);
            }
        }
    }
};
