// Attention of short sequences whose q, k and v are side by side, and its gradient, by mma.sync in bf16x3. A block computes
// RowAttention::TILE rows, which are whole sequences, and each of its warps some heads. All loads from device memory are in
// flight at once. Later products read the arrays again, from the L1 cache.
//
// Macros (unpacked.py): SEQUENCE_ROWS: rows of a sequence. HEAD_COUNT, HEAD_WIDTH. CAUSAL_ORDER: 1 with a causal mask. BLOCK_THREADS:
// threads of a block.
#include "attention/row_attention.cuh"

typedef RowAttention<16, SEQUENCE_ROWS, HEAD_COUNT, HEAD_WIDTH, CAUSAL_ORDER> Attention;
typedef T Scores[Attention::SCRATCH]; // of all tasks

// Threads on a multiprocessor at the same time. Their registers hold all loads of the gradient.
constexpr int GRAD_THREADS = HEAD_WIDTH > 32 ? 256 : 512;

// The first row of the block.
__device__ __forceinline__ int64_t first_row() { return (int64_t)blockIdx.x * Attention::TILE; }

KERNEL __launch_bounds__(BLOCK_THREADS) short_attention(const T *x, T *out, T *logsumexp, double scale) {
    wait_for_inputs();
    const int64_t row = first_row();
    Attention::forward<BLOCK_THREADS>(threadIdx.x, x + row * Attention::PITCH, out + row * Attention::ACROSS,
        logsumexp + row * HEAD_COUNT, *SHARED_SCORES(Scores, shared_bytes), (T)scale);
}

KERNEL __launch_bounds__(BLOCK_THREADS, GRAD_THREADS / BLOCK_THREADS) short_attention_grad(
    const T *x, const T *out, const T *logsumexp, const T *ct, T *grad, double scale) {
    wait_for_inputs();
    const int64_t row = first_row();
    Attention::backward<BLOCK_THREADS>(threadIdx.x, x + row * Attention::PITCH, out + row * Attention::ACROSS,
        logsumexp + row * HEAD_COUNT, ct + row * Attention::ACROSS, grad + row * Attention::PITCH, *SHARED_SCORES(Scores, shared_bytes), (T)scale);
}
