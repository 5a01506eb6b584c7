// Products of many rows and tiles of weights, by WGMMA in bf16x3 (sm90/bf16x3.cuh): what the kernels share, and a product.
//
// Tensor cores truncate when they add, so they sum over a section of K only (SECTION elements), the smallest products first.
// Float32 additions sum the results.
#pragma once
#include "gemm/gemm.cuh"
#include "sm90/bf16x3.cuh"
#include "sm90/tma.cuh"

// Matrices of weights, split into bfloat16 terms in the layout that wgmma reads (bf16x3), for products of many rows.
//
// A tile of 64 x 64 weights has three terms, each of 64 rows of 128 bytes with the 128-byte swizzle. So one bulk copy fetches a
// tile, and wgmma reads it as a K-major operand or as a transposed one.
//
// Along one axis of a matrix each group of 16 is permuted: position 8 s + 2 c + h holds element 4 c + 2 s + h. The axis is K of a
// product whose A operand is in registers, where each thread then has groups of four neighbours of a row. In a pair of products
// (gemm/back_to_back.cuh) it is the columns of the first one, which are K of the second one.

constexpr int WEIGHT_TILE = 64, TERM_BYTES = WEIGHT_TILE * WEIGHT_TILE * 2, TILE_BYTES = BF16X3_TERMS * TERM_BYTES;

// The element of a group of 16 that position `i` holds.
__device__ __forceinline__ int permuted(int i) { return i % 8 / 2 * 4 + i / 8 * 2 + i % 2; }

// Splits the weights of a chunk, and stores their terms in the tiles. The chunks of a matrix of `columns` columns are counted
// row by row, after the permutation.
template <int PERMUTED_AXIS>
__device__ __forceinline__ void store_tile_chunk(const float *weights, char *tiles, int columns, int chunk) {
    const int row = chunk / (columns / CHUNK_ELEMENTS), column = chunk % (columns / CHUNK_ELEMENTS) * CHUNK_ELEMENTS;
    const int from = PERMUTED_AXIS == 0 ? row / 16 * 16 + permuted(row % 16) : row;
    float x[CHUNK_ELEMENTS];
    #pragma unroll
    for (int j = 0; j < CHUNK_ELEMENTS; j += 2) {
        const int of = PERMUTED_AXIS == 1 ? column / 16 * 16 + permuted(column % 16 + j) : column + j;
        const Vector<float, 2> v = load<float, 2>(weights + (int64_t)from * columns + of);
        x[j] = v.lane[0], x[j + 1] = v.lane[1];
    }
    Chunk terms[BF16X3_TERMS];
    split_bf16x3(terms, x);
    const int tile = row / WEIGHT_TILE * (columns / WEIGHT_TILE) + column / WEIGHT_TILE;
    const int at = swizzle_128b(row % WEIGHT_TILE, column % WEIGHT_TILE / CHUNK_ELEMENTS);
    #pragma unroll
    for (int p = 0; p < BF16X3_TERMS; p++)
        *(Chunk *)(tiles + (int64_t)tile * TILE_BYTES + p * TERM_BYTES + at) = terms[p];
}

constexpr int TILE_SUMS = WEIGHT_TILE / 2;      // accumulators of a thread: 64 rows times a tile
constexpr int MMA_K = 16, SECTION = 32;         // K of an instruction, K of a section
constexpr int SECTIONS = WEIGHT_TILE / SECTION; // of a tile

// A matrix of weights and its tiles.
struct TiledWeights {
    const float *weights;
    const char *tiles;
};

// An element of a op(b) by FMA, summed from k0 to k1 of K.
template <bool TRANSPOSE> __device__ __noinline__ float dot(
    const float *a, const float *b, int n, int k, int row, int column, int k0, int k1) {
    return Operands<false, TRANSPOSE>{a, b, 0, n, k}.dot(row, column, k0, k1);
}

// The descriptor of a tile of weights, and the offset to add for another term and k. K_MAJOR: the weights are transposed.
template <bool K_MAJOR> __device__ __forceinline__ uint64_t tile_descriptor(const char *tile) {
    return K_MAJOR ? smem_descriptor(tile) : smem_descriptor(tile, 0, 8 * 128, SWIZZLE_128B);
}
template <bool K_MAJOR> __device__ __forceinline__ int tile_offset(int term, int k) {
    return (term * TERM_BYTES + (K_MAJOR ? k * 2 : k * 128)) / CHUNK_BYTES;
}

// Starts `sums` = 64 rows times a section of a tile, from row k0 of op(W) on. The first form reads the terms of the rows from
// shared memory, in the layout of a tile that is not transposed. The second one has them in registers, from word `first` on.
template <bool TRANSPOSE> __device__ __forceinline__ void multiply_section(
    float (&sums)[TILE_SUMS], const char *rows, const char *tile, int k0) {
    const uint64_t a = smem_descriptor(rows), b = tile_descriptor<TRANSPOSE>(tile);
    #pragma unroll
    for (int i = 0; i <= LOW_ORDER_PAIRS; i++) {
        const TermPair terms = i < LOW_ORDER_PAIRS ? low_order_pair(i) : TermPair{0, 0};
        #pragma unroll
        for (int k = k0; k < k0 + SECTION; k += MMA_K)
            wgmma<BFLOAT16, false, !TRANSPOSE>(
                sums, a + tile_offset<true>(terms.a, k), b + tile_offset<TRANSPOSE>(terms.b, k), i > 0 || k > k0);
    }
    wgmma_commit_group();
}
template <bool TRANSPOSE, int WORDS> __device__ __forceinline__ void multiply_section(
    float (&sums)[TILE_SUMS], const uint32_t (&rows)[BF16X3_TERMS][WORDS], int first, const char *tile, int k0) {
    const uint64_t b = tile_descriptor<TRANSPOSE>(tile);
    #pragma unroll
    for (int i = 0; i <= LOW_ORDER_PAIRS; i++) {
        const TermPair terms = i < LOW_ORDER_PAIRS ? low_order_pair(i) : TermPair{0, 0};
        #pragma unroll
        for (int k = 0; k < SECTION; k += MMA_K)
            wgmma_registers<BFLOAT16, !TRANSPOSE>(
                sums, rows[terms.a] + first + k / 4, b + tile_offset<TRANSPOSE>(terms.b, k0 + k), i > 0 || k > 0);
    }
    wgmma_commit_group();
}

// Splits four neighbours of a row into terms, as words of the A operand of WGMMA, from `word` on. The tiles must be permuted along
// K.
template <int WORDS> __device__ __forceinline__ void split_four(
    uint32_t (&rows)[BF16X3_TERMS][WORDS], int word, const Vector<float, 4> &four) {
    uint32_t terms[BF16X3_TERMS][2];
    Format<BF16X3>::convert(four.lane, terms);
    #pragma unroll
    for (int p = 0; p < BF16X3_TERMS; p++) rows[p][word] = terms[p][0], rows[p][word + 2] = terms[p][1];
}

// By one thread: copies a tile to the next stage of a ring. row and column: of the tile in op(W), which has rows x columns tiles.
template <bool TRANSPOSE, int STAGES> __device__ __forceinline__ void copy_tile(Pipeline<STAGES> &pipeline,
    PipelineState<STAGES> &state, char *ring, const char *tiles, int row, int column, int rows, int columns) {
    pipeline.wait_empty(state);
    Mbarrier &full = pipeline.full[state.stage];
    full.arrive_expect_tx(TILE_BYTES);
    const int at = TRANSPOSE ? column * rows + row : row * columns + column;
    bulk_copy<TILE_BYTES>(ring + state.stage * TILE_BYTES, tiles + (int64_t)at * TILE_BYTES, full);
    state.advance();
}

// Y = epilogue(X op(W)) for many rows, in bf16x3, with tiles of weights.
//
// A block computes 128 rows and some of the columns. Two warpgroups have 64 rows each. They load their rows into registers, two
// sections of K ahead, and split the next section while the tensor cores multiply the current one. A thread of a third warpgroup
// copies tiles of weights, which both warpgroups read.

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
