// Rounds rows of float32 to bfloat16 and packs them: see wgmma_attention.cuh. Head n is head n % heads of example n / heads. An
// array is [example][query or key][head][HEAD_WIDTH], with `row` elements between rows. LOAD_WIDTH: elements of a load.
#pragma once
#include "attention/wgmma_attention.cuh"

constexpr int CHUNK = 8, CHUNKS = PACKED_WIDTH / CHUNK; // CHUNK: elements of 16 bytes

// A chunk of a packed row.
struct PackedChunk {
    int chunk;
    int64_t head, at;

    __device__ __forceinline__ PackedChunk(const PackedArray &packed, int64_t i)
        : chunk(i % CHUNKS), head(i / CHUNKS / packed.rows), at(i / CHUNKS % packed.rows) {}

    // Its elements in an array of `length` rows for each example; 0 outside.
    __device__ __forceinline__ void load_from(
        const T *from, int64_t heads, int64_t length, int64_t row, float (&x)[CHUNK]) const {
        const int column = chunk * CHUNK;
        const T *source = from + (head / heads * length + at) * row + head % heads * HEAD_WIDTH + column;
        #pragma unroll
        for (int h = 0; h < CHUNK; h += LOAD_WIDTH) {
            Vector<T, LOAD_WIDTH> loaded = {};
            if (at < length && column + h < HEAD_WIDTH) loaded = load<T, LOAD_WIDTH>(source + h);
            #pragma unroll
            for (int j = 0; j < LOAD_WIDTH; j++) x[h + j] = loaded.lane[j];
        }
    }
    __device__ __forceinline__ void store_to(const PackedArray &packed, const float (&x)[CHUNK]) const {
        Vector<uint32_t, 4> words;
        #pragma unroll
        for (int h = 0; h < 4; h++) words.lane[h] = Format<BFLOAT16>::packed(x[2 * h], x[2 * h + 1]);
        char *const tile = packed.row(head, chunk / 8, at / 8 * 8);
        *(Vector<uint32_t, 4> *)(tile + swizzle_128b(at % 8, chunk % 8)) = words;
    }
};

// Packs an array by all threads of the grid's x axis.
__device__ __forceinline__ void pack_array(
    const T *from, int64_t batch, int64_t heads, int64_t length, int64_t row, const PackedArray &to) {
    for (int64_t i = grid_index(); i < batch * to.rows * CHUNKS; i += grid_size()) {
        const PackedChunk chunk(to, i);
        float x[CHUNK];
        chunk.load_from(from, heads, length, row, x);
        chunk.store_to(to, x);
    }
}
