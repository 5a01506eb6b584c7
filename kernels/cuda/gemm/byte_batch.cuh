// A batch of bytes as operands of mma.sync.m16n8k16 in float16: of the product with the weights (direct), and of the product with
// the gradient (transposed).
//
// A chunk is 16 inputs. Lane (g, c), g = lane / 4, c = lane % 4, has inputs 4c ... 4c + 3 of rows g, g + 8, ... of the batch. This
// permutes the inputs along K: the first two are k = 2c, 2c + 1 of mma, the other two are k = 2c + 8, 2c + 9.
#pragma once
#include "common/terms.cuh"

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
