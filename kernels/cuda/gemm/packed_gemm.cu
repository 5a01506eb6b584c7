// C = op(A) op(B) of large matrices on Hopper's matrix units, from operands in slabs: see sm90/wgmma.cuh, gemm/packed.cuh.
//
// One block a multiprocessor, which goes from tile to tile. A warp has the copies of the next slabs on their way; two
// warpgroups multiply, each half of the rows.
#ifndef UNIT
#define UNIT 5
#define TILE_N 128
#define TILE_STAGES 3
#define WIDE_C 1 // elements that may be written at once
#endif
#include "gemm/packed_accumulate.cuh"

// Of one thread: starts the copies for all tiles of this block.
template <int COUNT, int STAGES> __device__ __forceinline__ void bring(
    const Slabs &slabs, Stages &stages, char *shared, const Maps &maps) {
    constexpr int OF_A = Stage<COUNT>::OF_A, OF_B = Stage<COUNT>::OF_B, SIZE = Stage<COUNT>::SIZE;
    constexpr int COPIES = TAKEN < LINES ? COUNT : 1; // of a slab of op(B): of halves of slabs, one for each number
    Round<STAGES> turn;
    for (int tile = blockIdx.x; tile < slabs.tiles; tile += gridDim.x) {
        const TileAt at(tile, slabs.rows, slabs.across);
        const int column = at.across * TILE_N;
        const char *a = slabs.slab(at.item * slabs.rows + at.down, 0, COUNT);
        const char *b = slabs.slab(slabs.left + at.item * slabs.columns + column / LINES, 0, COUNT);
        b += column % LINES * (SLAB / LINES);
        for (int i = 0; i < slabs.depth; i++, turn.next()) {
            stages.empty[turn.stage].wait(turn.parity ^ 1);
            char *to = shared + turn.stage * SIZE;
            Barrier &full = stages.full[turn.stage];
            full.expect(SIZE);
            if (DIRECT_A)
                maps.a.copy(to, i * DEPTH, at.down * LINES, at.item, full);
            else
                copy_bulk<OF_A>(to, a + (int64_t)i * OF_A, full);
            if (DIRECT_B) maps.b.copy(to + OF_A, i * DEPTH, column, at.item, full);
            #pragma unroll
            for (int j = 0; j < ACROSS && !DIRECT_B; j++) {
                const char *from = b + (j * (int64_t)slabs.depth + i) * OF_A;
                #pragma unroll
                for (int p = 0; p < COPIES; p++)
                    copy_bulk<OF_B / COPIES>(to + OF_A + j * OF_B + p * (OF_B / COPIES), from + p * SLAB, full);
            }
        }
    }
}

// counts: of the elements that are left of three tiles in turn, 0 at first.
template <class Form> __device__ __forceinline__ void compute_scaled(
    const Slabs &slabs, Stages &stages, const char *shared, const Epilogue &out, int (&counts)[3]) {
    Round<Form::STAGES> turn;
    for (int tile = blockIdx.x, turns = 0; tile < slabs.tiles; tile += gridDim.x, turns++) {
        const Place place = place_of(tile, slabs);
        const Line *left = slabs.lines + place.at.item * slabs.rows * LINES;
        const Line *right = slabs.lines + (slabs.left + place.at.item * slabs.columns) * LINES + place.column0;
        Sums<Form> sums;
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
                rest.places[mine++] = place.row(i) % LINES * LINES + place.column(i) % TILE_N;
            else
                place.give(out, sums.main, i);
        }
    }
}

__device__ __forceinline__ void compute_rounded(
    const Slabs &slabs, Stages &stages, const char *shared, const Epilogue &out) {
    Round<TILE_STAGES> turn;
    for (int tile = blockIdx.x; tile < slabs.tiles; tile += gridDim.x) {
        float sums[SUMS];
        int last = 0;
        for (int i = 0; i < slabs.depth; i++) {
            stages.full[turn.stage].wait(turn.parity);
            const Stage<1> stage(shared, turn.stage);
            Started::begin();
            #pragma unroll
            for (int k = 0; k < 4; k++)
                start<(Kind)UNIT>(sums, stage.a() + k * NEXT_K, stage.b() + k * NEXT_K, i + k > 0);
            Started::end();
            Started::finished<1>();
            if (i > 0) stages.release(last);
            last = turn.stage;
            turn.next();
        }
        Started::finished<0>();
        stages.release(last);
        arrived(sums);
        place_of(tile, slabs).give(out, sums);
    }
}

KERNEL __launch_bounds__(THREADS, 1) gemm_slabs(const T *a, const T *b, const Epilogue epilogue, int64_t batch,
    int64_t m, int64_t n, int64_t k, char *scratch) {
    const Slabs slabs(batch, m, n, k, scratch);
    char *shared = (char *)(((uintptr_t)shared_bytes + 1023) / 1024 * 1024);
    __shared__ Stages stages;
    __shared__ int counts[3];
    if (threadIdx.x == 0) {
        stages.init();
        counts[0] = counts[1] = counts[2] = 0;
    }
    const bool in_pieces = UNIT == HALVES && slabs.in_pieces(); // know_lines has ended, see wait_for_inputs
    wait_for_inputs();
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        give_registers<24>();
        if (threadIdx.x > 0) return;
        Maps &maps = slabs.maps[blockIdx.x];
        if (DIRECT_A) maps.a.describe(a, k, m, batch, LINES);
        if (DIRECT_B) maps.b.describe(b, k, n, batch, TILE_N);
        if constexpr (UNIT != HALVES)
            bring<1, TILE_STAGES>(slabs, stages, shared, maps);
        else if (in_pieces)
            bring<Pieces::COUNT, Pieces::STAGES>(slabs, stages, shared, maps);
        else
            bring<Halves::COUNT, Halves::STAGES>(slabs, stages, shared, maps);
    } else {
        take_registers<240>();
        if constexpr (UNIT != HALVES)
            compute_rounded(slabs, stages, shared, epilogue);
        else if (in_pieces)
            compute_scaled<Pieces>(slabs, stages, shared, epilogue, counts);
        else
            compute_scaled<Halves>(slabs, stages, shared, epilogue, counts);
    }
}
