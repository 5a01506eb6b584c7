// Scales and splits q, k and v for the kernels on tensor cores (mma.cuh). For the gradient (GRADIENT) also the cotangent of the
// output, and for each query -log2(sum of exponentials) and the sum of cotangent times output. A block packs GROUP rows.
#include "attention/mma.cuh"

constexpr int PACK_THREADS = 256, CHUNKS = PADDED / 8; // chunks of eight numbers of a row
constexpr int MINE = (GROUP * CHUNKS + PACK_THREADS - 1) / PACK_THREADS;

// Rows `first` to first + GROUP of `rows` rows, times `sign`.
static __device__ __forceinline__ void pack(
    const T *from, int64_t stride, int64_t head, int64_t first, int64_t rows, float sign, const Packed &to) {
    float x[MINE][8], largest = 0;
    #pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int chunk = threadIdx.x + i * PACK_THREADS, row = chunk / CHUNKS, column = chunk % CHUNKS * 8;
        const T *const source = from + (first + row) * stride + column;
        const bool inside = row < GROUP && first + row < rows;
        #pragma unroll
        for (int h = 0; h < 8; h += 4) {
            if constexpr (WIDTH % 4 == 0) {
                const Vector<T, 4> four = inside && column + h < WIDTH ? load<T, 4>(source + h) : Vector<T, 4>{};
                #pragma unroll
                for (int j = 0; j < 4; j++) x[i][h + j] = four.lane[j];
            } else {
                #pragma unroll
                for (int j = 0; j < 4; j++) x[i][h + j] = inside && column + h + j < WIDTH ? source[h + j] : 0;
            }
        }
        #pragma unroll
        for (int h = 0; h < 8; h++) largest = Max::of(largest, fabsf(x[i][h]));
    }
    const Scale scale(FORMAT == FLOAT16 ? over_block<Max>(largest) : 1.0f);
    const float factor = FORMAT == FLOAT16 ? scale.factor * sign : sign;
    if (threadIdx.x == 0) to.inverse(head, first) = FORMAT == FLOAT16 ? scale.inverse : 1.0f;
    #pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int chunk = threadIdx.x + i * PACK_THREADS, row = chunk / CHUNKS, column = chunk % CHUNKS * 8;
        if (row >= GROUP) continue;
        Vector<uint32_t, 4> terms[TERMS];
        #pragma unroll
        for (int h = 0; h < 4; h++) {
            uint32_t found[TERMS];
            split(x[i][2 * h] * factor, x[i][2 * h + 1] * factor, found);
            #pragma unroll
            for (int t = 0; t < TERMS; t++) terms[t].lane[h] = found[t];
        }
        #pragma unroll
        for (int t = 0; t < TERMS; t++)
            store((uint32_t *)(to.row(head, first + row) + t * PADDED + column), 0, terms[t]);
    }
}

KERNEL __launch_bounds__(PACK_THREADS) attention_pack(const T *q, const T *k, const T *v,
#if GRADIENT
    const T *out, const T *logsumexp, const T *ct,
#endif
    int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t row, int64_t out_row, int64_t step, double scale,
    double dropout, int64_t stream, char *scratch) {
    wait_for_inputs();
    const int64_t query_groups = padded_length(queries) / GROUP, key_groups = padded_length(keys) / GROUP;
    const Packed to_q(scratch, batch, queries), to_k(scratch, batch, keys), to_v(scratch, batch, keys);
    int64_t group = blockIdx.x;
    const auto of_group = [&](int64_t groups) {
        return head_of(nullptr, nullptr, group / groups, heads, queries, keys, row, out_row, scale, dropout, stream);
    };
    if (group < batch * query_groups) {
        const Head head = of_group(query_groups);
        const int64_t first = group % query_groups * GROUP;
        return pack(q + head.before(queries, row), row, head.number, first, queries, scale < 0 ? -1.0f : 1.0f, to_q);
    }
    group -= batch * query_groups;
    if (group < 2 * batch * key_groups) {
        const bool values = group >= batch * key_groups;
        if (values) group -= batch * key_groups;
        const Head head = of_group(key_groups);
        const int64_t first = group % key_groups * GROUP;
        const T *const from = values ? v + 2 * step : k + step;
        return pack(from + head.before(keys, row), row, head.number, first, keys, 1, values ? to_v : to_k);
    }
#if GRADIENT
    group -= 2 * batch * key_groups;
    const Packed to_ct(scratch, batch, queries);
    const Head head = of_group(query_groups);
    const int64_t first = group % query_groups * GROUP, before = head.before(queries, out_row);
    pack(ct + before, out_row, head.number, first, queries, 1, to_ct);
    float *const shifts = (float *)scratch + head.number * padded_length(queries);
    float *const deltas = shifts + batch * padded_length(queries);
    for (int64_t i = first + threadIdx.x / WARP; i < first + GROUP; i += PACK_THREADS / WARP) {
        float sum = 0;
        if (i < queries)
            for (int c = threadIdx.x % WARP; c < WIDTH; c += WARP)
                sum = fma(out[before + i * out_row + c], ct[before + i * out_row + c], sum);
        sum = over_lanes<Sum, WARP>(sum);
        if (threadIdx.x % WARP == 0) {
            deltas[i] = sum;
            shifts[i] = i < queries ? -logsumexp[head.number * queries + i] * LOG2_E : -INFINITY;
        }
    }
#endif
}
