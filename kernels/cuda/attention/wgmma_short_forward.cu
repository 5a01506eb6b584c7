// Attention of short sequences in bfloat16 by WGMMA: the keys and values of a head fit into shared memory. Reading them takes
// longer than the products, so no launch packs them first: two producer warpgroups load rows, round them and store them in
// shared memory as WGMMA reads it (wgmma_attention.cuh). Two consumer warpgroups each compute 64 queries at a time, while the
// producers fill a second buffer with the next head. Persistent: one block for each multiprocessor.
//
// Macros: also QUERY_UNITS and KEY_UNITS: units of queries, keys and values in a buffer.
#include "attention/wgmma_pack.cuh"
#include "attention/wgmma_attention.cuh"

constexpr int PRODUCER_THREADS = 2 * WARPGROUP, THREADS = 2 * PRODUCER_THREADS;
// A unit: the rows that a producer warpgroup loads at once, UNIT_CHUNKS chunks a thread.
constexpr int UNIT_CHUNKS = 8, UNIT_ROWS = UNIT_CHUNKS * WARPGROUP / CHUNKS, UNIT_BYTES = TILE_BYTES<UNIT_ROWS>;
constexpr int UNITS = QUERY_UNITS + 2 * KEY_UNITS, QUERY_ROWS = QUERY_UNITS * UNIT_ROWS; // of a buffer

struct Barriers {
    Mbarrier full[2][UNITS], empty[2];
};

// The buffer of a thread, and the parity of its phase.
typedef PipelineState<2> BufferState;

// Some queries of a head. Units of a buffer: queries, then keys, then values.
struct Task {
    int64_t head;
    int first;

    __device__ __forceinline__ Task(int number, int queries) {
        const int groups = (queries + QUERY_ROWS - 1) / QUERY_ROWS;
        head = number / groups, first = number % groups * QUERY_ROWS;
    }
};

// A producer warpgroup loads every second unit.
static __device__ __forceinline__ void produce(const S *q, const S *k, const S *v, Barriers &barriers, char *shared, int tasks,
    int64_t heads, int queries, int keys, int64_t row) {
    const int thread = threadIdx.x % WARPGROUP;
    BufferState at;
    for (int number = blockIdx.x; number < tasks; number += gridDim.x, at.advance()) {
        const Task task(number, queries);
        const int64_t example = task.head / heads, column = task.head % heads * HEAD_WIDTH;
        #pragma unroll 1
        for (int unit = threadIdx.x / WARPGROUP; unit < UNITS; unit += 2) {
            const bool of_q = unit < QUERY_UNITS, of_k = unit < QUERY_UNITS + KEY_UNITS;
            const int length = of_q ? queries : keys;
            const int first = of_q ? task.first + unit * UNIT_ROWS : (unit - QUERY_UNITS) % KEY_UNITS * UNIT_ROWS;
            const S *const from = (of_q ? q : of_k ? k : v) + example * length * row + column;
            float x[UNIT_CHUNKS][CHUNK];
            #pragma unroll
            for (int i = 0; i < UNIT_CHUNKS; i++) {
                const int chunk = i * WARPGROUP + thread, of_row = first + chunk / CHUNKS;
                load_chunk(from + of_row * row, of_row < length, chunk % CHUNKS * CHUNK, x[i]);
            }
            barriers.empty[at.stage].wait(at.phase ^ 1);
            char *const to = shared + (at.stage * UNITS + unit) * UNIT_BYTES;
            #pragma unroll
            for (int i = 0; i < UNIT_CHUNKS; i++) {
                const int chunk = i * WARPGROUP + thread, column = chunk % CHUNKS;
                store_chunk(to + column / 8 * (UNIT_ROWS * ROW_BYTES) + swizzle_128b(chunk / CHUNKS, column % 8), x[i]);
            }
            fence_proxy_async();
            arrive_per_warp(barriers.full[at.stage][unit]);
        }
    }
}

// A consumer warpgroup computes every second tile of 64 queries.
static __device__ __forceinline__ void consume(S *out, T *logsumexp, Barriers &barriers, const char *shared, int tasks,
    int64_t heads, int queries, int keys, int64_t out_row, float scale) {
    BufferState at;
    for (int number = blockIdx.x; number < tasks; number += gridDim.x, at.advance()) {
        const Task task(number, queries);
        const char *const q = shared + at.stage * UNITS * UNIT_BYTES, *const k = q + QUERY_UNITS * UNIT_BYTES;
        const char *const v = k + KEY_UNITS * UNIT_BYTES;
        Mbarrier *const full = barriers.full[at.stage];
        full[0].wait(at.phase);
        for (int in_task = (threadIdx.x / WARPGROUP - 2) * 64; in_task < QUERY_ROWS; in_task += 128) {
            const int first = task.first + in_task, unit = in_task / UNIT_ROWS;
            if (first >= queries) break;
            full[unit].wait(at.phase);
            float outputs[OUTPUTS] = {};
            RunningSoftmax<UNIT_ROWS / 2> softmax;
            #pragma unroll 1
            for (int j = 0; j < KEY_UNITS; j++) {
                if (CAUSAL && j * UNIT_ROWS > first + 63) break;
                float scores[UNIT_ROWS / 2];
                uint32_t weights[UNIT_ROWS / 4];
                full[QUERY_UNITS + j].wait(at.phase);
                wgmma_fence();
                #pragma unroll
                for (int i = 0; i < PACKED_WIDTH / 16; i++)
                    wgmma<BFLOAT16>(scores, along_width<UNIT_ROWS>(q + unit * UNIT_BYTES, i, in_task % UNIT_ROWS),
                        along_width<UNIT_ROWS>(k + j * UNIT_BYTES, i), i > 0);
                wgmma_commit_group();
                wgmma_wait_group<0>();
                wgmma_fence_operand(scores);
                mask(scores, first, j * UNIT_ROWS, keys);
                softmax.update(scores, scale);
                softmax.rescale(outputs);
                to_bfloat16(scores, weights);
                full[QUERY_UNITS + KEY_UNITS + j].wait(at.phase);
                start_sums<UNIT_ROWS>(outputs, weights, v + j * UNIT_BYTES, true);
                wgmma_wait_group<0>();
                wgmma_fence_operand(outputs);
            }
            const int64_t start = task.head / heads * queries * out_row + task.head % heads * HEAD_WIDTH;
            softmax.store_results(
                outputs, scale, first, queries, out + start, out_row, logsumexp + task.head * queries);
        }
        for (int unit = 1; unit < UNITS; unit++) full[unit].wait(at.phase); // those that this warpgroup has not read
        arrive_per_warp(barriers.empty[at.stage]);
    }
}

KERNEL __launch_bounds__(THREADS, 1) attention_wgmma_short(const S *q, const S *k, const S *v, S *out, T *logsumexp,
    int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t row, int64_t out_row, int64_t step, double scale) {
    wait_for_inputs();
    __shared__ Barriers barriers;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            for (Mbarrier &full : barriers.full[i]) full.init(WARPGROUP / WARP);
            barriers.empty[i].init(PRODUCER_THREADS / WARP);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    char *const shared = SHARED_BUFFERS(char[UNITS * UNIT_BYTES], shared_bytes)[0];
    const int tasks = batch * ((queries + QUERY_ROWS - 1) / QUERY_ROWS);
    if (threadIdx.x < PRODUCER_THREADS) {
        warpgroup_reg_dealloc<104>();
        produce(q, k + step, v + 2 * step, barriers, shared, tasks, heads, queries, keys, row);
    } else {
        warpgroup_reg_alloc<152>();
        consume(out, logsumexp, barriers, shared, tasks, heads, queries, keys, out_row, (float)scale * LOG2_E);
    }
}
