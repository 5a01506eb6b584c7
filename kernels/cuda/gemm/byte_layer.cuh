// What gemm/resident_layer.cuh and gemm/streamed_layer.cuh share: the first layer of a network whose inputs are bytes. A block has
// UNITS rows of the weight matrix.
//
// Products are mma.sync in float16. A byte is exactly a subnormal float16. A scaled float32 is the sum of two float16 terms with an
// error of at most 2^-22 (fp16x2). So the product of both takes two mma. The input of the layer is scale * byte + shift.
//
// A chunk is 16 inputs. Lane (g, c), g = lane / 4, c = lane % 4, has inputs 4c ... 4c + 3 of units g and g + 8: see
// ByteBatch. So the result of the gradient product is an operand of the next product, and lanes exchange nothing (Dao,
// FlashAttention-2, 2023).
#pragma once
#include "common/epilogue.cuh"
#include "common/rounding.cuh"

// A batch of bytes as operands of mma.sync.m16n8k16 in float16: of the product with the weights (direct), and of the product with
// the gradient (transposed).
//
// A chunk is 16 inputs. Lane (g, c), g = lane / 4, c = lane % 4, has inputs 4c ... 4c + 3 of rows g, g + 8, ... of the batch. This
// permutes the inputs along K: the first two are k = 2c, 2c + 1 of mma, the other two are k = 2c + 8, 2c + 9.

constexpr int CHUNK = 16;
constexpr int SPLIT_TERMS = 2;
typedef Vector<uint32_t, 4> Fragment;

// BYTE_SCALE * bytes `first` and `first + 1` of a word, as float16: subnormal numbers, whose bits are the byte. Tensor cores multiply
// them exactly.
constexpr float BYTE_SCALE = 1.0f / (1 << 24);
__device__ __forceinline__ uint32_t bytes_as_pair(uint32_t word, int first) {
    return __byte_perm(word, 0, 0x4140 + first * 0x101);
}

template <int INPUTS, int BATCH> struct ByteBatch {
    static constexpr int CHUNKS = INPUTS / CHUNK, COLUMNS = BATCH / 8; // COLUMNS: words of a lane for a chunk
    static constexpr int PACKED = CHUNKS * COLUMNS * WARP * 4; // bytes

    // What a lane has of a chunk. Each word is the B operand of an mma, as bytes: of the product with the weights, rows 8j to 8j + 7
    // of the batch for word j; of the product with the gradient, rows 16s to 16s + 15 and the first or last two of four inputs for
    // word 2s or 2s + 1.
    struct Words {
        static constexpr int WIDE = COLUMNS % 4 == 0 ? 4 : 2;
        typedef Vector<uint32_t, WIDE> Wide;
        uint32_t at[COLUMNS];

        __device__ __forceinline__ void load(const char *packed, int chunk, int lane) {
            #pragma unroll
            for (int i = 0; i < COLUMNS; i += WIDE) {
                const Wide wide = ((const Wide *)packed)[(chunk * COLUMNS + i) / WIDE * WARP + lane];
                #pragma unroll
                for (int k = 0; k < WIDE; k++) at[i + k] = wide.lane[k];
            }
        }
        __device__ __forceinline__ void store(char *packed, int chunk, int lane) const {
            #pragma unroll
            for (int i = 0; i < COLUMNS; i += WIDE) {
                Wide wide;
                #pragma unroll
                for (int k = 0; k < WIDE; k++) wide.lane[k] = at[i + k];
                ((Wide *)packed)[(chunk * COLUMNS + i) / WIDE * WARP + lane] = wide;
            }
        }
        // Loads inputs 4c ... 4c + 3 of rows g, g + 8, ... from the table. rows: where the examples of the batch begin there.
        __device__ __forceinline__ void load_rows(const uint8_t *table, const uint32_t *rows, int chunk, int lane) {
            #pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                at[j] = *(const uint32_t *)(table + (rows[8 * j + lane / 4] + chunk * CHUNK + lane % 4 * 4));
        }
        // The operands of the other product. All lanes of a warp call it.
        __device__ __forceinline__ Words transposed() const {
            Words found;
            #pragma unroll
            for (int j = 0; j < COLUMNS; j += 2)
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint32_t selected = half ? 0x4342 : 0x4140; // the first or last two bytes, as numbers of 16 bits
                    const uint32_t low = transposed_matrix(__byte_perm(at[j], 0, selected));
                    const uint32_t high = transposed_matrix(__byte_perm(at[j + 1], 0, selected));
                    found.at[j + half] = __byte_perm(low, high, 0x6420);
                }
            return found;
        }
    };
};

// WEIGHT_SCALE * weight is split into float16 terms. Weights up to 511 fit. The error is at most 2^-32, or 2^-22 of the weight.
constexpr float WEIGHT_SCALE = 128;

// A tile is 16 units. A group of warps has a warp for each tile.
template <int INPUTS, int UNITS, int BATCH> struct ByteLayer {
    typedef Vector<float, 4> Four;
    static constexpr int CHUNKS = INPUTS / CHUNK, COLUMNS = BATCH / 8, K_STEPS = BATCH / 16;
    static constexpr int TILES = UNITS / 16, GROUPS = THREADS / WARP / TILES;
    static_assert(INPUTS % CHUNK == 0 && UNITS % 16 == 0 && BATCH % 16 == 0 && GROUPS * TILES * WARP == THREADS, "whole tiles");

    // Bytes of the gradient as an operand; of sums of weights, and of sums and maxima of gradients.
    static constexpr int FRAGMENTS = SPLIT_TERMS * TILES * K_STEPS * WARP * 16, SUMS = (GROUPS + 2 * K_STEPS) * UNITS * 4;

    char *const fragments; // the gradient of the outputs, as an operand
    float *const weight_sums, *const gradient_sums, *const gradient_maxima; // [group][unit]; [K step][unit]
    uint32_t *const rows; // where the examples of a batch begin in the table
    const float scale, shift;
    const int tile, group, lane, g, c;

    // sums: SUMS bytes; `rows` follow.
    __device__ ByteLayer(char *fragments, float *sums, float scale, float shift)
        : fragments(fragments), weight_sums(sums), gradient_sums(weight_sums + GROUPS * UNITS),
          gradient_maxima(gradient_sums + K_STEPS * UNITS), rows((uint32_t *)(gradient_maxima + K_STEPS * UNITS)), scale(scale),
          shift(shift), tile(threadIdx.x / WARP % TILES), group(threadIdx.x / WARP / TILES), lane(threadIdx.x % WARP), g(lane / 4),
          c(lane % 4) {}

    // The index of the first of four neighbouring numbers of this lane, of unit g (half 0) or g + 8 (half 1) of the tile, in this
    // block's rows of the weight matrix.
    __device__ __forceinline__ int index(int chunk, int half) const {
        return (tile * 16 + half * 8 + g) * INPUTS + chunk * CHUNK + c * 4;
    }

    // Partial sums over the chunks of this warp: the outputs of the tile, and the weights of units g and g + 8.
    struct Outputs {
        float values[COLUMNS][4] = {}, weight_sums[2] = {};
    };

    // outputs += WEIGHT_SCALE * weights * BYTE_SCALE * bytes, for a chunk. weights and words: those of this lane.
    __device__ __forceinline__ void multiply(Outputs &outputs, const Four (&weights)[2], const uint32_t (&words)[COLUMNS]) const {
        uint32_t terms[4][SPLIT_TERMS];
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const Four &w = weights[half];
            outputs.weight_sums[half] += w.lane[0] + w.lane[1] + (w.lane[2] + w.lane[3]);
            split_terms<FLOAT16>(w.lane[0] * WEIGHT_SCALE, w.lane[1] * WEIGHT_SCALE, terms[half]);
            split_terms<FLOAT16>(w.lane[2] * WEIGHT_SCALE, w.lane[3] * WEIGHT_SCALE, terms[half + 2]);
        }
        constexpr int INDEPENDENT = COLUMNS % 4 == 0 ? 4 : 2; // independent products, between two products that add to the same sum
        #pragma unroll
        for (int first = 0; first < COLUMNS; first += INDEPENDENT)
            #pragma unroll
            for (int term = SPLIT_TERMS - 1; term >= 0; term--) {
                const uint32_t a[4] = {terms[0][term], terms[1][term], terms[2][term], terms[3][term]};
                #pragma unroll
                for (int j = first; j < first + INDEPENDENT; j++)
                    multiply_add<FLOAT16>(outputs.values[j], a, bytes_as_pair(words[j], 0), bytes_as_pair(words[j], 2));
            }
    }
    // Stores the sums of this group's weights.
    __device__ __forceinline__ void store_weight_sums(const Outputs &outputs) const {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = outputs.weight_sums[half];
            sum += __shfl_xor_sync(FULL_MASK, sum, 1);
            sum += __shfl_xor_sync(FULL_MASK, sum, 2);
            if (c == 0) weight_sums[group * UNITS + tile * 16 + half * 8 + g] = sum;
        }
    }

    // Loads this lane's numbers of the gradient of the outputs, of a tile and a K step, and reduces those of a warp. gradient: points
    // to this block's first unit; a row of the batch has `pitch` numbers. A barrier of the block must follow.
    __device__ __forceinline__ void load_gradient(const float *gradient, int pitch, int of_tile, int step, float (&numbers)[4][2]) const {
        float sum[2] = {}, largest[2] = {};
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            const float *const from = gradient + (step * 16 + k / 2 * 8 + 2 * c) * pitch + of_tile * 16 + k % 2 * 8 + g;
            const float low = numbers[k][0] = from[0], high = numbers[k][1] = from[pitch];
            sum[k % 2] += low + high;
            largest[k % 2] = fmaxf(largest[k % 2], fmaxf(fabsf(low), fabsf(high)));
        }
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            #pragma unroll
            for (int mask = 1; mask <= 2; mask *= 2) {
                sum[half] += __shfl_xor_sync(FULL_MASK, sum[half], mask);
                largest[half] = fmaxf(largest[half], __shfl_xor_sync(FULL_MASK, largest[half], mask));
            }
            const int place = step * UNITS + of_tile * 16 + half * 8 + g;
            if (c == 0) gradient_sums[place] = sum[half], gradient_maxima[place] = largest[half];
        }
    }
    // Splits them into float16 terms, the operand of the gradient product. A barrier of the block must follow.
    __device__ __forceinline__ void split_gradient(int of_tile, int step, const float (&numbers)[4][2]) const {
        const float factors[2] = {gradient_scale(of_tile, 0).factor, gradient_scale(of_tile, 1).factor};
        Fragment terms[SPLIT_TERMS];
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t of[SPLIT_TERMS];
            split_terms<FLOAT16>(numbers[k][0] * factors[k % 2], numbers[k][1] * factors[k % 2], of);
            #pragma unroll
            for (int term = 0; term < SPLIT_TERMS; term++) terms[term].lane[k] = of[term];
        }
        #pragma unroll
        for (int term = 0; term < SPLIT_TERMS; term++) *fragment(term, of_tile, step) = terms[term];
    }
    __device__ __forceinline__ Fragment *fragment(int term, int of_tile, int step) const {
        return (Fragment *)fragments + ((term * TILES + of_tile) * K_STEPS + step) * WARP + lane;
    }
    // The scale of the gradients of unit g or g + 8 of a tile.
    __device__ __forceinline__ Scale gradient_scale(int of_tile, int half) const {
        float largest = 0;
        #pragma unroll
        for (int step = 0; step < K_STEPS; step++)
            largest = fmaxf(largest, gradient_maxima[step * UNITS + of_tile * 16 + half * 8 + g]);
        return Scale(largest);
    }
    // The gradient of a weight of unit g or g + 8 is scales[half] * product of terms and bytes + shifts[half].
    __device__ __forceinline__ void find_scales(float (&shifts)[2], float (&scales)[2]) const {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = 0;
            #pragma unroll
            for (int step = 0; step < K_STEPS; step++) sum += gradient_sums[step * UNITS + tile * 16 + half * 8 + g];
            shifts[half] = shift * sum, scales[half] = scale / BYTE_SCALE * gradient_scale(tile, half).inverse;
        }
    }
};
