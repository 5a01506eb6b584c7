// Y = epilogue(X op(W)) for many rows, in bf16x3, with tiles of weights (gemm/tile_products.cuh).
//
// A block computes 128 rows and some of the columns. Two warpgroups have 64 rows each. They load their rows into registers, two
// sections of K ahead, and split the next section while the tensor cores multiply the current one. A thread of a third warpgroup
// copies tiles of weights, which both warpgroups read.
#pragma once
#include "gemm/tile_products.cuh"

// INPUTS: K. OUTPUTS: columns. COLUMN_SPLITS: the number of blocks that divide the columns. TRANSPOSE: whether op transposes.
template <int INPUTS, int OUTPUTS, int COLUMN_SPLITS, bool TRANSPOSE> struct TiledProduct {
    static constexpr int ROWS = 64, WARPGROUPS = 2, CONSUMERS = WARPGROUPS * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
    static constexpr int K_TILES = INPUTS / WEIGHT_TILE, N_TILES = OUTPUTS / WEIGHT_TILE, OWN_TILES = N_TILES / COLUMN_SPLITS;
    static constexpr int ALL_SECTIONS = K_TILES * SECTIONS;
    static constexpr int WORDS = SECTION / 4; // of a term of a section, of a thread
    static_assert(SECTIONS == 2, "the sections of a tile alternate between registers");

    // Shared memory: a ring of tiles, barriers.
    static constexpr int STAGES = 4, BARRIERS = STAGES * TILE_BYTES, BARRIER_BYTES = 256, SHARED = BARRIERS + BARRIER_BYTES;
    static_assert(sizeof(Pipeline<STAGES>) <= BARRIER_BYTES, "the barriers fit");

    // A section of a thread's rows: of each group of 16 elements of K, a thread has four neighbours of two rows.
    typedef Vector<float, 4> Section[SECTION / 16][2];

    Pipeline<STAGES> &pipeline;
    PipelineState<STAGES> state;
    int warpgroup, first_tile; // first_tile: of the block's columns

    __device__ TiledProduct()
        : pipeline(*(Pipeline<STAGES> *)(shared_bytes + BARRIERS)),
          warpgroup(__shfl_sync(~0u, threadIdx.x / WARPGROUP, 0)), first_tile(blockIdx.x % COLUMN_SPLITS * OWN_TILES) {
        pipeline.start(1, CONSUMERS / WARP);
    }

    // By the third warpgroup: copies the tiles in the order in which the others multiply.
    __device__ __forceinline__ void copy(const char *tiles) {
        if (threadIdx.x != CONSUMERS) return;
        #pragma unroll 1 // few registers
        for (int i = 0; i < OWN_TILES; i++)
            #pragma unroll 1
            for (int j = 0; j < K_TILES; j++)
                copy_tile<TRANSPOSE>(pipeline, state, (char *)shared_bytes, tiles, j, first_tile + i, K_TILES, N_TILES);
    }

    static __device__ __forceinline__ void load_section(Section &section, const float *rows, int k) {
        #pragma unroll
        for (int i = 0; i < SECTION / 16; i++)
            #pragma unroll
            for (int h = 0; h < 2; h++) section[i][h] = load<float, 4>(rows + h * 8 * INPUTS + k + i * 16);
    }
    static __device__ __forceinline__ void split(uint32_t (&terms)[BF16X3_TERMS][WORDS], const Section &section) {
        #pragma unroll
        for (int i = 0; i < SECTION / 16; i++)
            #pragma unroll
            for (int h = 0; h < 2; h++) split_four(terms, i * 4 + h, section[i][h]);
    }

    // By each of the first two warpgroups.
    template <class Out> __device__ __forceinline__ void compute(
        const float *x, const TiledWeights &w, const Out &out, int row0) {
        float result[TILE_SUMS], section_sums[2][TILE_SUMS];
        uint32_t terms[2][BF16X3_TERMS][WORDS];
        Section sections[2]; // loaded, not split yet
        const int row = row0 + accumulator_row(0);
        const float *const rows = x + (int64_t)row * INPUTS + threadIdx.x % 4 * 4;
        int k = SECTION; // of the next section to load
        const auto load_next = [&](Section &section) {
            load_section(section, rows, k);
            k = k + SECTION == INPUTS ? 0 : k + SECTION;
        };
        load_section(sections[0], rows, 0);
        load_next(sections[1]);
        split(terms[0], sections[0]);
        load_next(sections[0]);
        #pragma unroll 1
        for (int i = 0; i < OWN_TILES; i++) {
            const int column0 = (first_tile + i) * WEIGHT_TILE;
            int last_stage = 0; // of the section before the current one
            const auto add_section = [&](int g) { // adds the sums of section g to the result
                if (g % SECTIONS == SECTIONS - 1) arrive_per_warp(pipeline.empty[last_stage]);
                wgmma_fence_operand(section_sums[g % 2]);
                #pragma unroll
                for (int j = 0; j < TILE_SUMS; j++) result[j] = g == 0 ? section_sums[0][j] : result[j] + section_sums[g % 2][j];
            };
            #pragma unroll
            for (int g = 0; g < ALL_SECTIONS; g++) {
                if (g % SECTIONS == 0) pipeline.wait_full(state);
                wgmma_fence();
                multiply_section<TRANSPOSE>(section_sums[g % 2], terms[g % 2], 0,
                    (const char *)shared_bytes + state.stage * TILE_BYTES, g % SECTIONS * SECTION);
                if (g > 0) {
                    wgmma_wait_group<1>();
                    add_section(g - 1);
                }
                split(terms[1 - g % 2], sections[1 - g % 2]);
                load_next(sections[1 - g % 2]);
                last_stage = state.stage;
                if (g % SECTIONS == SECTIONS - 1) state.advance();
            }
            const auto index = [&](int j) { return (int64_t)(row + j / 2 % 2 * 8) * OUTPUTS + column0 + accumulator_column(j); };
            wgmma_wait_group<0>();
            add_section(ALL_SECTIONS - 1);
            recompute_non_finite(result, [&](int j) {
                return dot<TRANSPOSE>(
                    x, w.weights, OUTPUTS, INPUTS, row + j / 2 % 2 * 8, column0 + accumulator_column(j), 0, INPUTS);
            });
            typename Out::template Aux<2> aux[TILE_SUMS / 2];
            #pragma unroll
            for (int j = 0; j < TILE_SUMS; j += 2)
                aux[j / 2] = out.template load_aux<2>(0, row + j / 2 % 2 * 8, column0 + accumulator_column(j), index(j));
            #pragma unroll
            for (int j = 0; j < TILE_SUMS; j += 2) {
                const float pair[] = {result[j], result[j + 1]};
                out.write(aux[j / 2], index(j), pair);
            }
        }
    }

    template <class Out> __device__ __forceinline__ void run(const float *x, const TiledWeights &w, const Out &out) {
        static_assert(registers_suffice(WARPGROUP, 24, CONSUMERS, 240), "a multiprocessor has enough registers");
        if (warpgroup < WARPGROUPS) {
            warpgroup_reg_alloc<240>();
            compute(x, w, out, (blockIdx.x / COLUMN_SPLITS * WARPGROUPS + warpgroup) * ROWS);
        } else {
            warpgroup_reg_dealloc<24>();
            copy(w.tiles);
        }
    }
};
