// A batch of bytes as float16 operands of mma.sync.m16n8k16: of the product with the weights (direct), and of the product with
// the gradient (transposed).
//
// A chunk is 16 inputs. Lane (g, c), g = lane / 4, c = lane % 4, has inputs 4c ... 4c + 3 of rows g, g + 8, ... of the batch. This
// permutes the inputs along K: the first two are k = 2c, 2c + 1 of mma, the other two are k = 2c + 8, 2c + 9.
#pragma once
#include "common/terms.cuh"

constexpr int CHUNK = 16;
constexpr int SPLIT_TERMS = 2;
typedef Vector<uint32_t, 4> Fragment;

// Bytes `first` and `first + 1` of a word as float16. 0x6400 is 1024, and 0x6400 + byte is 1024 + byte.
__device__ __forceinline__ uint32_t bytes_as_pair(uint32_t word, int first) {
    return subtract_float16(__byte_perm(word, 0x64646464, 0x4140 + first * 0x101), 0x64006400);
}

template <int INPUTS, int BATCH> struct ByteBatch {
    static constexpr int CHUNKS = INPUTS / CHUNK, COLUMNS = BATCH / 8, WORDS = COLUMNS * 2; // words of a lane for a chunk
    static constexpr int PACKED = CHUNKS * WORDS * WARP * 4; // bytes

    // What a lane has of a chunk, as pairs of float16. Words 2i and 2i + 1 are the B operand of an mma. direct: [row of the batch / 8]
    // [first or last two of four inputs]; transposed: [row of the batch / 16][first or last two of four inputs][row / 8 % 2].
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

    // Packs a chunk as both operands. All lanes of a warp call it. rows: where the examples of the batch begin in the table.
    static __device__ __forceinline__ void pack(
        const uint8_t *table, const uint32_t *rows, int chunk, int lane, char *direct, char *transposed) {
        Words direct_words, transposed_words;
        uint32_t bytes[COLUMNS];
        #pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            bytes[j] = *(const uint32_t *)(table + (rows[8 * j + lane / 4] + chunk * CHUNK + lane % 4 * 4));
        #pragma unroll
        for (int i = 0; i < WORDS; i++) {
            direct_words.at[i] = bytes_as_pair(bytes[i / 2], i % 2 * 2);
            transposed_words.at[i / 4 * 4 + i % 2 * 2 + i / 2 % 2] = transposed_matrix(direct_words.at[i]);
        }
        direct_words.store(direct, chunk, lane);
        transposed_words.store(transposed, chunk, lane);
    }
};
