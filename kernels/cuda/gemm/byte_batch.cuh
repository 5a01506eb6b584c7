// Batches of bytes as float16 operands of two products: with the weights and, transposed, with the gradient (mma.sync.m16n8k16).
//
// Lane (g, c), g = lane / 4, c = lane % 4, holds of a chunk of 16 inputs: inputs 4c ... 4c + 3 of rows g, g + 8, ... of the batch. The
// inputs are permuted along K: mma's k = 2c, 2c + 1 are the first two of them, k = 2c + 8, 2c + 9 the others.
#pragma once
#include "common/mma_sync.cuh"

constexpr int CHUNK = 16;
typedef Vector<uint32_t, 4> Fragment;

constexpr int SPLIT_TERMS = 2;

// The float16 terms of two numbers, the largest first.
__device__ __forceinline__ void split_pair(float low, float high, uint32_t (&terms)[SPLIT_TERMS]) {
    float first_low, first_high;
    terms[0] = pack_pair<FLOAT16>(low, high);
    unpack_float16(terms[0], first_low, first_high);
    terms[1] = pack_pair<FLOAT16>(low - first_low, high - first_high);
}

// Two neighbouring bytes of a word as float16: 1024 is 0x6400.
__device__ __forceinline__ uint32_t bytes_as_pair(uint32_t word, int first) {
    return subtract_float16(__byte_perm(word, 0x64646464, 0x4140 + first * 0x101), 0x64006400);
}

template <int INPUTS, int BATCH> struct ByteBatch {
    static constexpr int CHUNKS = INPUTS / CHUNK, COLUMNS = BATCH / 8, WORDS = COLUMNS * 2; // words of a lane for a chunk
    static constexpr int PACKED = CHUNKS * WORDS * WARP * 4; // bytes

    // Pairs of float16 numbers: [row of the batch / 8][first or last two of four inputs].
    struct Words {
        uint32_t at[WORDS];

        __device__ __forceinline__ void load(const char *packed, int chunk, int lane) {
            #pragma unroll
            for (int i = 0; i < WORDS / 4; i++) {
                const Fragment four = ((const Fragment *)packed)[(chunk * (WORDS / 4) + i) * WARP + lane];
                #pragma unroll
                for (int k = 0; k < 4; k++) at[i * 4 + k] = four.lane[k];
            }
        }
        __device__ __forceinline__ void store(char *packed, int chunk, int lane) const {
            #pragma unroll
            for (int i = 0; i < WORDS / 4; i++) {
                const Fragment four = {at[i * 4], at[i * 4 + 1], at[i * 4 + 2], at[i * 4 + 3]};
                ((Fragment *)packed)[(chunk * (WORDS / 4) + i) * WARP + lane] = four;
            }
        }
    };

    // Packs a chunk in both ways, by a warp. rows: where the examples of the batch begin in the table.
    static __device__ __forceinline__ void pack(
        const uint8_t *table, const uint32_t *rows, int chunk, int lane, char *direct, char *transposed) {
        Words words, columns;
        uint32_t bytes[COLUMNS];
        #pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            bytes[j] = *(const uint32_t *)(table + (rows[8 * j + lane / 4] + chunk * CHUNK + lane % 4 * 4));
        #pragma unroll
        for (int i = 0; i < WORDS; i++) {
            words.at[i] = bytes_as_pair(bytes[i / 2], i % 2 * 2);
            columns.at[i] = transposed_matrix(words.at[i]);
        }
        words.store(direct, chunk, lane);
        columns.store(transposed, chunk, lane);
    }
};
