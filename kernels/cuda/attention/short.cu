// Attention of short sequences whose q, k and v are side by side, and its gradient, by mma.sync in bf16x3. A block computes
// RowAttention::TILE rows, which are whole sequences, and each of its warps some heads. An array is loaded once for each product
// that reads it; only the first load goes to device memory, the next ones hit the cache.
//
// Macros (short.py): SEQUENCE_ROWS: rows of a sequence. HEAD_COUNT, HEAD_WIDTH. CAUSAL_ORDER: 1 with a causal mask. BLOCK_THREADS:
// threads of a block. COPIED_ROWS: whether the gradient first copies its rows to shared memory.
#include "attention/row_attention.cuh"
#include "common/cp_async.cuh"

typedef RowAttention<16, SEQUENCE_ROWS, HEAD_COUNT, HEAD_WIDTH, CAUSAL_ORDER> Attention;

// The rows of the gradient in shared memory, all in flight at once. Padded against bank conflicts.
struct StagedRows {
    static constexpr int X_PITCH = Attention::PITCH + VECTOR, CT_PITCH = Attention::ACROSS + VECTOR;
    T x[Attention::TILE * X_PITCH], ct[Attention::TILE * CT_PITCH], out[Attention::TILE * CT_PITCH];
    T logsumexp[Attention::TILE * HEAD_COUNT];

    template <int LENGTH, int PITCH> static __device__ __forceinline__ void start(T *to, const T *from) {
        for (int i = threadIdx.x * VECTOR; i < Attention::TILE * LENGTH; i += BLOCK_THREADS * VECTOR)
            cp_async<16>(to + i / LENGTH * PITCH + i % LENGTH, from + i, true);
    }
};
static_assert(Attention::SCRATCH * sizeof(T) + (COPIED_ROWS ? sizeof(StagedRows) : 0) == SHARED_BYTES, "as short.py says");

// The first row of the block.
__device__ __forceinline__ int64_t first_row() { return (int64_t)blockIdx.x * Attention::TILE; }

KERNEL __launch_bounds__(BLOCK_THREADS) short_attention(const T *x, T *out, T *logsumexp, double scale) {
    wait_for_inputs();
    const int64_t row = first_row();
    Attention::forward<BLOCK_THREADS>(threadIdx.x, x + row * Attention::PITCH, out + row * Attention::ACROSS,
        logsumexp + row * HEAD_COUNT, (T *)shared_bytes, (T)scale);
}

KERNEL __launch_bounds__(BLOCK_THREADS) short_attention_grad(
    const T *x, const T *out, const T *logsumexp, const T *ct, T *grad, double scale) {
    wait_for_inputs();
    const int64_t row = first_row();
    x += row * Attention::PITCH, grad += row * Attention::PITCH;
    out += row * Attention::ACROSS, ct += row * Attention::ACROSS, logsumexp += row * HEAD_COUNT;
    T *const scratch = (T *)shared_bytes;
#if COPIED_ROWS
    StagedRows &rows = *(StagedRows *)(scratch + Attention::SCRATCH);
    StagedRows::start<Attention::PITCH, StagedRows::X_PITCH>(rows.x, x);
    StagedRows::start<Attention::ACROSS, StagedRows::CT_PITCH>(rows.ct, ct);
    StagedRows::start<Attention::ACROSS, StagedRows::CT_PITCH>(rows.out, out);
    StagedRows::start<HEAD_COUNT, HEAD_COUNT>(rows.logsumexp, logsumexp);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
    Attention::backward<BLOCK_THREADS, StagedRows::X_PITCH, StagedRows::CT_PITCH>(
        threadIdx.x, rows.x, rows.out, rows.logsumexp, rows.ct, grad, scratch, (T)scale);
#else
    Attention::backward<BLOCK_THREADS>(threadIdx.x, x, out, logsumexp, ct, grad, scratch, (T)scale);
#endif
}
