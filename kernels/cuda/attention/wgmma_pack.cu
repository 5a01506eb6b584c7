// The first launch of attention by WGMMA, and of its gradient: packs arrays (see wgmma_scratch.cuh). blockIdx.y numbers the arrays.
#include "attention/wgmma_pack.cuh"
#include "attention/wgmma_scratch.cuh"
#include "common/rounding.cuh"

#ifdef SCRATCH_Q // q, k and v in bfloat16
KERNEL attention_pack(const S *q, const S *k, const S *v, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
    int64_t row, int64_t step, char *scratch) {
    wait_for_inputs();
    const Inputs packed(scratch, batch, queries, keys);
    if (blockIdx.y == 0)
        pack_array(q, batch, heads, queries, row, packed.q);
    else if (blockIdx.y == 1)
        pack_array(k + step, batch, heads, keys, row, packed.k);
    else
        pack_array(v + 2 * step, batch, heads, keys, row, packed.v);
}
#elif OPERAND_TERMS == 1 // the gradient in bfloat16
__device__ __forceinline__ void clear_turns(const GradientScratch &packed, int64_t batch) {
    for (int64_t i = grid_index(); i < batch * packed.q.rows / BLOCK_Q; i += grid_size()) packed.turns[i] = 0;
}

// Computes the statistics of queries, and packs the cotangent if not DIRECT.
__device__ __forceinline__ void pack_cotangent(const GradientScratch &packed, const S *out, const T *logsumexp, const S *ct,
    int64_t batch, int64_t heads, int64_t queries, int64_t out_row) {
    for (int64_t i = grid_index(); i < batch * packed.ct.rows * CHUNKS; i += grid_size()) { // whole warps
        const PackedChunk chunk(packed.ct, i);
        float x[CHUNK], y[CHUNK], sum = 0;
        chunk.load_from(ct, heads, queries, out_row, x);
        chunk.load_from(out, heads, queries, out_row, y);
        if (!DIRECT) chunk.store_to(packed.ct, x); // delta has to fit the rounded cotangent that the products read
        #pragma unroll
        for (int j = 0; j < CHUNK; j++) sum += x[j] * y[j];
        sum = over_lanes<Sum, CHUNKS>(sum);
        if (chunk.chunk == 0) packed.set_stats(chunk.head, chunk.at, queries, logsumexp, sum);
    }
}

KERNEL attention_pack_grad(const S *q, const S *k, const S *v, const S *out, const T *logsumexp, const S *ct,
    int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t row, int64_t out_row, int64_t step, char *scratch) {
    wait_for_inputs();
    const GradientScratch packed(scratch, batch, queries, keys);
    if (blockIdx.y == 0) {
        pack_array(q, batch, heads, queries, row, packed.q);
        clear_turns(packed, batch);
    } else if (blockIdx.y == 1) {
        pack_array(k + step, batch, heads, keys, row, packed.k);
    } else if (blockIdx.y == 2) {
        pack_array(v + 2 * step, batch, heads, keys, row, packed.v);
    } else {
        pack_cotangent(packed, out, logsumexp, ct, batch, heads, queries, out_row);
    }
}

// The same if DIRECT.
KERNEL attention_statistics(const S *out, const T *logsumexp, const S *ct, int64_t batch, int64_t heads, int64_t queries,
    int64_t keys, int64_t out_row, char *scratch) {
    wait_for_inputs();
    const GradientScratch packed(scratch, batch, queries, keys);
    clear_turns(packed, batch);
    pack_cotangent(packed, out, logsumexp, ct, batch, heads, queries, out_row);
}
#else // the gradient in fp16x2: a block scales, splits and packs GROUP rows of an array
constexpr int PACK_THREADS = 256, MINE = GROUP * CHUNKS / PACK_THREADS; // MINE: chunks of a thread
static_assert(BLOCK_Q == GROUP && GROUP * CHUNKS % PACK_THREADS == 0, "whole groups and chunks");
static_assert(PACKED_WIDTH == SEGMENT_WIDTH, "a segment for each term");

// The chunks of this thread.
typedef float Chunks[MINE][CHUNK];

__device__ __forceinline__ int row_of(int i) { return (i * PACK_THREADS + threadIdx.x) / CHUNKS; }
__device__ __forceinline__ int chunk_of() { return threadIdx.x % CHUNKS; }

// Loads rows of a head, which begin at `from`.
static __device__ __forceinline__ void load_rows(const T *from, int64_t row, int64_t first, int64_t length, Chunks &x) {
    #pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int64_t at = first + row_of(i);
        load_chunk(from + at * row, at < length, chunk_of() * CHUNK, x[i]);
    }
}

// Scales, splits and stores rows. Returns the inverse of the scale.
static __device__ __forceinline__ float store_rows(const Chunks &x, const PackedArray &to, int64_t head, int64_t first) {
    float largest = 0;
    #pragma unroll
    for (int i = 0; i < MINE * CHUNK; i++) largest = Max::of(largest, fabsf(x[i / CHUNK][i % CHUNK]));
    const Scale scale(over_block<Max>(largest));
    #pragma unroll
    for (int i = 0; i < MINE; i++) {
        Vector<uint32_t, 4> terms[2];
        #pragma unroll
        for (int h = 0; h < 4; h++) {
            uint32_t found[2];
            split_terms<FLOAT16>(x[i][2 * h] * scale.factor, x[i][2 * h + 1] * scale.factor, found);
            terms[0].lane[h] = found[0], terms[1].lane[h] = found[1];
        }
        const int at = row_of(i);
        #pragma unroll
        for (int t = 0; t < 2; t++) {
            char *const rows = to.row(head, t, first + at / 8 * 8);
            *(Vector<uint32_t, 4> *)(rows + swizzle_128b(at % 8, chunk_of())) = terms[t];
        }
    }
    return scale.inverse;
}

KERNEL __launch_bounds__(PACK_THREADS) attention_pack_grad_fp16x2(const T *q, const T *k, const T *v, const T *out,
    const T *logsumexp, const T *ct, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t row, int64_t out_row,
    int64_t step, char *scratch) {
    wait_for_inputs();
    const GradientScratch packed(scratch, batch, queries, keys);
    const bool of_q = blockIdx.y == 0, of_k = blockIdx.y == 1, of_v = blockIdx.y == 2;
    const PackedArray to = of_q ? packed.q : of_k ? packed.k : of_v ? packed.v : packed.ct;
    const int64_t groups = to.rows / GROUP, head = blockIdx.x / groups, first = blockIdx.x % groups * GROUP;
    if (head >= batch) return;
    const int64_t length = of_k || of_v ? keys : queries, stride = of_q || of_k || of_v ? row : out_row;
    const int64_t start = head / heads * length * stride + head % heads * HEAD_WIDTH;
    Chunks x;
    load_rows((of_q ? q : of_k ? k + step : of_v ? v + 2 * step : ct) + start, stride, first, length, x);
    const float inverse = store_rows(x, to, head, first);
    if (threadIdx.x == 0) {
        if (of_k || of_v)
            packed.inverses[2 * (int64_t)blockIdx.x + of_v] = inverse;
        else
            packed.stats[blockIdx.x * (int64_t)STATS + 2 * BLOCK_Q + !of_q] = inverse;
        if (of_q) packed.turns[blockIdx.x] = 0;
    }
    if (blockIdx.y < 3) return;
    Chunks y;
    load_rows(out + start, stride, first, length, y);
    #pragma unroll
    for (int i = 0; i < MINE; i++) {
        float sum = 0;
        #pragma unroll
        for (int j = 0; j < CHUNK; j++) sum = fma(x[i][j], y[i][j], sum);
        sum = over_lanes<Sum, CHUNKS>(sum);
        if (chunk_of() == 0) packed.set_stats(head, first + row_of(i), queries, logsumexp, sum);
    }
}
#endif
