// Rounds q, k and v to bfloat16 and packs them: see wgmma_attention.cuh. Head n is head n % heads of example n / heads. An array
// is [example][query or key][head][HEAD_WIDTH], with `row` elements between rows; k and v begin `step` and 2 step elements after
// their pointers.
#include "attention/wgmma_attention.cuh"

constexpr int CHUNK = 8, CHUNKS = PACKED_WIDTH / CHUNK; // CHUNK: elements of 16 bytes

// Packs chunk `i` of all chunks of an array.
static __device__ __forceinline__ void pack_chunk(
    const T *from, int64_t heads, int64_t length, int64_t row, const PackedArray &to, int64_t i) {
    const int chunk = i % CHUNKS, column = chunk * CHUNK;
    const int64_t at = i / CHUNKS % to.rows, head = i / CHUNKS / to.rows;
    float x[CHUNK] = {};
    if (at < length && column < HEAD_WIDTH) {
        const T *source = from + (head / heads * length + at) * row + head % heads * HEAD_WIDTH + column;
        #pragma unroll
        for (int h = 0; h < CHUNK; h += LOAD_WIDTH)
            if (column + h < HEAD_WIDTH) {
                const Vector<T, LOAD_WIDTH> loaded = load<T, LOAD_WIDTH>(source + h);
                #pragma unroll
                for (int j = 0; j < LOAD_WIDTH; j++) x[h + j] = loaded.lane[j];
            }
    }
    Vector<uint32_t, 4> words;
    #pragma unroll
    for (int h = 0; h < 4; h++) words.lane[h] = Format<BFLOAT16>::packed(x[2 * h], x[2 * h + 1]);
    char *const target = to.row(head, chunk / 8, at / 8 * 8);
    *(Vector<uint32_t, 4> *)(target + swizzle_128b(at % 8, chunk % 8)) = words;
}

// Macro LOAD_WIDTH: elements of a load. blockIdx.y numbers the arrays.
KERNEL attention_pack(const T *q, const T *k, const T *v, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
    int64_t row, int64_t step, char *scratch) {
    wait_for_inputs();
    const PackedInputs packed(scratch, batch, queries, keys);
    const PackedArray to = blockIdx.y == 0 ? packed.q : blockIdx.y == 1 ? packed.k : packed.v;
    const T *from = blockIdx.y == 0 ? q : blockIdx.y == 1 ? k + step : v + 2 * step;
    const int64_t chunks = batch * to.rows * CHUNKS;
    for (int64_t i = grid_index(); i < chunks; i += grid_size())
        pack_chunk(from, heads, blockIdx.y == 0 ? queries : keys, row, to, i);
}
