// The gradients of a linear layer and the update of its weights, which are read once (Ampere and later). Each block has COLUMNS
// inputs of the layer, for all its units: it computes the gradient of these inputs, and of their weights.
//
// Products are mma.sync in float16. A scaled float32 is the sum of two float16 terms (fp16x2), and three of the four products of
// terms are added. The gradient of the outputs is scaled by a factor for each example, then by one for each unit. The inputs are
// multiplied by the inverse scales of the examples, then scaled by a factor for each input. A tile of weights is multiplied by the
// inverse scales of its units, then scaled by one factor.
//
// Tiles of weights are those of gemm/weight_tile.cuh. Two neighbouring columns of the first product of a tile are inputs 4c and
// 4c + 1, and of the second one 4c + 2 and 4c + 3.
#pragma once
#include "common/rounding.cuh"
#include "gemm/weight_tile.cuh"

extern __shared__ __align__(16) unsigned char shared_bytes[];

template <int BATCH, int UNITS, int INPUTS, int COLUMNS, int STATES> struct LayerBackward {
    typedef Vector<float, 4> Four;
    typedef Vector<uint32_t, 2> Pairs; // four float16
    static constexpr int TERMS = 2, WARPS = THREADS / WARP, ROW_TILES = BATCH / 16, UNIT_TILES = UNITS / 16;
    static constexpr int INPUT_TILES = COLUMNS / 16, GROUPS = WARPS / INPUT_TILES; // a group has every GROUPS-th tile of units
    static_assert(BATCH % 16 == 0 && UNITS % 16 == 0 && COLUMNS % 16 == 0 && GROUPS * INPUT_TILES == WARPS, "whole tiles");
    static_assert(UNITS / 4 <= THREADS, "a thread has four units");

    // Bytes of a row of terms. It begins 16 bytes after a multiple of 128, so that ldmatrix has no bank conflicts.
    static __device__ constexpr int pitch(int columns) { return columns * 2 + (16 - columns * 2 % 128 + 128) % 128; }
    static constexpr int GRADIENT_PITCH = pitch(UNITS), INPUT_PITCH = pitch(COLUMNS);
    // Bytes of shared memory. PARTIAL_SUMS: of the gradient of the inputs. They replace the gradient of the outputs.
    static constexpr int GRADIENT_BYTES = TERMS * BATCH * GRADIENT_PITCH, PARTIAL_SUMS = GROUPS * BATCH * COLUMNS * 4;
    static constexpr int WORKSPACE = GRADIENT_BYTES > PARTIAL_SUMS ? GRADIENT_BYTES : PARTIAL_SUMS;
    static constexpr int INPUT_BYTES = TERMS * BATCH * INPUT_PITCH, SHARED = WORKSPACE + INPUT_BYTES + (UNITS + COLUMNS + BATCH) * 4;
    static constexpr int UNIT_MAXIMA = 0, INPUT_MAXIMA = UNITS, EXAMPLE_MAXIMA = UNITS + COLUMNS; // indices of `maxima`

    char *const gradient_terms; // of the outputs; afterwards partial sums of the gradient of the inputs
    char *const input_terms; // in a tile, the inputs of the first product come first
    uint32_t *const maxima; // bits of the largest magnitudes: of the gradients of units, of inputs of the block, of examples
    const int first_input, input_tile, group, lane, g, c; // first_input: of the block. input_tile: of this warp, in the block

    __device__ explicit LayerBackward(int first_input)
        : gradient_terms((char *)shared_bytes), input_terms(gradient_terms + WORKSPACE),
          maxima((uint32_t *)(input_terms + INPUT_BYTES)), first_input(first_input), input_tile(threadIdx.x / WARP % INPUT_TILES), group(threadIdx.x / WARP / INPUT_TILES),
          lane(threadIdx.x % WARP), g(lane / 4), c(lane % 4) {}

    // The scale that belongs to maximum i.
    __device__ __forceinline__ Scale scale(int i) const { return Scale(__uint_as_float(maxima[i])); }

    // The terms of four numbers times their factors.
    static __device__ __forceinline__ void split(const Four &x, const float (&factors)[4], Pairs (&terms)[TERMS]) {
        #pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            uint32_t pair_terms[TERMS];
            split_terms<FLOAT16>(x.lane[2 * pair] * factors[2 * pair], x.lane[2 * pair + 1] * factors[2 * pair + 1], pair_terms);
            #pragma unroll
            for (int term = 0; term < TERMS; term++) terms[term].lane[pair] = pair_terms[term];
        }
    }

    // Calls visit(example, column, four numbers) for the numbers of this thread, of a matrix (BATCH, COUNT). They are multiplied by
    // the scale of the example, or if INVERSE by the inverse scale. A thread has the same columns of all its examples.
    template <int COUNT, bool INVERSE, class Visit> __device__ __forceinline__ void for_each_vector(
        const float *from, int row_length, const Visit &visit) const {
        constexpr int ROW_THREADS = COUNT / 4, ROWS_AT_ONCE = THREADS / ROW_THREADS;
        const int column = threadIdx.x % ROW_THREADS * 4;
        if (threadIdx.x >= ROW_THREADS * ROWS_AT_ONCE) return;
        #pragma unroll 4
        for (int row = threadIdx.x / ROW_THREADS; row < BATCH; row += ROWS_AT_ONCE) {
            Four x = ::load<float, 4>(from + row * row_length + column);
            const Scale example_scale = scale(EXAMPLE_MAXIMA + row);
            #pragma unroll
            for (int i = 0; i < 4; i++) x.lane[i] *= INVERSE ? example_scale.inverse : example_scale.factor;
            visit(row, column, x);
        }
    }
    // Sets the maxima of examples. A warp has every WARPS-th example.
    __device__ __forceinline__ void find_maxima_of_examples(const float *gradient) const {
        #pragma unroll 4
        for (int row = threadIdx.x / WARP; row < BATCH; row += WARPS) {
            float largest = 0;
            for (int column = lane * 4; column < UNITS; column += WARP * 4) {
                const Four x = ::load<float, 4>(gradient + row * UNITS + column);
                #pragma unroll
                for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(x.lane[i]));
            }
            largest = largest_of_warp(largest);
            if (lane == 0) maxima[EXAMPLE_MAXIMA + row] = __float_as_uint(largest);
        }
    }
    static __device__ __forceinline__ float largest_of_warp(float largest) {
        #pragma unroll
        for (int mask = 1; mask < WARP; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, mask));
        return largest;
    }
    // Sets the maxima of columns, which begin at maxima[first].
    template <int COUNT, bool INVERSE> __device__ __forceinline__ void find_maxima(
        const float *from, int row_length, int first) const {
        float largest[4] = {};
        for_each_vector<COUNT, INVERSE>(from, row_length, [&](int, int, const Four &x) {
            #pragma unroll
            for (int i = 0; i < 4; i++) largest[i] = fmaxf(largest[i], fabsf(x.lane[i]));
        });
        #pragma unroll
        for (int i = 0; i < 4; i++) atomicMax(maxima + first + threadIdx.x % (COUNT / 4) * 4 + i, __float_as_uint(largest[i]));
    }
    // Stores the terms of columns, whose maxima begin at maxima[first]. store(row of terms, column, terms) stores four.
    template <int COUNT, bool INVERSE, int ROW_BYTES, class Store> __device__ __forceinline__ void store_terms(
        const float *from, int row_length, int first, char *to, const Store &store) const {
        float factors[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) factors[i] = scale(first + threadIdx.x % (COUNT / 4) * 4 + i).factor;
        for_each_vector<COUNT, INVERSE>(from, row_length, [&](int row, int column, const Four &x) {
            Pairs terms[TERMS];
            split(x, factors, terms);
            #pragma unroll
            for (int term = 0; term < TERMS; term++) store(to + (term * BATCH + row) * ROW_BYTES, column, terms[term]);
        });
    }
    // Loads the operands of the gradient of the weights. gradient: of the outputs. x: the inputs. Ends with a barrier of the block.
    __device__ __forceinline__ void load_operands(const float *gradient, const float *x) const {
        for (int i = threadIdx.x; i < EXAMPLE_MAXIMA; i += THREADS) maxima[i] = 0;
        find_maxima_of_examples(gradient);
        __syncthreads();
        find_maxima<UNITS, false>(gradient, UNITS, UNIT_MAXIMA);
        find_maxima<COLUMNS, true>(x + first_input, INPUTS, INPUT_MAXIMA);
        __syncthreads();
        store_terms<UNITS, false, GRADIENT_PITCH>(gradient, UNITS, UNIT_MAXIMA, gradient_terms,
            [](char *row, int column, const Pairs &pairs) { *(Pairs *)(row + column * 2) = pairs; });
        store_terms<COLUMNS, true, INPUT_PITCH>(x + first_input, INPUTS, INPUT_MAXIMA, input_terms,
            [](char *row, int column, const Pairs &pairs) {
                #pragma unroll
                for (int pair = 0; pair < 2; pair++)
                    *(uint32_t *)(row + column / 16 * 32 + pair * 16 + column % 16) = pairs.lane[pair];
            });
        __syncthreads();
    }

    // The index of the first of four numbers of this lane, of unit g (half 0) or g + 8 (half 1) of a tile of units.
    __device__ __forceinline__ int index(int unit_tile, int half) const {
        return (unit_tile * 16 + half * 8 + g) * INPUTS + first_input + input_tile * 16 + c * 4;
    }

    // sums += the gradient of a tile of weights, without the scales: [first or last two of four inputs][as in a result of mma].
    // Products of 16 rows of the first terms are added in float32, because tensor cores truncate.
    __device__ __forceinline__ void weight_gradient(float (&sums)[2][4], int unit_tile) const {
        float low[2][4] = {};
        #pragma unroll
        for (int step = 0; step < ROW_TILES; step++) {
            uint32_t a[TERMS][4], b[TERMS][4];
            #pragma unroll
            for (int term = 0; term < TERMS; term++) {
                // ldmatrix: lane 8i + j has the address of row j of matrix i. odd, upper: the two bits of i.
                const int row = term * BATCH + step * 16 + lane % 8, odd = lane / 8 % 2, upper = lane / 16;
                const char *const a_row = gradient_terms + (row + upper * 8) * GRADIENT_PITCH + unit_tile * 32 + odd * 16;
                const char *const b_row = input_terms + (row + odd * 8) * INPUT_PITCH + input_tile * 32 + upper * 16;
                load_matrices<true>(a[term], shared_address(a_row));
                load_matrices<true>(b[term], shared_address(b_row));
            }
            #pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                multiply_add<FLOAT16>(low[pair], a[1], b[0][2 * pair], b[0][2 * pair + 1]);
                multiply_add<FLOAT16>(low[pair], a[0], b[1][2 * pair], b[1][2 * pair + 1]);
                float high[4] = {};
                multiply_add<FLOAT16>(high, a[0], b[0][2 * pair], b[0][2 * pair + 1]);
                #pragma unroll
                for (int i = 0; i < 4; i++) sums[pair][i] += high[i];
            }
        }
        #pragma unroll
        for (int pair = 0; pair < 2; pair++)
            #pragma unroll
            for (int i = 0; i < 4; i++) sums[pair][i] += low[pair][i];
    }

    // sums += the product of the gradient of the outputs and a tile of weights.
    __device__ __forceinline__ void input_gradient(
        float (&sums)[ROW_TILES][2][4], const Four (&weights)[2], const float (&unit_inverses)[2], int unit_tile) const {
        Four scaled[2];
        float largest = 0;
        #pragma unroll
        for (int half = 0; half < 2; half++)
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                scaled[half].lane[i] = weights[half].lane[i] * unit_inverses[half];
                largest = fmaxf(largest, fabsf(scaled[half].lane[i]));
            }
        const Scale tile_scale(largest_of_warp(largest));
        const float factors[4] = {tile_scale.factor, tile_scale.factor, tile_scale.factor, tile_scale.factor};
        uint32_t b[2][TERMS][2]; // [first or last two of four inputs][term][half of the units]
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            Pairs terms[TERMS];
            split(scaled[half], factors, terms);
            #pragma unroll
            for (int term = 0; term < TERMS; term++)
                #pragma unroll
                for (int pair = 0; pair < 2; pair++) b[pair][term][half] = transposed_matrix(terms[term].lane[pair]);
        }
        #pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; row_tile++) {
            uint32_t a[TERMS][4];
            #pragma unroll
            for (int term = 0; term < TERMS; term++) {
                const int row = term * BATCH + row_tile * 16 + lane / 8 % 2 * 8 + lane % 8;
                const char *const a_row = gradient_terms + row * GRADIENT_PITCH + unit_tile * 32 + lane / 16 * 16;
                load_matrices<false>(a[term], shared_address(a_row));
            }
            #pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                float product[4] = {};
                multiply_add<FLOAT16>(product, a[1], b[pair][0][0], b[pair][0][1]);
                multiply_add<FLOAT16>(product, a[0], b[pair][1][0], b[pair][1][1]);
                multiply_add<FLOAT16>(product, a[0], b[pair][0][0], b[pair][0][1]);
                #pragma unroll
                for (int i = 0; i < 4; i++) sums[row_tile][pair][i] = fmaf(product[i], tile_scale.inverse, sums[row_tile][pair][i]);
            }
        }
    }

    // Computes both gradients and updates the weights. gradient: of the outputs. x: the inputs. from, to: the weights and their
    // optimizer state, before and after the update. update(gradient, numbers) changes a weight and its optimizer state. Calls
    // epilogue(row of the batch, input, gradients of four inputs from `input` on).
    template <class Update, class Epilogue> __device__ __forceinline__ void run(const float *gradient, const float *x,
        const float *const (&from)[STATES], float *const (&to)[STATES], const Update &update, const Epilogue &epilogue) const {
        WeightTile<STATES> next;
        if (group < UNIT_TILES) next.load(from, [&](int half) { return index(group, half); });
        load_operands(gradient, x);
        float input_inverses[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) input_inverses[i] = scale(INPUT_MAXIMA + input_tile * 16 + c * 4 + i).inverse;
        float sums[ROW_TILES][2][4] = {};
        #pragma unroll 1
        for (int unit_tile = group; unit_tile < UNIT_TILES; unit_tile += GROUPS) {
            WeightTile<STATES> current = next;
            if (unit_tile + GROUPS < UNIT_TILES) next.load(from, [&](int half) { return index(unit_tile + GROUPS, half); });
            const float unit_inverses[2] = {
                scale(UNIT_MAXIMA + unit_tile * 16 + g).inverse, scale(UNIT_MAXIMA + unit_tile * 16 + 8 + g).inverse};
            input_gradient(sums, current.states[0], unit_inverses, unit_tile);
            float gradients[2][4] = {};
            weight_gradient(gradients, unit_tile);
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                current.update(half, [&](int i, float (&numbers)[STATES]) {
                    update(gradients[i / 2][2 * half + i % 2] * unit_inverses[half] * input_inverses[i], numbers);
                });
                current.store(half, to, index(unit_tile, half));
            }
        }
        __syncthreads(); // all warps have read the gradient
        float *const partial_sums = (float *)gradient_terms;
        #pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; row_tile++)
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                Four four;
                #pragma unroll
                for (int i = 0; i < 4; i++) four.lane[i] = sums[row_tile][i / 2][2 * half + i % 2];
                *(Four *)(partial_sums + (group * BATCH + row_tile * 16 + half * 8 + g) * COLUMNS + input_tile * 16 + c * 4) = four;
            }
        __syncthreads();
        for (int i = threadIdx.x; i < BATCH * COLUMNS / 4; i += THREADS) {
            const int row = i / (COLUMNS / 4), column = i % (COLUMNS / 4) * 4;
            float total[4] = {};
            #pragma unroll
            for (int k = 0; k < GROUPS; k++) {
                const Four four = *(const Four *)(partial_sums + (k * BATCH + row) * COLUMNS + column);
                #pragma unroll
                for (int j = 0; j < 4; j++) total[j] += four.lane[j];
            }
            const float inverse = scale(EXAMPLE_MAXIMA + row).inverse;
            #pragma unroll
            for (int j = 0; j < 4; j++) total[j] *= inverse;
            epilogue(row, first_input + column, total);
        }
    }
};
