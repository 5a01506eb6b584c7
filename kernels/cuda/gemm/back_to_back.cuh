// Y = f(X op(W1)) op(W2): two products in one kernel (a back-to-back GEMM, CUTLASS), in bf16x3 (sm90/bf16x3.cuh). f is an
// epilogue. Its results stay in registers, as the A operand of the second product. The columns between the products are called
// hidden.
//
// A cluster of two blocks takes 128 rows. Each block computes half of the hidden columns, and its part of Y from these; then
// the blocks exchange parts. In a block two warpgroups have 64 rows each. The terms of their rows of X are in shared memory. A
// thread of a third warpgroup copies tiles of weights (gemm/tile_products.cuh), which both warpgroups read. They take turns:
// one multiplies while the other runs its epilogue.
#pragma once
#include "gemm/tile_products.cuh"
#include "sm90/cluster.cuh"

// `exchanged`: the other block has stored its part of the result.
template <int STAGES> struct PairBarriers {
    Pipeline<STAGES> pipeline;
    Mbarrier exchanged;
};

// INPUTS: K of the first product. HIDDEN, OUTPUTS: columns of the two products. TRANSPOSE_1, TRANSPOSE_2: whether op transposes.
template <int INPUTS, int HIDDEN, int OUTPUTS, bool TRANSPOSE_1, bool TRANSPOSE_2> struct BackToBack {
    static constexpr int ROWS = 64, WARPGROUPS = 2, CONSUMERS = WARPGROUPS * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
    static constexpr int K_TILES = INPUTS / WEIGHT_TILE, N_TILES = OUTPUTS / WEIGHT_TILE;
    static constexpr int HIDDEN_TILES = HIDDEN / WEIGHT_TILE / CLUSTER; // tiles of the hidden columns of a block
    static constexpr int SUMS = TILE_SUMS, WORDS = SUMS / 2; // of a thread: accumulators of a tile, words of a term of it
    // Sections of a turn: of the second product, and of both products.
    static constexpr int SECOND_SECTIONS = N_TILES * SECTIONS, ALL_SECTIONS = SECOND_SECTIONS + K_TILES * SECTIONS;

    static constexpr int MULTIPLIED = 5; // the named barrier after both warpgroups have multiplied their rows of X

    // Shared memory: the terms of the rows of each warpgroup, a ring of tiles, barriers.
    static constexpr int STAGES = 5, ROWS_BYTES = K_TILES * TILE_BYTES, RING = WARPGROUPS * ROWS_BYTES;
    static constexpr int BARRIERS = RING + STAGES * TILE_BYTES, BARRIER_BYTES = 256, SHARED = BARRIERS + BARRIER_BYTES;
    typedef PairBarriers<STAGES> Barriers;
    static_assert(sizeof(Barriers) <= BARRIER_BYTES, "the barriers fit");

    char *shared;
    int rank, warpgroup;
    Barriers &barriers;
    Pipeline<STAGES> &pipeline;
    PipelineState<STAGES> state;

    __device__ BackToBack()
        : shared((char *)own_shared()), rank(cluster_rank()), warpgroup(__shfl_sync(~0u, threadIdx.x / WARPGROUP, 0)),
          barriers(*(Barriers *)(own_shared() + BARRIERS)), pipeline(barriers.pipeline) {
        if (threadIdx.x == 0) {
            pipeline.init(1, CONSUMERS / WARP);
            barriers.exchanged.init(1);
            fence_mbarrier_init();
        }
        __syncthreads();
    }

    __device__ __forceinline__ char *stage(int i) const { return shared + RING + i * TILE_BYTES; }

    // By the third warpgroup: copies the tiles in the order in which a warpgroup multiplies.
    __device__ __forceinline__ void copy(const char *first, const char *second) {
        if (threadIdx.x != CONSUMERS) return;
        #pragma unroll 1 // few registers
        for (int i = 0; i <= HIDDEN_TILES; i++) {
            const int of_first = rank * HIDDEN_TILES + i, of_second = of_first - 1;
            #pragma unroll 1
            for (int j = 0; j < N_TILES && i > 0; j++)
                copy_tile<TRANSPOSE_2>(pipeline, state, shared + RING, second, of_second, j, HIDDEN / WEIGHT_TILE, N_TILES);
            #pragma unroll 1
            for (int j = 0; j < K_TILES && i < HIDDEN_TILES; j++)
                copy_tile<TRANSPOSE_1>(pipeline, state, shared + RING, first, j, of_first, K_TILES, HIDDEN / WEIGHT_TILE);
        }
    }

    // Splits the rows of a warpgroup, from row0 on, into shared memory.
    __device__ __forceinline__ void split_rows(const float *x, int row0) const {
        constexpr int ROW_CHUNKS = INPUTS / CHUNK_ELEMENTS, COUNT = ROWS * ROW_CHUNKS / WARPGROUP, VECTORS = CHUNK_ELEMENTS / VECTOR;
        const auto row = [](int i) { return (i * WARPGROUP + threadIdx.x % WARPGROUP) / ROW_CHUNKS; };
        const int chunk = threadIdx.x % ROW_CHUNKS;
        Vector<float, VECTOR> found[COUNT][VECTORS];
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            #pragma unroll
            for (int h = 0; h < VECTORS; h++)
                found[i][h] = load<float, VECTOR>(x + (int64_t)(row0 + row(i)) * INPUTS + chunk * CHUNK_ELEMENTS + h * VECTOR);
        }
        constexpr int TILE_CHUNKS = WEIGHT_TILE / CHUNK_ELEMENTS;
        char *const to = shared + warpgroup * ROWS_BYTES + chunk / TILE_CHUNKS * TILE_BYTES;
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float eight[CHUNK_ELEMENTS];
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) eight[j] = found[i][j / VECTOR].lane[j % VECTOR];
            Chunk terms[BF16X3_TERMS];
            split_bf16x3(terms, eight);
            #pragma unroll
            for (int p = 0; p < BF16X3_TERMS; p++)
                *(Chunk *)(to + p * TERM_BYTES + swizzle_128b(row(i), chunk % TILE_CHUNKS)) = terms[p];
        }
        fence_proxy_async();
        named_barrier_sync(WARPGROUP, 1 + warpgroup);
    }

    __device__ __forceinline__ void begin_turn() const {
        named_barrier_sync(CONSUMERS, 3 + warpgroup);
    }
    __device__ __forceinline__ void end_turn() const {
        named_barrier_arrive(CONSUMERS, 4 - warpgroup);
    }

    // By each of the first two warpgroups. `inner`, the epilogue of the first product, stores its outputs and returns the one that
    // is multiplied by W2. `multiplied` is that output in global memory: sums that are not finite are recomputed from it. `outer`
    // is the epilogue of the second product.
    template <class Inner, class Outer> __device__ __forceinline__ void compute(const float *x, const TiledWeights &first,
        const TiledWeights &second, const float *multiplied, const Inner &inner, const Outer &outer, int row0) {
        float result[N_TILES][SUMS] = {}, hidden[SUMS], section_sums[2][SUMS];
        uint32_t rows[BF16X3_TERMS][WORDS];
        if (warpgroup == 1) end_turn(); // the first turn is that of warpgroup 0
        split_rows(x, row0);
        const int lane_row = row0 + accumulator_row(0), lane_column = accumulator_column(0);
        #pragma unroll 1
        for (int i = 0; i <= HIDDEN_TILES; i++) { // a turn: the second product of tile i - 1, then the first of i
            const int column0 = (rank * HIDDEN_TILES + i) * WEIGHT_TILE;
            typename Inner::template Aux<4> aux[SUMS / 4];
            int last_stage = 0; // of the section before the current one
            const auto add_section = [&](int g) { // adds the sums of section g
                if (g % SECTIONS == SECTIONS - 1) arrive_per_warp(pipeline.empty[last_stage]);
                wgmma_fence_operand(section_sums[g % 2]);
                #pragma unroll
                for (int j = 0; j < SUMS; j++)
                    if (g < SECOND_SECTIONS)
                        result[g / SECTIONS][j] += section_sums[g % 2][j];
                    else
                        hidden[j] = g == SECOND_SECTIONS ? section_sums[g % 2][j] : hidden[j] + section_sums[g % 2][j];
            };
            begin_turn();
            #pragma unroll
            for (int g = 0; g < ALL_SECTIONS; g++) {
                if (g < SECOND_SECTIONS ? i == 0 : i == HIDDEN_TILES) continue;
                const int k0 = g % SECTIONS * SECTION;
                if (k0 == 0) pipeline.wait_full(state);
                wgmma_fence();
                if (g < SECOND_SECTIONS)
                    multiply_section<TRANSPOSE_2>(section_sums[g % 2], rows, k0 / 4, stage(state.stage), k0);
                else
                    multiply_section<TRANSPOSE_1>(section_sums[g % 2],
                        shared + warpgroup * ROWS_BYTES + (g - SECOND_SECTIONS) / SECTIONS * TILE_BYTES, stage(state.stage), k0);
                if (g > (i == 0 ? SECOND_SECTIONS : 0)) {
                    wgmma_wait_group<1>();
                    add_section(g - 1);
                }
                last_stage = state.stage;
                if (g % SECTIONS == SECTIONS - 1) state.advance();
            }
            if (i == HIDDEN_TILES) {
                named_barrier_arrive(THREADS, MULTIPLIED);
                cluster_arrive_relaxed(); // the third warpgroup's arrival orders the reads of the rows
                if (warpgroup == 0) end_turn();
                wgmma_wait_group<0>();
                add_section(SECOND_SECTIONS - 1);
                break;
            }
            const auto index = [&](int j) { // of four neighbouring hidden columns
                return (int64_t)(lane_row + j % 2 * 8) * HIDDEN + column0 + j / 2 * 16 + threadIdx.x % 4 * 4;
            };
            #pragma unroll
            for (int j = 0; j < SUMS / 4; j++)
                aux[j] = inner.template load_aux<4>(
                    0, lane_row + j % 2 * 8, column0 + j / 2 * 16 + threadIdx.x % 4 * 4, index(j));
            end_turn();
            wgmma_wait_group<0>();
            add_section(ALL_SECTIONS - 1);
            recompute_non_finite(hidden, [&](int j) {
                return dot<TRANSPOSE_1>(x, first.weights, HIDDEN, INPUTS, lane_row + j / 2 % 2 * 8,
                    column0 + j / 8 * 16 + threadIdx.x % 4 * 4 + j / 4 % 2 * 2 + j % 2, 0, INPUTS);
            });
            #pragma unroll
            for (int j = 0; j < SUMS / 4; j++) {
                const int at = j / 2 * 8 + j % 2 * 2, word = at / 2;
                const float sums[] = {hidden[at], hidden[at + 1], hidden[at + 4], hidden[at + 5]};
                split_four(rows, word, inner.write(aux[j], index(j), sums));
            }
        }
        __syncwarp(); // the lanes of a row have stored its hidden columns
        #pragma unroll
        for (int tile = 0; tile < N_TILES; tile++)
            recompute_non_finite(result[tile], [&](int j) {
                constexpr int OWN = HIDDEN_TILES * WEIGHT_TILE;
                return dot<TRANSPOSE_2>(multiplied, second.weights, OUTPUTS, HIDDEN, lane_row + j / 2 % 2 * 8,
                    tile * WEIGHT_TILE + lane_column + j / 4 * 8 + j % 2, rank * OWN, (rank + 1) * OWN);
            });
        store_result(result, outer, lane_row + rank * 8, lane_column);
    }

    // Adds the parts of the two blocks. Of each 16 rows, block 0 stores the first eight and block 1 the last eight.
    template <class Outer> __device__ __forceinline__ void store_result(
        const float (&result)[N_TILES][SUMS], const Outer &outer, int row, int lane_column) const {
        constexpr int PAIRS = N_TILES * SUMS / 4;
        typename Outer::template Aux<2> aux[PAIRS];
        float own[PAIRS][2];
        Vector<float, 2> *const exchanged = (Vector<float, 2> *)shared + threadIdx.x;
        #pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int column = i * 8 + lane_column;
            aux[i] = outer.template load_aux<2>(0, row, column, (int64_t)row * OUTPUTS + column);
        }
        cluster_wait(); // the rows of both blocks have been multiplied, so st.async may overwrite them
        #pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int at = i * 4 % SUMS, tile = i * 4 / SUMS;
            float sent[2];
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                const float upper = result[tile][at + h], lower = result[tile][at + 2 + h];
                own[i][h] = rank == 0 ? upper : lower;
                sent[h] = rank == 0 ? lower : upper;
            }
            store_async(exchanged + i * CONSUMERS, 1 - rank, Vector<float, 2>{sent[0], sent[1]}, barriers.exchanged);
        }
        wait_for_cluster(barriers.exchanged, 0);
        #pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const Vector<float, 2> other = exchanged[i * CONSUMERS];
            const float pair[] = {own[i][0] + other.lane[0], own[i][1] + other.lane[1]};
            outer.write(aux[i], (int64_t)row * OUTPUTS + i * 8 + lane_column, pair);
        }
    }

    template <class Inner, class Outer> __device__ __forceinline__ void run(
        const float *x, const TiledWeights &first, const TiledWeights &second, const float *multiplied,
        const Inner &inner, const Outer &outer) {
        static_assert(registers_suffice(WARPGROUP, 24, CONSUMERS, 240), "a multiprocessor has enough registers");
        if (threadIdx.x == CONSUMERS) barriers.exchanged.arrive_expect_tx(CONSUMERS * N_TILES * SUMS / 2 * sizeof(float));
        if (warpgroup < WARPGROUPS) {
            warpgroup_reg_alloc<240>();
            compute(x, first, second, multiplied, inner, outer, (blockIdx.x / CLUSTER * WARPGROUPS + warpgroup) * ROWS);
        } else {
            warpgroup_reg_dealloc<24>();
            copy(first.tiles, second.tiles);
            __syncwarp();
            named_barrier_sync(THREADS, MULTIPLIED);
            cluster_arrive(); // without stores of its own this warpgroup waits for none
            cluster_wait();
        }
    }
};
