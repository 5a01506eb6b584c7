// The gradients of a linear layer and the update of its weights, which are read once (Ampere and later). Each block has COLUMNS
// inputs of the layer, for all its units: it computes the gradient of these inputs, and of their weights.
//
// Products are mma.sync in float16. A scaled float32 is the sum of two float16 terms (fp16x2), and three of the four products of
// terms are added. The gradient of the outputs has a scale for each example, then one for each unit. The inputs are multiplied by
// the inverse scales of the examples, then each input has a scale. A tile of weights is multiplied by the inverse scales of its
// units, then it has a scale.
//
// A tile is 16 units x 16 inputs. Lane (g, c), g = lane / 4, c = lane % 4, has inputs 4c ... 4c + 3 of units g and g + 8. So two
// neighbouring columns of the first product of a tile are inputs 4c and 4c + 1, and of the second one 4c + 2 and 4c + 3.
#pragma once
#include "common/terms.cuh"

extern __shared__ __align__(16) unsigned char shared_bytes[];

template <int BATCH, int UNITS, int INPUTS, int COLUMNS, int STATES> struct LayerBackward {
    typedef Vector<float, 4> Four;
    typedef Vector<uint32_t, 2> Pairs;
    static constexpr int TERMS = 2, WARPS = THREADS / WARP, ROW_TILES = BATCH / 16, UNIT_TILES = UNITS / 16;
    static constexpr int INPUT_TILES = COLUMNS / 16, GROUPS = WARPS / INPUT_TILES; // a group has every GROUPS-th tile of units
    static_assert(BATCH % 16 == 0 && UNITS % 16 == 0 && COLUMNS % 16 == 0 && GROUPS * INPUT_TILES == WARPS, "whole tiles");
    static_assert(UNITS / 4 <= THREADS, "a thread has four units");

    // Bytes of a row of terms. It begins 16 bytes after a multiple of 128, so that ldmatrix has no bank conflicts.
    static __device__ constexpr int pitch(int columns) { return columns * 2 + (16 - columns * 2 % 128 + 128) % 128; }
    static constexpr int GRADIENT_PITCH = pitch(UNITS), INPUT_PITCH = pitch(COLUMNS);
    static constexpr int GRADIENT_BYTES = TERMS * BATCH * GRADIENT_PITCH, SUM_BYTES = GROUPS * BATCH * COLUMNS * 4;
    static constexpr int FIRST_BYTES = GRADIENT_BYTES > SUM_BYTES ? GRADIENT_BYTES : SUM_BYTES;
    static constexpr int INPUT_BYTES = TERMS * BATCH * INPUT_PITCH, SHARED = FIRST_BYTES + INPUT_BYTES + (UNITS + COLUMNS + BATCH) * 4;

    char *const gradients; // terms of the gradient of the outputs; afterwards partial sums of that of the inputs
    char *const inputs; // terms of the inputs. In a tile, the inputs of the first product come first
    uint32_t *const maxima; // bits of the largest magnitudes: of the gradients of units, of inputs of the block, of examples
    const int first, tile, group, lane, g, c; // `first`: input of the block

    __device__ explicit LayerBackward(int first)
        : gradients((char *)shared_bytes), inputs(gradients + FIRST_BYTES), maxima((uint32_t *)(inputs + INPUT_BYTES)), first(first),
          tile(threadIdx.x / WARP % INPUT_TILES), group(threadIdx.x / WARP / INPUT_TILES), lane(threadIdx.x % WARP), g(lane / 4),
          c(lane % 4) {}

    // The scale of a unit's gradient, or behind the units, of an input, or behind these, of an example.
    __device__ __forceinline__ Scale scale(int at) const { return Scale(__uint_as_float(maxima[at])); }

    // The terms of four numbers: [term][first or last two].
    static __device__ __forceinline__ void split(const Four &x, const float (&factors)[4], Pairs (&terms)[TERMS]) {
        #pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            uint32_t of[TERMS];
            split_terms<FLOAT16>(x.lane[2 * pair] * factors[2 * pair], x.lane[2 * pair + 1] * factors[2 * pair + 1], of);
            #pragma unroll
            for (int term = 0; term < TERMS; term++) terms[term].lane[pair] = of[term];
        }
    }

    // Calls take(example, column, four numbers) for this thread's numbers, multiplied by the scale of the example, or if INVERSE by
    // the inverse. A thread has the same columns of all its examples.
    template <int COUNT, bool INVERSE, class Take> __device__ __forceinline__ void for_each_example(
        const float *from, int row_length, const Take &take) const {
        constexpr int ACROSS = COUNT / 4, DOWN = THREADS / ACROSS;
        const int column = threadIdx.x % ACROSS * 4;
        if (threadIdx.x >= ACROSS * DOWN) return;
        #pragma unroll 4
        for (int row = threadIdx.x / ACROSS; row < BATCH; row += DOWN) {
            Four x = ::load<float, 4>(from + row * row_length + column);
            const Scale of_example = scale(UNITS + COLUMNS + row);
            #pragma unroll
            for (int i = 0; i < 4; i++) x.lane[i] *= INVERSE ? of_example.inverse : of_example.factor;
            take(row, column, x);
        }
    }
    // Sets the largest magnitudes of examples. A warp has every WARPS-th one.
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
            if (lane == 0) maxima[UNITS + COLUMNS + row] = __float_as_uint(largest);
        }
    }
    static __device__ __forceinline__ float largest_of_warp(float largest) {
        #pragma unroll
        for (int mask = 1; mask < WARP; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, mask));
        return largest;
    }
    // Sets the largest magnitudes of columns, from maxima[at] on.
    template <int COUNT, bool INVERSE> __device__ __forceinline__ void find_maxima(const float *from, int row_length, int at) const {
        float largest[4] = {};
        for_each_example<COUNT, INVERSE>(from, row_length, [&](int, int, const Four &x) {
            #pragma unroll
            for (int i = 0; i < 4; i++) largest[i] = fmaxf(largest[i], fabsf(x.lane[i]));
        });
        #pragma unroll
        for (int i = 0; i < 4; i++) atomicMax(maxima + at + threadIdx.x % (COUNT / 4) * 4 + i, __float_as_uint(largest[i]));
    }
    // Stores the terms of columns, whose largest magnitudes begin at maxima[at]. place(row of terms, column, terms) stores four.
    template <int COUNT, bool INVERSE, int ROW_BYTES, class Place> __device__ __forceinline__ void store_terms(
        const float *from, int row_length, int at, char *to, const Place &place) const {
        float factors[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) factors[i] = scale(at + threadIdx.x % (COUNT / 4) * 4 + i).factor;
        for_each_example<COUNT, INVERSE>(from, row_length, [&](int row, int column, const Four &x) {
            Pairs terms[TERMS];
            split(x, factors, terms);
            #pragma unroll
            for (int term = 0; term < TERMS; term++) place(to + (term * BATCH + row) * ROW_BYTES, column, terms[term]);
        });
    }
    // Loads both operands of the gradient of the weights. gradient: of the outputs. Ends with a barrier of the block.
    __device__ __forceinline__ void load_operands(const float *gradient, const float *x) const {
        for (int i = threadIdx.x; i < UNITS + COLUMNS; i += THREADS) maxima[i] = 0;
        find_maxima_of_examples(gradient);
        __syncthreads();
        find_maxima<UNITS, false>(gradient, UNITS, 0);
        find_maxima<COLUMNS, true>(x + first, INPUTS, UNITS);
        __syncthreads();
        store_terms<UNITS, false, GRADIENT_PITCH>(gradient, UNITS, 0, gradients,
            [](char *row, int column, const Pairs &pairs) { *(Pairs *)(row + column * 2) = pairs; });
        store_terms<COLUMNS, true, INPUT_PITCH>(x + first, INPUTS, UNITS, inputs, [](char *row, int column, const Pairs &pairs) {
            #pragma unroll
            for (int pair = 0; pair < 2; pair++)
                *(uint32_t *)(row + column / 16 * 32 + pair * 16 + column % 16) = pairs.lane[pair];
        });
        __syncthreads();
    }

    // The index of the first of four numbers of this lane, of unit g (half 0) or g + 8 (half 1) of a tile of units.
    __device__ __forceinline__ int index(int of_units, int half) const {
        return (of_units * 16 + half * 8 + g) * INPUTS + first + tile * 16 + c * 4;
    }
    struct Loaded {
        Four of[STATES][2];
    };
    __device__ __forceinline__ void load(Loaded &loaded, const float *const (&from)[STATES], int of_units) const {
        #pragma unroll
        for (int s = 0; s < STATES; s++)
            #pragma unroll
            for (int half = 0; half < 2; half++) loaded.of[s][half] = ::load<float, 4>(from[s] + index(of_units, half));
    }

    // The gradient of a tile of weights, without scales: [first or last two of four inputs][as in a result of mma]. Products of 16
    // rows of the leading terms are added in float32, because tensor cores truncate.
    __device__ __forceinline__ void weight_gradient(float (&found)[2][4], int of_units) const {
        float low[2][4] = {};
        #pragma unroll
        for (int step = 0; step < ROW_TILES; step++) {
            uint32_t a[TERMS][4], b[TERMS][4];
            #pragma unroll
            for (int term = 0; term < TERMS; term++) {
                const int row = term * BATCH + step * 16 + lane % 8, second = lane / 8 % 2, third = lane / 16;
                const char *const of_a = gradients + (row + third * 8) * GRADIENT_PITCH + of_units * 32 + second * 16;
                const char *const of_b = inputs + (row + second * 8) * INPUT_PITCH + tile * 32 + third * 16;
                load_matrices<true>(a[term], shared_address(of_a));
                load_matrices<true>(b[term], shared_address(of_b));
            }
            #pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                multiply_add<FLOAT16>(low[pair], a[1], b[0][2 * pair], b[0][2 * pair + 1]);
                multiply_add<FLOAT16>(low[pair], a[0], b[1][2 * pair], b[1][2 * pair + 1]);
                float high[4] = {};
                multiply_add<FLOAT16>(high, a[0], b[0][2 * pair], b[0][2 * pair + 1]);
                #pragma unroll
                for (int i = 0; i < 4; i++) found[pair][i] += high[i];
            }
        }
        #pragma unroll
        for (int pair = 0; pair < 2; pair++)
            #pragma unroll
            for (int i = 0; i < 4; i++) found[pair][i] += low[pair][i];
    }

    // sums += the product of the gradient of the outputs and a tile of weights.
    __device__ __forceinline__ void input_gradient(
        float (&sums)[ROW_TILES][2][4], const Four (&weights)[2], const float (&unit_inverses)[2], int of_units) const {
        Four scaled[2];
        float largest = 0;
        #pragma unroll
        for (int half = 0; half < 2; half++)
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                scaled[half].lane[i] = weights[half].lane[i] * unit_inverses[half];
                largest = fmaxf(largest, fabsf(scaled[half].lane[i]));
            }
        const Scale of_tile(largest_of_warp(largest));
        const float factors[4] = {of_tile.factor, of_tile.factor, of_tile.factor, of_tile.factor};
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
        for (int rows = 0; rows < ROW_TILES; rows++) {
            uint32_t a[TERMS][4];
            #pragma unroll
            for (int term = 0; term < TERMS; term++) {
                const int row = term * BATCH + rows * 16 + lane / 8 % 2 * 8 + lane % 8;
                load_matrices<false>(a[term], shared_address(gradients + row * GRADIENT_PITCH + of_units * 32 + lane / 16 * 16));
            }
            #pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                float found[4] = {};
                multiply_add<FLOAT16>(found, a[1], b[pair][0][0], b[pair][0][1]);
                multiply_add<FLOAT16>(found, a[0], b[pair][1][0], b[pair][1][1]);
                multiply_add<FLOAT16>(found, a[0], b[pair][0][0], b[pair][0][1]);
                #pragma unroll
                for (int i = 0; i < 4; i++) sums[rows][pair][i] = fmaf(found[i], of_tile.inverse, sums[rows][pair][i]);
            }
        }
    }

    // Computes both gradients and updates the weights. from, to: the weights, then their optimizer state; before and after.
    // update(gradient, numbers) changes a weight and its optimizer state. Calls epilogue(row of the batch, input, gradients of four
    // inputs from `input` on).
    template <class Update, class Epilogue> __device__ __forceinline__ void run(const float *gradient, const float *x,
        const float *const (&from)[STATES], float *const (&to)[STATES], const Update &update, const Epilogue &epilogue) const {
        Loaded ahead;
        if (group < UNIT_TILES) load(ahead, from, group);
        load_operands(gradient, x);
        float input_inverses[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) input_inverses[i] = scale(UNITS + tile * 16 + c * 4 + i).inverse;
        float sums[ROW_TILES][2][4] = {};
        #pragma unroll 1
        for (int of_units = group; of_units < UNIT_TILES; of_units += GROUPS) {
            Loaded now = ahead;
            if (of_units + GROUPS < UNIT_TILES) load(ahead, from, of_units + GROUPS);
            const float unit_inverses[2] = {scale(of_units * 16 + g).inverse, scale(of_units * 16 + 8 + g).inverse};
            input_gradient(sums, now.of[0], unit_inverses, of_units);
            float found[2][4] = {};
            weight_gradient(found, of_units);
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    float numbers[STATES];
                    #pragma unroll
                    for (int s = 0; s < STATES; s++) numbers[s] = now.of[s][half].lane[i];
                    update(found[i / 2][2 * half + i % 2] * unit_inverses[half] * input_inverses[i], numbers);
                    #pragma unroll
                    for (int s = 0; s < STATES; s++) now.of[s][half].lane[i] = numbers[s];
                }
                #pragma unroll
                for (int s = 0; s < STATES; s++) store_four(to[s] + index(of_units, half), now.of[s][half]);
            }
        }
        __syncthreads(); // all warps have read the gradient
        float *const partial = (float *)gradients;
        #pragma unroll
        for (int rows = 0; rows < ROW_TILES; rows++)
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                Four four;
                #pragma unroll
                for (int i = 0; i < 4; i++) four.lane[i] = sums[rows][i / 2][2 * half + i % 2];
                *(Four *)(partial + (group * BATCH + rows * 16 + half * 8 + g) * COLUMNS + tile * 16 + c * 4) = four;
            }
        __syncthreads();
        for (int i = threadIdx.x; i < BATCH * COLUMNS / 4; i += THREADS) {
            const int row = i / (COLUMNS / 4), column = i % (COLUMNS / 4) * 4;
            float found[4] = {};
            #pragma unroll
            for (int of_group = 0; of_group < GROUPS; of_group++) {
                const Four four = *(const Four *)(partial + (of_group * BATCH + row) * COLUMNS + column);
                #pragma unroll
                for (int k = 0; k < 4; k++) found[k] += four.lane[k];
            }
            const float inverse = scale(UNITS + COLUMNS + row).inverse;
            #pragma unroll
            for (int k = 0; k < 4; k++) found[k] *= inverse;
            epilogue(row, first + column, found);
        }
    }
};
