// Rounds rows to bfloat16 and packs them: see wgmma_attention.cuh. Head n is head n % heads of example n / heads. An
// array is [example][query or key][head][HEAD_WIDTH], with `row` elements between rows. LOAD_WIDTH: elements of a load.
#pragma once
#include "attention/wgmma_attention.cuh"

constexpr int CHUNK = 8, CHUNKS = PACKED_WIDTH / CHUNK; // CHUNK: elements of 16 bytes

// Loads CHUNK elements of a row from `column` on; 0 where the row does not exist or has ended.
__device__ __forceinline__ void load_chunk(const S *row, bool exists, int column, float (&x)[CHUNK]) {
    #pragma unroll
    for (int h = 0; h < CHUNK; h += LOAD_WIDTH) {
        Vector<S, LOAD_WIDTH> loaded = {};
        if (exists && column + h < HEAD_WIDTH) loaded = load<S, LOAD_WIDTH>(row + column + h);
        #pragma unroll
        for (int j = 0; j < LOAD_WIDTH; j++) x[h + j] = loaded.lane[j];
    }
}
// Rounds x to bfloat16 and stores it; x becomes the rounded numbers.
__device__ __forceinline__ void store_chunk(char *to, float (&x)[CHUNK]) {
    Vector<uint32_t, 4> words;
    #pragma unroll
    for (int h = 0; h < 4; h++) {
        const uint32_t word = words.lane[h] = Format<BFLOAT16>::packed(x[2 * h], x[2 * h + 1]);
        x[2 * h] = __uint_as_float(word << 16), x[2 * h + 1] = __uint_as_float(word & 0xffff0000);
    }
    *(Vector<uint32_t, 4> *)to = words;
}

// A chunk of a packed row.
struct PackedChunk {
    int chunk;
    int64_t head, at;

    __device__ __forceinline__ PackedChunk(const PackedArray &packed, int64_t i)
        : chunk(i % CHUNKS), head(i / CHUNKS / packed.rows), at(i / CHUNKS % packed.rows) {}

    // Loads its elements from an array of `length` rows for each example; 0 outside.
    __device__ __forceinline__ void load_from(
        const S *from, int64_t heads, int64_t length, int64_t row, float (&x)[CHUNK]) const {
        load_chunk(from + (head / heads * length + at) * row + head % heads * HEAD_WIDTH, at < length, chunk * CHUNK, x);
    }
    __device__ __forceinline__ void store_to(const PackedArray &packed, float (&x)[CHUNK]) const {
        store_chunk(packed.row(head, chunk / 8, at / 8 * 8) + swizzle_128b(at % 8, chunk % 8), x);
    }
};

// Packs an array by all threads of the grid's x axis.
__device__ __forceinline__ void pack_array(
    const S *from, int64_t batch, int64_t heads, int64_t length, int64_t row, const PackedArray &to) {
    for (int64_t i = grid_index(); i < batch * to.rows * CHUNKS; i += grid_size()) {
        const PackedChunk chunk(to, i);
        float x[CHUNK];
        chunk.load_from(from, heads, length, row, x);
        chunk.store_to(to, x);
    }
}
