// Before the kernels on tensor cores (mma.cuh): scales and splits q, k, v, and for the gradient (GRADIENT) the cotangent of the
// output. A block packs GROUP rows. For the gradient also computes, for each query, -log2(sum of exponentials) and the sum of
// cotangent times output; with DIRECT only these.
#include "attention/mma.cuh"

constexpr int PACK_THREADS = 256, CHUNKS = PADDED / 8; // chunks of eight numbers of a row
constexpr int MINE = (GROUP * CHUNKS + PACK_THREADS - 1) / PACK_THREADS;

#if !DIRECT
// Rows `first` to first + GROUP, times `sign`.
static __device__ __forceinline__ void pack(const Rows &from, int first, float sign, const Packed &to) {
    float x[MINE][8], largest = 0;
    #pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int chunk = threadIdx.x + i * PACK_THREADS, row = chunk / CHUNKS;
        load_eight(row < GROUP ? from.row(first + row) : nullptr, chunk % CHUNKS * 8, x[i]);
        #pragma unroll
        for (int h = 0; h < 8; h++) largest = Max::of(largest, fabsf(x[i][h]));
    }
    const Scale scale(FORMAT == FLOAT16 ? over_block<Max>(largest) : 1.0f);
    const float factor = FORMAT == FLOAT16 ? scale.factor * sign : sign;
    if (threadIdx.x == 0) to.inverses[first / GROUP] = FORMAT == FLOAT16 ? scale.inverse : 1.0f;
    #pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int chunk = threadIdx.x + i * PACK_THREADS, row = chunk / CHUNKS, column = chunk % CHUNKS * 8;
        if (row >= GROUP) continue;
        Vector<uint32_t, 4> terms[TERMS];
        split_eight(x[i], factor, terms);
        #pragma unroll
        for (int t = 0; t < TERMS; t++)
            store((uint32_t *)(to.numbers + ((int64_t)(first + row) * TERMS + t) * PADDED + column), 0, terms[t]);
    }
}
#endif

#if GRADIENT
// shifts and deltas (mma_backward.cu) of GROUP queries.
static __device__ __forceinline__ void sum_rows(const Head &head, int first, const T *out, const T *logsumexp, const T *ct,
    float *shifts, float *deltas) {
    const int64_t before = head.before(head.queries, head.out_row);
    for (int i = first + threadIdx.x / WARP; i < first + GROUP; i += PACK_THREADS / WARP) {
        const int64_t at = before + i * head.out_row;
        float sum = 0;
        if (i < head.queries)
            for (int c = threadIdx.x % WARP; c < WIDTH; c += WARP) sum = fma(out[at + c], ct[at + c], sum);
        sum = over_lanes<Sum, WARP>(sum);
        if (threadIdx.x % WARP == 0) {
            deltas[i] = sum;
            shifts[i] = i < head.queries ? -logsumexp[head.number * head.queries + i] * LOG2_E : -INFINITY;
        }
    }
}
#endif

KERNEL __launch_bounds__(PACK_THREADS) attention_pack(const T *q, const T *k, const T *v,
    IF(GRADIENT, const T *out, const T *logsumexp, const T *ct,) int64_t batch, int64_t heads, int64_t queries, int64_t keys,
    int64_t row, int64_t out_row, int64_t step, double scale, double dropout, int64_t stream, char *scratch) {
    wait_for_inputs();
    const int64_t query_groups = padded_length(queries) / GROUP, key_groups = padded_length(keys) / GROUP;
    int64_t group = blockIdx.x;
    Scratch packed(scratch, batch, queries, keys);
    // Whether the block's group is in an array of `groups` groups a head. If not, `group` is then counted from the next array.
    const auto belongs = [&](int64_t groups) {
        const bool inside = group < batch * groups;
        if (!inside) group -= batch * groups;
        return inside;
    };
    const auto of_group = [&](int64_t groups) {
        return head_of(nullptr, nullptr, nullptr, group / groups, heads, queries, keys, row, out_row, scale, dropout, stream);
    };
#if !DIRECT
#if GRADIENT
    const Head of_query = of_group(query_groups);
    const Rows of_q = {q + of_query.before(queries, row), row, (int)queries};
    const Packed to_q = operand_of(of_q, packed, batch, of_query.number);
    if (belongs(query_groups)) return pack(of_q, (int)(group % query_groups) * GROUP, scale < 0 ? -1.0f : 1.0f, to_q);
#endif
    for (int i = 0; i < 2; i++) {
        const Head head = of_group(key_groups);
        const Rows from = {(i == 0 ? k + step : v + 2 * step) + head.before(keys, row), row, (int)keys};
        const Packed to = operand_of(from, packed, batch, head.number);
        if (belongs(key_groups)) return pack(from, (int)(group % key_groups) * GROUP, 1, to);
    }
#endif
#if GRADIENT
    const Head head = of_group(query_groups);
    const int first = (int)(group % query_groups) * GROUP;
    const Rows of_ct = {ct + head.before(queries, out_row), out_row, (int)queries};
    const Operand to = operand_of(of_ct, packed, batch, head.number);
#if !DIRECT
    pack(of_ct, first, 1, to);
#endif
    const int64_t queries_before = head.number * padded_length(queries);
    sum_rows(head, first, out, logsumexp, ct, packed.shifts + queries_before, packed.deltas + queries_before);
#endif
}
