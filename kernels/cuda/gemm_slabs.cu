// C = op(A) op(B) of large matrices on Hopper's matrix units, from operands in slabs: see wgmma.cuh, slabs.cuh.
//
// One block a multiprocessor, which goes from tile to tile. A warp has the copies of the next slabs on their way; two
// warpgroups multiply, each half of the rows.
//
// HALVES: high x high, products that are exact, is summed by the matrix units over 64 k and from there on by float32
// additions, as the matrix units cut bits off where they add; high x low and low x high have sums of their own, which
// count 2^-11. An element is left to gemm_rest.cu, which computes it in plain float32, where that may be more exact:
// - it is not finite;
// - what small elements have lost may show in it (Line::floor);
// - few products make it, of sparse lines or with one huge element (Line::share): then a chain has little to round;
// - its running sum has stayed small over the first k (Line::level): where neighbours cancel, a chain of multiply-adds
//   has next to nothing to round, while here the last bits of the operands are missing.
#ifndef UNIT
#define UNIT 5
#define TILE_STAGES 3
#define WIDE_C 1 // elements that may be written at once
#endif
#include "gemm.cuh"
#include "slabs.cuh"

constexpr int SUMS = ACROSS * 64; // that a thread has of a tile
constexpr int CONSUMERS = 2 * WARPGROUP, THREADS = WARPGROUP + CONSUMERS;
constexpr int WATCHED = 16; // slabs of k over which running sums are watched
constexpr int OF_A = COUNT * SLAB, STAGE = (1 + ACROSS) * OF_A;

struct Stages {
    Barrier full[TILE_STAGES], empty[TILE_STAGES];

    __device__ void init() {
        for (int i = 0; i < TILE_STAGES; i++) {
            full[i].init(1);
            empty[i].init(CONSUMERS / WARP);
        }
        show_barriers();
    }
};

// Goes round the stages.
struct Turn {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == TILE_STAGES) stage = 0, parity ^= 1;
    }
};

// A warp has read a stage.
__device__ __forceinline__ void release(Stages &stages, int stage) {
    if (threadIdx.x % WARP == 0) stages.empty[stage].arrive();
}

// Of one thread: starts the copies for all tiles of this block.
__device__ __forceinline__ void bring(const Slabs &slabs, Stages &stages, char *shared) {
    Turn turn;
    for (int tile = blockIdx.x; tile < slabs.tiles; tile += gridDim.x) {
        const TileAt at(tile, slabs.rows, slabs.columns / ACROSS);
        const char *a = slabs.slab(at.item * slabs.rows + at.down, 0);
        const char *b = slabs.slab(slabs.left + at.item * slabs.columns + at.across * ACROSS, 0);
        for (int i = 0; i < slabs.depth; i++, turn.next()) {
            stages.empty[turn.stage].wait(turn.parity ^ 1);
            char *to = shared + turn.stage * STAGE;
            Barrier &full = stages.full[turn.stage];
            full.expect(STAGE);
            copy_bulk<OF_A>(to, a + i * OF_A, full);
            #pragma unroll
            for (int j = 0; j < ACROSS; j++)
                copy_bulk<OF_A>(to + (1 + j) * OF_A, b + (j * (int64_t)slabs.depth + i) * OF_A, full);
        }
    }
}

// The elements of a tile that a thread of a warpgroup holds.
struct Place {
    TileAt at;
    int m, n, row0, column0;

    __device__ Place(int tile, const Slabs &slabs)
        : at(tile, slabs.rows, slabs.columns / ACROSS), m(slabs.m), n(slabs.n) {
        row0 = at.down * LINES + (threadIdx.x / WARPGROUP - 1) * 64;
        column0 = at.across * (ACROSS * LINES);
    }
    __device__ __forceinline__ int row(int i) const { return row0 + sum_row(i); }
    __device__ __forceinline__ int column(int i) const { return column0 + sum_column(i); }

    // Hands WIDE of the sums, from i on, to the epilogue; or all of them.
    template <int WIDE> __device__ __forceinline__ void give(
        const Epilogue &out, const float (&sums)[SUMS], int i) const {
        if (row(i) >= m || column(i) >= n) return;
        T value[WIDE];
        #pragma unroll
        for (int h = 0; h < WIDE; h++) value[h] = sums[i + h];
        out(at.item, row(i), column(i), (at.item * m + row(i)) * n + column(i), value);
    }
    __device__ __forceinline__ void give(const Epilogue &out, const float (&sums)[SUMS]) const {
        #pragma unroll
        for (int i = 0; i < SUMS; i += WIDE_C) give<WIDE_C>(out, sums, i);
    }
};

// The sums of a tile by HALVES. small: a bit for each that has stayed below its row's level while it was watched.
struct Sums {
    float main[SUMS], beside[SUMS];
    uint32_t small[SUMS / 32];

    __device__ __forceinline__ void multiply(Stages &stages, Turn &turn, const char *shared, int depth,
        const float (&level)[2]) {
        float high[SUMS];
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = 0;
        small[0] = small[1] = ~0u;
        int last = 0;
        for (int i = 0; i < depth; i++) {
            stages.full[turn.stage].wait(turn.parity);
            const char *stage = shared + turn.stage * STAGE;
            const uint64_t a = described(stage + (threadIdx.x / WARPGROUP - 1) * (SLAB / 2));
            const uint64_t b = described(stage + OF_A);
            constexpr int TO_LOW = SLAB >> 4;
            Started::begin();
            #pragma unroll
            for (int k = 0; k < 4; k++) start<HALVES>(high, a + k * NEXT_K, b + k * NEXT_K, k > 0);
            Started::end();
            Started::finished<1>();
            if (i > 0) release(stages, last);
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                start<HALVES>(beside, a + k * NEXT_K, b + TO_LOW + k * NEXT_K, i + k > 0);
                start<HALVES>(beside, a + TO_LOW + k * NEXT_K, b + k * NEXT_K, true);
            }
            Started::end();
            Started::finished<1>();
            arrived(high);
            #pragma unroll
            for (int j = 0; j < SUMS; j++) main[j] += high[j];
            if (i < WATCHED) {
                #pragma unroll
                for (int j = 0; j < SUMS; j++) {
                    if (fabsf(main[j]) >= level[j / 2 % 2]) small[j / 32] &= ~(1u << j % 32);
                }
            }
            last = turn.stage;
            turn.next();
        }
        Started::finished<0>();
        arrived(beside);
        release(stages, last);
    }

    // Scales the sums back. A bit for each that is left to gemm_rest.cu.
    __device__ __forceinline__ uint64_t finish(const Place &place, const Line (&rows)[2], const Line *columns) {
        auto &again = small;
        #pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const Line &row = rows[i / 2 % 2], &column = columns[sum_column(i)];
            const uint32_t bit = 1u << i % 32;
            const float sum = main[i] + beside[i] * LOW;
            main[i] = sum * row.down * column.down;
            if (sum == 0) again[i / 32] &= ~bit;
            const bool large = fabsf(sum) >= row.floor + column.floor, many = row.share * column.share >= 1;
            if (!(large && many && fabsf(main[i]) < INFINITY)) again[i / 32] |= bit;
        }
        if (again[0] | again[1]) { // seldom; beyond the ends of the matrix, too, there may be some
            #pragma unroll
            for (int i = 0; i < SUMS; i++)
                if (place.row(i) >= place.m || place.column(i) >= place.n) again[i / 32] &= ~(1u << i % 32);
        }
        return (uint64_t)again[1] << 32 | again[0];
    }
};

// counts: of the elements that are left of three tiles in turn, 0 at first.
__device__ __forceinline__ void compute_halves(
    const Slabs &slabs, Stages &stages, const char *shared, const Epilogue &out, int (&counts)[3]) {
    Turn turn;
    for (int tile = blockIdx.x, turns = 0; tile < slabs.tiles; tile += gridDim.x, turns++) {
        const Place place(tile, slabs);
        const Line *left = slabs.lines + place.at.item * slabs.rows * LINES;
        const Line *right = slabs.lines + (slabs.left + place.at.item * slabs.columns) * LINES + place.column0;
        Sums sums;
        sums.multiply(stages, turn, shared, slabs.depth, {left[place.row(0)].level, left[place.row(2)].level});
        const Line rows[2] = {left[place.row(0)], left[place.row(2)]};
        const uint64_t again = sums.finish(place, rows, right);

        int &count = counts[turns % 3];
        int mine = again ? atomicAdd(&count, __popcll(again)) : 0;
        meet(CONSUMERS);
        const int all = count;
        Rest &rest = slabs.rests[tile];
        if (threadIdx.x == WARPGROUP) {
            counts[(turns + 2) % 3] = 0; // all have read the last one; it is added to after the next meeting
            rest.count = all;
        }
        if (all > LISTED) continue;
        if (again == 0) {
            place.give(out, sums.main);
            continue;
        }
        #pragma unroll
        for (int i = 0; i < SUMS; i++) {
            if (again >> i & 1)
                rest.places[mine++] = place.row(i) % LINES * LINES + place.column(i) % LINES;
            else
                place.give<1>(out, sums.main, i);
        }
    }
}

__device__ __forceinline__ void compute_rounded(
    const Slabs &slabs, Stages &stages, const char *shared, const Epilogue &out) {
    Turn turn;
    for (int tile = blockIdx.x; tile < slabs.tiles; tile += gridDim.x) {
        float sums[SUMS];
        int last = 0;
        for (int i = 0; i < slabs.depth; i++) {
            stages.full[turn.stage].wait(turn.parity);
            const char *stage = shared + turn.stage * STAGE;
            const uint64_t a = described(stage + (threadIdx.x / WARPGROUP - 1) * (SLAB / 2));
            const uint64_t b = described(stage + OF_A);
            Started::begin();
            #pragma unroll
            for (int k = 0; k < 4; k++) start<(Kind)UNIT>(sums, a + k * NEXT_K, b + k * NEXT_K, i + k > 0);
            Started::end();
            Started::finished<1>();
            if (i > 0) release(stages, last);
            last = turn.stage;
            turn.next();
        }
        Started::finished<0>();
        release(stages, last);
        arrived(sums);
        Place(tile, slabs).give(out, sums);
    }
}

KERNEL __launch_bounds__(THREADS, 1) gemm_slabs(const T *a, const T *b, const Epilogue epilogue, int64_t batch,
    int64_t m, int64_t n, int64_t k, char *scratch) {
    wait_for_inputs();
    const Slabs slabs(batch, m, n, k, scratch);
    char *shared = (char *)(((uintptr_t)shared_bytes + 1023) / 1024 * 1024);
    __shared__ Stages stages;
    __shared__ int counts[3];
    if (threadIdx.x == 0) {
        stages.init();
        counts[0] = counts[1] = counts[2] = 0;
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        give_registers<24>();
        if (threadIdx.x == 0) bring(slabs, stages, shared);
    } else {
        take_registers<240>();
        if (UNIT == HALVES)
            compute_halves(slabs, stages, shared, epilogue, counts);
        else
            compute_rounded(slabs, stages, shared, epilogue);
    }
}
