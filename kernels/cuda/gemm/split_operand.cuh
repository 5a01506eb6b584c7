// The operands of gemm/gemm_bf16x3.cuh: copied to a buffer in shared memory as float32, then split into bfloat16 terms in a stage.
//
// Macros: TILE_M, TILE_N, TRANSPOSE_A, TRANSPOSE_B. WIDE_A, WIDE_B: elements per load.
#pragma once
#include "gemm/gemm.cuh"
#include "sm90/bf16x3.cuh"

constexpr int TILE_K = 32; // K of a stage

// ROWS rows of op(A), or columns of op(B). Global memory has them as [row][k] if K_MAJOR, else as [k][row], with WIDE elements
// per load. Shared memory has chunks of eight elements that are neighbours in global memory. A plane holds all chunks with the
// same eight k (or rows). Planes are padded so that eight threads write without bank conflicts.
template <int ROWS, bool K_MAJOR, int WIDE> struct Operand {
    static constexpr int PLANES = (K_MAJOR ? TILE_K : ROWS) / CHUNK_ELEMENTS, PLANE_CHUNKS = K_MAJOR ? ROWS : TILE_K;
    static constexpr int PLANE = (PLANE_CHUNKS + (K_MAJOR ? 2 : 1)) * CHUNK_BYTES, TERM = PLANES * PLANE; // bytes
    static constexpr int SIZE = BF16X3_TERMS * TERM; // bytes of a stage
    static constexpr int CHUNKS = PLANES * PLANE_CHUNKS, PER_THREAD = (CHUNKS + WARPGROUP - 1) / WARPGROUP;
    static constexpr int BUFFER = CHUNKS * CHUNK_ELEMENTS; // float32 elements before the split
    static_assert(ROWS % CHUNK_ELEMENTS == 0, "whole chunks");

    const T *x;
    int length, k, first; // rows and k of the matrix, and the first row of the tile

    // By a warpgroup: starts the copies of a stage from k0 on. Neighbouring lanes of a warp copy neighbours in global memory.
    __device__ __forceinline__ void start(T *buffer, int k0) const {
        constexpr int COPIES = CHUNK_ELEMENTS / WIDE;
        constexpr int UNROLL = WIDE == VECTOR && CHUNKS % WARPGROUP == 0 ? PER_THREAD * COPIES : 1;
        #pragma unroll UNROLL // otherwise the addresses need too many registers
        for (int i = 0; i < PER_THREAD * COPIES; i++) {
            const int copy = i % COPIES * WARP + threadIdx.x % WARP, j = copy % COPIES * WIDE;
            const int at = i / COPIES * WARPGROUP + threadIdx.x % WARPGROUP / WARP * WARP + copy / COPIES;
            if (CHUNKS % WARPGROUP != 0 && at >= CHUNKS) break;
            const int across = at % PLANES * CHUNK_ELEMENTS, down = at / PLANES;
            const int row = first + (K_MAJOR ? down : across), depth = k0 + (K_MAJOR ? across : down);
            const int remaining = row < length && depth < k ? K_MAJOR ? k - depth : length - row : 0;
            const int from = K_MAJOR ? row * k + depth : depth * length + row;
            cp_async<WIDE * sizeof(T)>(buffer + swizzled(at, j), x + from + j, remaining > j);
        }
    }

    // By a warpgroup: splits the chunks of a buffer, and stores them in a stage. Passes each to `sums` before. Loads a chunk before
    // it stores the one before, so that the thread does not wait for each.
    template <class Sums> static __device__ __forceinline__ void split(const T *buffer, char *stage, Sums &sums) {
        float next[CHUNK_ELEMENTS];
        load_chunk(next, buffer, 0);
        #pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int at = i * WARPGROUP + threadIdx.x % WARPGROUP;
            if (CHUNKS % WARPGROUP != 0 && at >= CHUNKS) break;
            float found[CHUNK_ELEMENTS];
            #pragma unroll
            for (int j = 0; j < CHUNK_ELEMENTS; j++) found[j] = next[j];
            if (i + 1 < PER_THREAD) load_chunk(next, buffer, i + 1);
            sums.add(found);
            Chunk terms[BF16X3_TERMS];
            split_bf16x3(terms, found);
            #pragma unroll
            for (int p = 0; p < BF16X3_TERMS; p++)
                *(Chunk *)(stage + p * TERM + at % PLANES * PLANE + at / PLANES * CHUNK_BYTES) = terms[p];
        }
    }

    // The descriptor of term 0 and k 0 from row `row` on, and the offset to add for another term and k.
    static __device__ __forceinline__ uint64_t descriptor(const char *stage, int row) {
        return K_MAJOR ? smem_descriptor(stage + row * CHUNK_BYTES, PLANE, CORE_MATRIX_BYTES, NO_SWIZZLE)
                       : smem_descriptor(stage + row / CHUNK_ELEMENTS * PLANE, CORE_MATRIX_BYTES, PLANE, NO_SWIZZLE);
    }
    static __device__ __forceinline__ int offset(int term, int k) {
        return (term * TERM + (K_MAJOR ? k / CHUNK_ELEMENTS * PLANE : k * CHUNK_BYTES)) / CHUNK_BYTES;
    }

  private:
    // Chunk i of this thread, if there is one.
    static __device__ __forceinline__ void load_chunk(float (&to)[CHUNK_ELEMENTS], const T *buffer, int i) {
        const int at = i * WARPGROUP + threadIdx.x % WARPGROUP;
        if (CHUNKS % WARPGROUP != 0 && at >= CHUNKS) return;
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j += VECTOR) {
            const Vector<T, VECTOR> v = load<T, VECTOR>(buffer + swizzled(at, j));
            #pragma unroll
            for (int h = 0; h < VECTOR; h++) to[j + h] = v.lane[h];
        }
    }
    // The position of element j of chunk `at` in a buffer. The halves of some chunks are swapped so that eight threads read
    // without bank conflicts.
    static __device__ __forceinline__ int swizzled(int at, int j) {
        return at * CHUNK_ELEMENTS + (j / VECTOR ^ at / 4 % 2) * VECTOR + j % VECTOR;
    }
};
typedef Operand<TILE_M, !TRANSPOSE_A, WIDE_A> OperandA;
typedef Operand<TILE_N, TRANSPOSE_B, WIDE_B> OperandB;
constexpr int STAGE = OperandA::SIZE + OperandB::SIZE, BUFFER = OperandA::BUFFER + OperandB::BUFFER;

// The sums of the rows of op(A) over a split, which a splitting thread adds up.
template <bool ON> struct RowSums {
    static_assert(ON && TRANSPOSE_A && WARP % OperandA::PLANES == 0, "the chunks of a thread are of the same rows");
    float totals[CHUNK_ELEMENTS] = {};

    __device__ __forceinline__ void add(const float (&found)[CHUNK_ELEMENTS]) {
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) totals[j] += found[j];
    }
    // Stores the sums of each warp, TILE_M in a row, unless `to` is null.
    __device__ __forceinline__ void finish(T *to) {
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) {
            float total = totals[j];
            #pragma unroll
            for (int lanes = OperandA::PLANES; lanes < WARP; lanes *= 2) total += __shfl_xor_sync(FULL_MASK, total, lanes);
            const int lane = threadIdx.x % WARP;
            if (to && lane < OperandA::PLANES) to[threadIdx.x % WARPGROUP / WARP * TILE_M + lane * CHUNK_ELEMENTS + j] = total;
        }
    }
};
template <> struct RowSums<false> {
    __device__ __forceinline__ void add(const float (&)[CHUNK_ELEMENTS]) {}
};
